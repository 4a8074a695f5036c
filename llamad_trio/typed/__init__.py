"""Python types and functions as schemas, and JSON back as their instances."""

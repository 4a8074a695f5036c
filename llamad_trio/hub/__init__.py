"""Model files: found by name, fetched, checked."""

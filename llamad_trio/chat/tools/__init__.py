"""Tool-call syntaxes: one small module for each family of models."""

"""One model, many requests: the actors of an engine, and what users hold of it."""

"""The Trio tasks of an engine, and the lane that owns an OS thread."""

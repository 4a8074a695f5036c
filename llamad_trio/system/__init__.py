"""What Trio and the operating system offer every room."""

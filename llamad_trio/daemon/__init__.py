"""The process around the socket: configuration, signals, systemd, metrics."""

"""An engine that answers over a socket: a daemon's, or one in a process of its own."""

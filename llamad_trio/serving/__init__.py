"""Engines offered on a Unix socket."""

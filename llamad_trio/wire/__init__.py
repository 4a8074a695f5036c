"""The wire format: what a line means, and how to write one.  No sockets, no Trio.

`docs/protocol.md` is its description.
"""

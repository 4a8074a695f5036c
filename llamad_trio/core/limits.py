"""What a daemon allows its clients.  Decides ranges and defaults; knows no socket and no clock."""

from __future__ import annotations

import attrs

from llamad_trio.core.fields import apply_converters, checked, number, typed_init, whole_number

MIB = 1024 * 1024
DAY_S = 86_400.0


@typed_init
@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Limits:
    """Limits of one daemon.  Frozen; numbers out of range are clamped.

    Args:
        max_request_bytes: most bytes of one request, 64 to 1 GiB.
        request_timeout_s: seconds a client has to send its request, 0.001 to a day.
        stream_timeout_s: seconds a reply may stand still, because no token came or
            because the client takes none; 0.001 to a day.
        max_connections: connections at once, 1-65,536; more are refused with `Busy`.

    Raises:
        ProtocolError: a field has the wrong type.
    """

    max_request_bytes: int = attrs.field(
        default=MIB, metadata=checked(whole_number(64, 1024 * MIB))
    )
    request_timeout_s: float = attrs.field(
        default=30.0, metadata=checked(number(30.0, 0.001, DAY_S))
    )
    stream_timeout_s: float = attrs.field(
        default=60.0, metadata=checked(number(60.0, 0.001, DAY_S))
    )
    max_connections: int = attrs.field(default=256, metadata=checked(whole_number(1, 65_536)))

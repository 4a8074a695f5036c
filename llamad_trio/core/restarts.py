"""Whether a model that failed is opened again, and when.  Knows no clock: times are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from llamad_trio.core.errors import Failure
from llamad_trio.core.fields import apply_converters, checked, number, typed_init, whole_number

DAY_S = 86_400.0


@typed_init
@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class RestartPolicy:
    """How often a model that fails is opened again.  Frozen; numbers out of range are clamped.

    Args:
        max_restarts: with more failures than this within the window, the supervisor gives up.
        within_s: length of the window, in seconds.
        first_delay_s: wait before the first restart; each further one in the window waits
            twice as long.
        max_delay_s: longest wait.
        jitter: the share by which a wait is made longer or shorter at random, 0-1, so that
            what failed together is not opened together.

    Raises:
        ProtocolError: a field has the wrong type.
    """

    max_restarts: int = attrs.field(default=5, metadata=checked(whole_number(0, 1_000_000)))
    within_s: float = attrs.field(default=60.0, metadata=checked(number(60.0, 0.0, 365 * DAY_S)))
    first_delay_s: float = attrs.field(default=0.1, metadata=checked(number(0.1, 0.0, DAY_S)))
    max_delay_s: float = attrs.field(default=30.0, metadata=checked(number(30.0, 0.0, DAY_S)))
    jitter: float = attrs.field(default=0.2, metadata=checked(number(0.2, 0.0, 1.0)))


class RestartBook:
    """The failures of one model, as far as they count.

    Args:
        policy: what is allowed.
        random: gives a number from 0 to 1 for the jitter.
    """

    def __init__(self, policy: RestartPolicy, random: Callable[[], float]) -> None:
        self._policy = policy
        self._random = random
        self._failures: deque[Failure] = deque(maxlen=policy.max_restarts + 1)

    @property
    def failures(self) -> Sequence[Failure]:
        """Those that count, oldest first."""
        return tuple(self._failures)

    def note_failure(self, now: float, error: BaseException) -> float | None:
        """Note a failure; the seconds to wait before a restart, `None` to give up."""
        policy = self._policy
        while self._failures and self._failures[0].time_s < now - policy.within_s:
            self._failures.popleft()
        self._failures.append(Failure(now, f"{type(error).__name__}: {error}"))
        n = len(self._failures)
        if n > policy.max_restarts:
            return None
        # The exponent has an end: 2.0 ** 1024 is none.
        delay_s = min(policy.first_delay_s * 2.0 ** min(n - 1, 60), policy.max_delay_s)
        return delay_s * (1 + policy.jitter * (2 * self._random() - 1))

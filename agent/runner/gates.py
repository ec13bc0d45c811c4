"""Admission to the engine: the pause of requests, and the limit on results per weight version."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trajpack.agent.errors import StaleEpisodeError
from trajpack.agent.runner.policy import StalenessPolicy
from trajpack.agent.runner.results import EpisodeResult
from trajpack.packing.conversion import merge_spans
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from anyio import CancelScope


class GenerationGate:
    """Re-entrant pause switch for requests to an engine, with a count of requests in flight.

    A pause may also stop the time limits of episodes, so that no episode is late for having
    waited at the gate.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        """Requests that were sent and have no reply yet."""
        self._num_closings = 0
        self._num_standstills = 0
        self._limits: set[CancelScope] = set()
        self._left_s: dict[CancelScope, float] = {}
        # An event belongs to the event loop that first waits for it; a runner may see several.
        self._opened: asyncio.Event | None = None
        self._drained: asyncio.Event | None = None

    @property
    def is_closed(self) -> bool:
        """Whether requests have to wait."""
        return self._num_closings > 0

    @property
    def is_still(self) -> bool:
        """Whether time limits stand still."""
        return self._num_standstills > 0

    def close(self) -> None:
        """Hold requests back until `open` was called as often as `close`."""
        self._num_closings += 1
        if self._opened is None:
            self._opened = asyncio.Event()

    def open(self) -> None:
        """Undo one `close`."""
        self._num_closings -= 1
        if not self._num_closings and self._opened is not None:
            self._opened.set()
            self._opened = None

    async def wait_open(self) -> None:
        """Wait until requests may be sent."""
        while self._opened is not None:
            await self._opened.wait()

    async def wait_drained(self) -> None:
        """Wait until every request has a reply, whether its agent has taken it or not."""
        while self.num_in_flight:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def land(self, count: int = 1) -> None:
        """Count requests as answered, or as given up."""
        self.num_in_flight -= count
        if not self.num_in_flight and self._drained is not None:
            self._drained.set()
            self._drained = None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[CancelScope]:
        """Cancel the body after ``seconds``, not counting the time of any `standstill`."""
        from anyio import CancelScope, current_time

        with CancelScope(deadline=current_time() + seconds) as scope:
            self._limits.add(scope)
            if self._num_standstills:
                self._stop(scope)
            try:
                yield scope
            finally:
                self._limits.discard(scope)
                self._left_s.pop(scope, None)

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop all time limits while the context lasts."""
        from anyio import current_time

        self._num_standstills += 1
        if self._num_standstills == 1:
            for scope in self._limits:
                self._stop(scope)
        try:
            yield
        finally:
            self._num_standstills -= 1
            if not self._num_standstills:
                while self._left_s:
                    scope, left_s = self._left_s.popitem()
                    scope.deadline = current_time() + left_s

    def _stop(self, scope: CancelScope) -> None:
        from anyio import current_time

        self._left_s[scope] = scope.deadline - current_time()
        scope.deadline = math.inf


class StalenessGate:
    """Limit on the results under way, by the version of the engine's weights.

    The version after ``v`` is trained on the results number ``v * batch_size`` and on. So with
    weights of version ``v``, results may begin as long as those accepted and those under way are
    fewer than ``(max_staleness + v + 1) * batch_size``: the rule of AReaL (arXiv 2505.24298,
    equation 3). A result is under way from its beginning until it is handed over; one that failed
    or was rejected gives its place back.

    Args:
        policy: The limits.

    Example:
        >>> gate = StalenessGate(StalenessPolicy(max_staleness=0, batch_size=2, num_accepted=0))
        >>> gate.begin(version=0)
        >>> gate.capacity(version=0), gate.capacity(version=1)
        (1, 3)
    """

    def __init__(self, policy: StalenessPolicy) -> None:
        self._policy = policy
        self._num_accepted = policy.num_accepted
        self.num_running = 0
        """Results under way."""

    @property
    def num_accepted(self) -> int:
        """Results accepted so far, those before the runner included: part of a checkpoint."""
        return self._num_accepted or 0

    def capacity(self, version: int) -> int:
        """Return how many more results may begin now; none if below 1."""
        if self._num_accepted is None:
            self._num_accepted = version * self._policy.batch_size
        limit = (self._policy.max_staleness + version + 1) * self._policy.batch_size
        return limit - self._num_accepted - self.num_running

    def begin(self, version: int) -> None:
        """Count a result as under way."""
        self.capacity(version)
        self.num_running += 1

    def accept(self) -> None:
        """Count a result that was under way as accepted."""
        self.num_running -= 1
        self._num_accepted = self.num_accepted + 1

    def give_back(self, count: int = 1) -> None:
        """Forget results that were under way."""
        self.num_running -= count


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the policy version of the oldest sampled token; None if no token was sampled."""
    versions = (
        merge_spans(turn.version_spans, turn.version_start, turn.version_end)[1]
        for trajectory in trajectories
        for turn in trajectory.turns
        if len(turn.completion_ids)
    )
    return min(versions, default=None)


def staleness_error(
    result: EpisodeResult, policy: StalenessPolicy | None, version: int
) -> StaleEpisodeError | None:
    """Return the error of a result that is too old for weights of ``version``, or None."""
    if policy is None or policy.max_token_age is None or result.error is not None:
        return None
    oldest = oldest_version(result.trajectories)
    if oldest is None or version - oldest <= policy.max_token_age:
        return None
    return StaleEpisodeError(
        result.qid,
        f"a token is of version {oldest}, {version - oldest} behind the engine's; at most "
        f"{policy.max_token_age} are allowed",
    )

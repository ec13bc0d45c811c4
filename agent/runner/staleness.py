"""Admission by policy version: how many results may be under way for the weights there are."""

from __future__ import annotations

from collections.abc import Iterable

from trajpack.agent.errors import StaleEpisodeError
from trajpack.agent.runner.policy import StalenessPolicy
from trajpack.agent.runner.results import EpisodeResult
from trajpack.packing.conversion import merge_spans
from trajpack.packing.types import Trajectory


class StalenessGate:
    """Counts results from the moment they begin to the moment they are handed over.

    The version after ``v`` is trained on the results number ``v * batch_size`` and on. So with
    weights of version ``v``, results may begin as long as those accepted and those under way are
    fewer than ``(max_staleness + v + 1) * batch_size``: the rule of AReaL (arXiv 2505.24298,
    equation 3). What has ended but was not taken is still under way; what failed or was rejected
    gives its place back.

    Args:
        policy: The rule.

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
        """Return how many more results may begin now; below 1 none may."""
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
    """Return the version of the oldest sampled token; None where nothing was sampled."""
    versions = (
        merge_spans(turn.version_spans, turn.version_start, turn.version_end)[1]
        for trajectory in trajectories
        for turn in trajectory.turns
        if len(turn.completion_ids)
    )
    return min(versions, default=None)


def stale_error(
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

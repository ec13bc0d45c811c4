"""A group on its way: which of its episodes have ended, and what that makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import GroupPolicy
from trajpack.agent.runner.results import EpisodeResult, GroupResult


@dataclass(eq=False)
class OpenGroup:
    """The samples of one prompt, while some are under way."""

    prompt: Prompt
    """As given to the runner."""
    size: int
    """Episodes wanted, all of them without an error."""
    num_expected: int
    """Episodes that were begun or are about to be."""
    results: list[EpisodeResult] = field(default_factory=list)
    """Of the episodes that have ended."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is under way."""
        return len(self.results) >= self.num_expected

    @property
    def num_missing(self) -> int:
        """Episodes that would have to succeed beside those that have."""
        return self.size - sum(result.error is None for result in self.results)

    def refill(self, policy: GroupPolicy) -> range:
        """Return the samples to begin in place of those that failed; none if it is too late."""
        begin, missing = self.num_expected, self.num_missing
        if policy.incomplete != "refill" or begin + missing > self.size + policy.max_refills:
            missing = 0
        self.num_expected += missing
        return range(begin, begin + missing)

    def judge(self, policy: GroupPolicy) -> GroupResult:
        """Return what came of it, now that nothing more will come."""
        ordered = sorted(self.results, key=lambda result: result.sample)
        good = [result for result in ordered if result.error is None]
        rejected: str | None = None
        if not good:
            rejected = "failed"
        elif len(good) < self.size and policy.incomplete != "keep":
            rejected = "incomplete"
        else:
            reasons = (reason_for(good) for reason_for in policy.filters)
            reason = next((reason for reason in reasons if reason is not None), None)
            rejected = None if reason is None else f"filtered: {reason}"
        return GroupResult(self.prompt, tuple(ordered), rejected)

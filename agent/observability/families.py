"""The metrics of a rollout, by name: what they count, in which unit, in which buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trajpack.agent import errors

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CAUSES: tuple[str, ...] = tuple(
    sorted(
        {
            kind.cause
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, errors.EpisodeError)
        }
    )
)
"""Every ``cause`` that an error of this library has: the values of the label of that name."""
OTHER = "other"
"""Stands for a cause, or a reason of a group, that is none of the known ones."""
STAGES = ("generation", "verification")
"""The two things a turn waits for."""
WAITS = ("pause", "room", "slot", "staleness")
"""What has to be waited for before one can go on, see `RolloutObserver.wait_ended`."""

_LATENCY_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)
_PACK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_VERSION_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class GenerationFamilies:
    """What the engine does, turn by turn."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.in_flight: Gauge = Gauge(
            "trajpack_turns_in_flight",
            "Turns that wait for their completion (generation) or its judgement (verification).",
            ["stage"],
            registry=registry,
        )
        self.turns: Counter = Counter(
            "trajpack_turns", "Turns that the engine completed.", registry=registry
        )
        self.prompt_tokens: Counter = Counter(
            "trajpack_prompt_tokens",
            "Tokens of the prompts of completed turns, the conversation so far each time.",
            registry=registry,
        )
        self.generated_tokens: Counter = Counter(
            "trajpack_generated_tokens", "Tokens sampled, kept or not.", registry=registry
        )
        self.truncated_turns: Counter = Counter(
            "trajpack_truncated_turns",
            "Completed turns that ended without an end-of-sequence token.",
            registry=registry,
        )
        self.generation_seconds: Histogram = Histogram(
            "trajpack_generation_seconds",
            "From asking the engine to its reply, an error included.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.generation_errors: Counter = Counter(
            "trajpack_generation_errors",
            "Errors that the engine replied with, by cause.",
            ["cause"],
            registry=registry,
        )


class VerificationFamilies:
    """What the environment does, turn by turn."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Histogram

        self.seconds: Histogram = Histogram(
            "trajpack_verification_seconds",
            "From giving an action to the environment to its answer, an error included.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.errors: Counter = Counter(
            "trajpack_verification_errors",
            "Actions that the environment failed to answer.",
            registry=registry,
        )


class EpisodeFamilies:
    """What becomes of episodes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.in_flight: Gauge = Gauge(
            "trajpack_episodes_in_flight", "Episodes under way.", registry=registry
        )
        self.finished: Counter = Counter(
            "trajpack_episodes_finished",
            "Attempts that ended well, those included that were found stale afterwards.",
            registry=registry,
        )
        self.failed: Counter = Counter(
            "trajpack_episodes_failed",
            "Episodes given up, by the cause of their last failure.",
            ["cause"],
            registry=registry,
        )
        self.retries: Counter = Counter(
            "trajpack_episode_retries",
            "Failed attempts after which the episode begins anew, by cause.",
            ["cause"],
            registry=registry,
        )
        self.seconds: Histogram = Histogram(
            "trajpack_episode_seconds",
            "How long one attempt at an episode took, failed ones included.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )


class WaitFamilies:
    """What episodes wait for before they begin, and requests before they are sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Histogram

        self.seconds: Histogram = Histogram(
            "trajpack_queue_wait_seconds",
            "How long the next episode, or a request (pause), had to wait, by what for.",
            ["reason"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )


class ResultFamilies:
    """What becomes of groups, and how late results reach the reader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.groups: Counter = Counter(
            "trajpack_groups", "Groups completed or given up, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.waiting: Gauge = Gauge(
            "trajpack_results_waiting",
            "Results of finished episodes that nobody has taken yet.",
            registry=registry,
        )
        self.wait_seconds: Histogram = Histogram(
            "trajpack_result_wait_seconds",
            "From the end of an episode to its result being taken.",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.retry_wait_seconds: Histogram = Histogram(
            "trajpack_retry_wait_seconds",
            "From a failed attempt to the beginning of the next.",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.accepted_turns: Counter = Counter(
            "trajpack_accepted_turns", "Turns of the results that were taken.", registry=registry
        )
        self.rewarded_turns: Counter = Counter(
            "trajpack_rewarded_turns",
            "Turns with a reward above 0, of the results that were taken.",
            registry=registry,
        )


class VersionFamilies:
    """Which weights sample, and how old what they sampled is when it is taken."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Gauge, Histogram

        self.policy_version: Gauge = Gauge(
            "trajpack_policy_version",
            "Version of the weights when a result was last taken.",
            registry=registry,
        )
        self.staleness: Histogram = Histogram(
            "trajpack_staleness_versions",
            "Versions between the oldest token of a turn and the weights at its hand-over.",
            buckets=_VERSION_BUCKETS,
            registry=registry,
        )


class PackFamilies:
    """What is packed, how fast, and how often a conversation breaks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Histogram

        self.seconds: Histogram = Histogram(
            "trajpack_pack_seconds",
            "How long a pack took the host.",
            buckets=_PACK_BUCKETS,
            registry=registry,
        )
        self.errors: Counter = Counter(
            "trajpack_pack_errors", "Packs that raised.", registry=registry
        )
        self.tokens: Counter = Counter(
            "trajpack_packed_tokens", "Tokens of packed batches.", registry=registry
        )
        self.generated_tokens: Counter = Counter(
            "trajpack_packed_generated_tokens",
            "Sampled tokens of packed batches, each of them trained once.",
            registry=registry,
        )
        self.continuations: Counter = Counter(
            "trajpack_packed_continuations",
            "Packed turns that are not the first of their trajectory (merged layout).",
            registry=registry,
        )
        self.prefix_breaks: Counter = Counter(
            "trajpack_prefix_breaks",
            "Continuations whose prompt does not begin with what came before (merged layout).",
            registry=registry,
        )


class FillFamilies:
    """How full what is packed is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Histogram

        self.plan: Histogram = Histogram(
            "trajpack_plan_fill_ratio",
            "Tokens over the capacity of all micro-batches of a plan.",
            buckets=_RATIO_BUCKETS,
            registry=registry,
        )
        self.rectangle: Histogram = Histogram(
            "trajpack_rectangle_fill_ratio",
            "Tokens over a padded rectangle of the same sequences: what packing saves.",
            buckets=_RATIO_BUCKETS,
            registry=registry,
        )

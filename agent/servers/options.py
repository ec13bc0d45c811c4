"""Options of engines that use servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, TypeAlias

from trajpack.packing.conversion import as_integer

LogprobSemantics: TypeAlias = Literal["raw", "processed"]
"""Log-probabilities before temperature and filters, or after."""
MissingLogprobs: TypeAlias = Literal["zero", "mark", "refuse"]
"""What becomes of a token without a log-probability."""


def _require_positive(owner: object, *names: str) -> None:
    """Raise unless these are numbers above 0, counts integers; None may be where it is default."""
    for name in names:
        value = getattr(owner, name)
        if value is None and getattr(type(owner), name) is None:
            continue
        if name.startswith("max_") or name.endswith("_size"):
            as_integer(name, value)
        elif not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class TimeLimits:
    """Time limits in seconds, each above 0.

    Attributes:
        request_s: For one request, a weight update or a pause, to the last byte of the response.
        generation_s: For one completion: all of its requests and the pauses between them.
        outage_s: For a healthy server, while there is none: long enough to restart one.
        start_s: For the first healthy server, when the engine is entered.
    """

    request_s: float = 600.0
    generation_s: float = 1800.0
    outage_s: float = 120.0
    start_s: float = 30.0

    def __post_init__(self) -> None:
        _require_positive(self, *vars(self))


@dataclass(frozen=True)
class RetryLimits:
    """Number of retries, and the pauses between them, each above 0.

    Attributes:
        max_attempts: Requests for one response, the first included.
        wait_initial_s: Pause in seconds before the second attempt; doubles with each attempt, with
            jitter, up to 10.
        rest_s: Pause in seconds before a server out of rotation is asked for its health.
    """

    max_attempts: int = 6
    wait_initial_s: float = 0.2
    rest_s: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, *vars(self))


@dataclass(frozen=True)
class ServerOptions:
    """Options of an engine that uses servers.

    Attributes:
        token: Sent as ``Authorization: Bearer``; not shown.
        ca_file: File of certificates that verify ``https`` servers; ``None`` takes the system's.
        max_connections: Requests in flight on one server; others wait.
        time_limits: Time limits.
        retries: Retries.
        vocab_size: Upper bound (exclusive) of token ids in requests and responses.
        max_request_tokens: Prompt plus completion tokens at most; longer requests are not sent.
        max_response_bytes: Limit of a response in bytes.
        logprobs: Semantics of the servers' log-probabilities; ``None`` is the kind's default.
        allow_other_logprobs: Whether to send requests whose log-probabilities will not be those of
            the distribution sampled from.
        missing_logprobs: What becomes of a token without a log-probability: ``"zero"`` takes 0,
            with one warning; ``"mark"`` also gives each completion the field ``logprob_missing``, a
            bool a token; ``"refuse"`` is an error.
        seed: Each request's seed is derived from it, the episode and the number of the request;
            ``None`` leaves sampling to the servers.
        routed_experts: Layers with experts, and experts of a token, to have each completion's
            ``routed_experts`` of servers with ``--enable-return-routed-experts``.

    Raises:
        TypeError: If a value is of another type.
        ValueError: If a value is out of range.
    """

    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    max_connections: int = 1024
    time_limits: TimeLimits = TimeLimits()
    retries: RetryLimits = RetryLimits()
    vocab_size: int | None = None
    max_request_tokens: int | None = None
    max_response_bytes: int = 64 * 2**20
    logprobs: LogprobSemantics | None = None
    allow_other_logprobs: bool = False
    missing_logprobs: MissingLogprobs = "zero"
    seed: int | None = None
    routed_experts: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        counts = ("max_connections", "max_response_bytes", "vocab_size", "max_request_tokens")
        _require_positive(self, *counts)
        routes, words = self.routed_experts, ("zero", "mark", "refuse")
        is_pair = (
            routes is None or [type(size) is int and size > 0 for size in routes] == [True] * 2
        )
        for name, is_valid, expected in (
            ("logprobs", self.logprobs in ("raw", "processed", None), "'raw' or 'processed'"),
            ("missing_logprobs", self.missing_logprobs in words, f"one of {words}"),
            ("routed_experts", is_pair, "(layers, experts of a token)"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        if self.seed is not None:
            as_integer("seed", self.seed)
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("token must be printable ASCII")


DEFAULT_OPTIONS = ServerOptions()

"""How an engine talks to its servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, TypeAlias

LogprobSemantics: TypeAlias = Literal["raw", "processed"]
"""Whether a server's log-probabilities are those before temperature and filters, or after."""


def require_positive(owner: object, *names: str) -> None:
    """Raise an error where an attribute of ``owner`` is not a number above 0.

    What is declared as an integer (``max_connections: int = 1024``) must be one.
    """
    for name in names:
        value = getattr(owner, name)
        is_count = name.startswith("max_") or name.endswith("_size")
        if isinstance(value, bool) or not isinstance(value, Integral if is_count else Real):
            wanted = "an integer" if is_count else "a number"
            raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
        if not float(value) > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class TimeLimits:
    """How long is waited for what, in seconds.

    Raises:
        TypeError: If one is not a number.
        ValueError: If one is not above 0.
    """

    connect_s: float = 5.0
    """For a connection."""
    request_s: float = 600.0
    """For the answer to one request, from its start to the last byte."""
    generation_s: float = 1800.0
    """For one reply to an agent: all requests that it takes, with the pauses between them."""
    outage_s: float = 120.0
    """For a server, while none is healthy: long enough for one to be started again."""
    start_s: float = 30.0
    """For the first healthy server, when the engine is entered."""
    control_s: float = 600.0
    """For an order to a server: a weight update, a pause."""

    def __post_init__(self) -> None:
        require_positive(self, *vars(self))


@dataclass(frozen=True)
class RetryLimits:
    """How often a request is repeated that may be, and after what pauses.

    Repeated are requests whose server could not be reached, answered 408, 429 or 5xx, was too
    slow, or died before its last byte. All else fails at once: it would fail again.

    Raises:
        TypeError: If one is not a number, or a count not an integer.
        ValueError: If one is not above 0.
    """

    max_attempts: int = 6
    """Requests for one answer, the first included."""
    wait_initial_s: float = 0.2
    """Pause before the second; each later one is twice as long, and random in part."""
    wait_max_s: float = 10.0
    """Longest pause, also where a server asks for a longer one (``Retry-After``); a random
    part of the first pause comes on top of that."""
    max_idle_resumes: int = 20
    """Times in a row that an interrupted generation is resumed without a new token."""
    rest_s: float = 1.0
    """Pause before a server that failed is asked for its health; doubles up to 16 times this."""
    max_failures: int = 3
    """Failures in a row, other than of a connection, after which a server rests. Each that follows
    before it has answered well once makes it rest again, and longer."""

    def __post_init__(self) -> None:
        require_positive(self, *vars(self))


@dataclass(frozen=True)
class ServerOptions:
    """How an engine talks to its servers.

    Raises:
        TypeError: If a value is of another type.
        ValueError: If a value is out of range.
    """

    token: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer``; never shown or logged."""
    ca_file: str | None = None
    """Certificates that ``https`` servers are checked against; ``None`` takes the usual ones."""
    max_connections: int = 1024
    """Requests in flight on one server; others wait for their turn. About the concurrency."""
    time_limits: TimeLimits = TimeLimits()
    """How long is waited for what."""
    retries: RetryLimits = RetryLimits()
    """How often a request is repeated that may be."""
    vocab_size: int | None = None
    """Token ids are below it, in requests and in responses."""
    max_request_tokens: int | None = None
    """Tokens of prompt and completion together; longer requests are refused unsent."""
    max_response_bytes: int = 64 * 2**20
    """Length of a response; less is taken where fewer tokens were asked for."""
    logprobs: LogprobSemantics | Literal["detect"] | None = None
    """What the log-probabilities of the servers are, or ``"detect"`` to ask each of them twice
    before it serves. ``None`` is the default of the kind of server."""
    allow_other_logprobs: bool = False
    """Whether a request may be sent whose log-probabilities will not be those of the
    distribution that it is sampled from."""
    seed: int | None = None
    """From it, the episode and the number of the request comes the seed of each request; ``None``
    leaves sampling to the servers."""

    def __post_init__(self) -> None:
        require_positive(self, "max_connections", "max_response_bytes")
        for name in ("vocab_size", "max_request_tokens"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        if self.logprobs not in ("raw", "processed", "detect", None):
            raise ValueError(
                f"logprobs must be 'raw', 'processed', 'detect' or None, got {self.logprobs!r}"
            )
        token = self.token
        if not isinstance(token, str | None):
            raise TypeError(f"token must be a string, got {type(token).__name__}")
        if not isinstance(self.seed, Integral | None):
            raise TypeError(f"seed must be an integer, got {type(self.seed).__name__}")
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise ValueError("token must be printable ASCII and not empty")


DEFAULT_OPTIONS = ServerOptions()
"""What engines do unless told otherwise."""

"""How an exchange with a server can fail, and how that is told without harm."""

from __future__ import annotations

_MAX_CHARS = 300


class ExchangeError(Exception):
    """An exchange with a server failed.

    Its text leaves out which server that was: texts get into logs, and addresses must not.
    """

    def __init__(self, reason: str, server: str | None = None) -> None:
        super().__init__(reason)
        self.server = server
        """Host and port, where it was one server's doing."""

    @property
    def named(self) -> str:
        """The reason, and the name of the server: for whoever asked."""
        return str(self) if self.server is None else f"{self.server}: {self}"


class RetryableError(ExchangeError):
    """An exchange failed that another, perhaps with another server, may repeat."""

    def __init__(
        self,
        reason: str,
        server: str | None = None,
        *,
        wait_s: float | None = None,
        is_connection: bool = False,
        is_slow: bool = False,
    ) -> None:
        super().__init__(reason, server)
        self.wait_s = wait_s
        """Seconds that the server asked to be left alone, if it did."""
        self.is_connection = is_connection
        """Whether it was the connection that failed: nothing, or not all, was heard."""
        self.is_slow = is_slow
        """Whether the server was still at it."""


class OutdatedError(RetryableError):
    """A server's weights are older than those that sampled what came before."""


class MalformedError(ExchangeError):
    """A server answered with what is no answer; asking again would not help."""


class RefusedError(ExchangeError):
    """A server will not answer this request; asking again would not help."""

    def __init__(self, reason: str, server: str | None = None, *, status: int) -> None:
        super().__init__(reason, server)
        self.status = status
        """The HTTP status."""

    @property
    def is_about_request(self) -> bool:
        """Whether another request may fare better; else the server is not what it should be."""
        return self.status in (400, 413, 414, 422)


class OutageError(Exception):
    """No server was healthy for as long as may be waited for one."""


class WeightUpdateError(RuntimeError):
    """Servers did not take new weights, or their version; the message names them."""


def quoted(text: bytes | str) -> str:
    r"""Return what a server wrote as a short literal that does no harm in a log.

    Example:
        >>> quoted(b"no\nsuch \x1b[31mmodel")
        "'no\\nsuch \\x1b[31mmodel'"
    """
    if isinstance(text, bytes):
        text = text[: 4 * _MAX_CHARS].decode("utf-8", errors="replace")
    shown = ascii(text[:_MAX_CHARS])
    return shown if len(text) <= _MAX_CHARS else shown + "..."

"""Errors of one HTTP exchange with a server, and their safe wording."""

from __future__ import annotations

_MAX_CHARS = 300


class ExchangeError(Exception):
    """An exchange with a server failed.

    The text does not name the server: texts get into logs, and addresses must not.
    """

    def __init__(self, reason: str, server: str | None = None) -> None:
        super().__init__(reason)
        self.server = server
        """Host and port of the server, if the failure belongs to one."""

    @property
    def named(self) -> str:
        """Host and port of the server, and the reason: for the caller, not for logs."""
        return str(self) if self.server is None else f"{self.server}: {self}"


class RetryableError(ExchangeError):
    """An exchange failed that may be repeated, perhaps with another server."""

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
        """Pause in seconds that the server asked for (``Retry-After``)."""
        self.is_connection = is_connection
        """Whether the connection failed before the whole response was received."""
        self.is_slow = is_slow
        """Whether the time limit of the request ran out."""


class OutdatedError(RetryableError):
    """A server's weights are older than those of the completion's first tokens."""


class MalformedError(ExchangeError):
    """The response is not valid. Not retried."""


class RefusedError(ExchangeError):
    """The server refused the request. Not retried."""

    def __init__(self, reason: str, server: str | None = None, *, status: int) -> None:
        super().__init__(reason, server)
        self.status = status
        """HTTP status."""

    @property
    def is_about_request(self) -> bool:
        """Whether another request may succeed; otherwise the server is misconfigured."""
        return self.status in (400, 413, 414, 422)


class OutageError(Exception):
    """No server was healthy within the time limit."""


class WeightUpdateError(RuntimeError):
    """Servers did not take new weights, a version, a pause or a resume; the message names them."""


def quote_body(text: bytes | str) -> str:
    r"""Return text of a server as a short ASCII literal, safe in a log line.

    Example:
        >>> quote_body(b"no\nsuch \x1b[31mmodel")
        "'no\\nsuch \\x1b[31mmodel'"
    """
    if isinstance(text, bytes):
        text = text[: 4 * _MAX_CHARS].decode("utf-8", errors="replace")
    shown = ascii(text[:_MAX_CHARS])
    return shown if len(text) <= _MAX_CHARS else shown + "..."

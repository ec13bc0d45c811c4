"""How an exchange with a server can fail, and how that is told without harm."""

from __future__ import annotations

_MAX_CHARS = 300


class RetryableError(Exception):
    """An exchange failed that another, perhaps with another server, may repeat."""

    def __init__(
        self,
        reason: str,
        wait_s: float | None = None,
        *,
        is_connection: bool = False,
        is_slow: bool = False,
    ) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        """Seconds that the server asked to be left alone, if it did."""
        self.is_connection = is_connection
        """Whether it was the connection that failed: nothing, or not all, was heard."""
        self.is_slow = is_slow
        """Whether the server was still at it."""


class OutageError(Exception):
    """No server was healthy for as long as may be waited for one."""


class MalformedError(Exception):
    """A server answered with what is no answer; asking again would not help."""


class RefusedError(Exception):
    """A server will not answer this request; asking again would not help."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status
        """The HTTP status."""


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


def harmless(text: str, max_chars: int = 700) -> str:
    r"""Return a message with what is not printable escaped, cut to a length.

    Example:
        >>> harmless("bad\x00name")
        'bad\\x00name'
    """
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:max_chars])
    return shown if len(text) <= max_chars else shown + "..."

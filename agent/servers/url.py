"""The address of a server, without what is secret in it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class ServerURL:
    """Where a server is, and what its own credentials are.

    Example:
        >>> ServerURL.parse("https://me:secret@engine.example:8000/a/")
        ServerURL(base='https://engine.example:8000/a', name='engine.example:8000')
    """

    base: str
    """Scheme, host, port and path, without a slash at the end."""
    name: str
    """Host and port: what messages and logs call the server."""
    host: str = field(default="", repr=False)
    """The host alone, as it may stand in messages of the network."""
    authorization: str | None = field(default=None, repr=False)
    """The header that says the user and the password of the address, if it has any."""
    password: str | None = field(default=None, repr=False)
    """That password by itself, or the user where there is none: a server can tell it from the
    header."""

    @classmethod
    def parse(cls, url: str) -> ServerURL:
        """Read an address.

        Raises:
            TypeError: If it is no string.
            ValueError: If it is no ``http`` or ``https`` address with a host, or has a query or
                a fragment. The message does not repeat the address.
        """
        if not isinstance(url, str):
            raise TypeError(f"a server's address must be a string, got {type(url).__name__}")
        wanted = "a server's address must be http:// or https:// with a host, and no query"
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ValueError(f"{wanted}; this one cannot be read") from None
        is_plain = not parts.query and not parts.fragment and url.strip().isprintable()
        if parts.scheme not in ("http", "https") or not host or not is_plain or " " in url.strip():
            raise ValueError(f"{wanted}; this one is another")
        where = f"[{host}]" if ":" in host else host
        name = where if port is None else f"{where}:{port}"
        return cls(
            base=f"{parts.scheme}://{name}{parts.path.rstrip('/')}",
            name=name,
            host=host,
            authorization=_basic(parts.username, parts.password),
            password=unquote(parts.password or parts.username or "") or None,
        )


def _basic(user: str | None, password: str | None) -> str | None:
    if user is None:
        return None
    pair = f"{unquote(user)}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")

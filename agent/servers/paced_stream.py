"""A network backend for httpcore that bounds the work an answer makes, by its bytes."""
# ruff: noqa: ASYNC109 - the interface is that of httpcore

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpcore

_READ_BYTES = 8192
"""What is parsed before other tasks get their turn: about 10 ms of small pieces at most."""
_MAX_BYTES_BESIDE = 16_384
"""Bytes of an answer that are no body, beside as many as its body has: headers, interim answers
and frames of chunks."""
_FREE_PIECES = 1024
_BYTES_PER_PIECE = 128


class PacedBackend:
    """Opens TCP connections whose streams are `PacedStream`: an ``AsyncNetworkBackend``."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> PacedStream:
        """Connect, as httpcore does."""
        import httpcore

        backend = httpcore.AnyIOBackend()
        stream = await backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return PacedStream(stream)


class PacedStream:
    """Hands an answer over in pieces, and ends one that makes more work than its bytes are worth.

    It is an ``AsyncNetworkStream`` around another one.

    A parser makes thousands of events of chunks of two bytes, or of interim answers (1xx), and
    handles all that it was given before another task runs. So a read gives it 8 KiB at most. The
    answer is refused if the bytes beside its body are more than those of the body and 16 KiB, or
    if it comes in more than 1,024 pieces and one for each 128 bytes of the body. A piece is a read
    or a part of the body.

    Raises:
        httpcore.RemoteProtocolError: By `read` and `count_part`, if the answer is refused.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._num_bytes = self._num_body = self._num_pieces = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes, some thousands at most."""
        num_beside = self._num_bytes - self._num_body  # what was read before is parsed by now
        if num_beside > _MAX_BYTES_BESIDE + self._num_body:
            raise _refusal(
                f"{num_beside} bytes of headers, interim answers and frames of chunks came with "
                f"{self._num_body} bytes of a body"
            )
        read = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._num_bytes += len(read)
        self._count_piece()
        return read

    def count_part(self, num_bytes: int) -> None:
        """Note that a part of the body was taken."""
        self._num_body += num_bytes
        self._count_piece()

    def _count_piece(self) -> None:
        self._num_pieces += 1
        if self._num_pieces > _FREE_PIECES + self._num_body // _BYTES_PER_PIECE:
            raise _refusal(f"{self._num_body} bytes came in {self._num_pieces} tiny pieces")

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send a part of a request. What is read next belongs to the answer to it."""
        self._num_bytes = self._num_body = self._num_pieces = 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> PacedStream:
        """Return the encrypted stream."""
        return PacedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """Return what httpcore asks of the socket."""
        return self._stream.get_extra_info(info)


def _refusal(reason: str) -> Exception:
    import httpcore

    return httpcore.RemoteProtocolError(reason)

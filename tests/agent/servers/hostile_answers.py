"""What a server may send in place of an answer: bytes, and streams that do not end."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.agent.servers.loopback import encode, sglang_body, vllm_body

Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer, for as long as it is taken."""

GOOD = encode(vllm_body([4, 5]))
CHUNKED = b"HTTP/1.1 %d OK\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def head(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


def chunked(body: bytes) -> bytes:
    return CHUNKED % 200 + body


STATUSES = [
    *("204", "205", "206", "207", "226", "299", "300", "301", "302", "303", "304", "305", "307"),
    *("308", "400", "401", "402", "403", "404", "405", "406", "407", "408", "409", "410", "411"),
    *("413", "414", "415", "418", "421", "422", "425", "426", "428", "429", "431", "451", "500"),
    *("501", "502", "503", "504", "505", "507", "508", "511", "599", "600", "999", "101"),
]
"""Each with a good body and a place to go to."""

ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "zeros": bytes(4096),
    "an alert of TLS": bytes.fromhex("15030300020228"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": GOOD,
    "HTTP/9.9": b"HTTP/9.9 200 OK\r\ncontent-length: 0\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 99 OK\r\ncontent-length: 0\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\ncontent-length: 0\r\n\r\n",
    "a request": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "a header without a colon": head("content-length 5", body=b"12345"),
    "a header with a zero": head("x: a\0b", "content-length: 0"),
    "a header with a space": head("x y: a", "content-length: 0"),
    "a header without a name": head(": a", "content-length: 0"),
    "two lengths": head("content-length: 5", "content-length: 7", body=b"12345"),
    "two lengths in one": head("content-length: 5, 7", body=b"12345"),
    "a negative length": head("content-length: -5", body=b"{}"),
    "a length with a sign": head("content-length: +2", body=b"{}"),
    "a length of letters": head("content-length: two", body=b"{}"),
    "a length in hexadecimal": head("content-length: 0x2", body=b"{}"),
    "a length with a fraction": head("content-length: 2.0", body=b"{}"),
    "a length beyond all limits": head("content-length: 999999999999999"),
    "a length beyond 64 bits": head(f"content-length: {'9' * 19}"),
    "a length of 5000 digits": head(f"content-length: {'9' * 5000}"),
    "a body that is shorter": head("content-length: 5000", body=GOOD),
    "a body that is longer": head("content-length: 9", body=GOOD),
    "a body of length 0": head("content-length: 0", body=GOOD),
    "an unknown coding": head("transfer-encoding: gzip", body=GOOD),
    "two codings": head("transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "a coding twice": head("transfer-encoding: chunked", "transfer-encoding: chunked"),
    "a length and chunks": head("content-length: 2", "transfer-encoding: chunked", body=GOOD),
    "no length": head(body=GOOD[:-1]),
    "a chunk of letters": chunked(b"zz\r\n12\r\n0\r\n\r\n"),
    "a chunk of negative size": chunked(b"-2\r\n12\r\n0\r\n\r\n"),
    "a chunk of endless size": chunked(b"F" * 30 + b"\r\n12\r\n0\r\n\r\n"),
    "a chunk that is longer": chunked(b"2\r\n12345\r\n0\r\n\r\n"),
    "a chunk that is shorter": chunked(b"5000\r\n12345"),
    "chunks without an end": chunked(b"2\r\n{}\r\n"),
    "chunks that are cut": chunked(b"%x\r\n%s" % (len(GOOD), GOOD[:-3])),
    "no chunk": chunked(b"0\r\n\r\n"),
    "a trailer that is none": chunked(b"2\r\n{}\r\n0\r\nx y: z\r\n\r\n"),
    "a good body, said to be": whole(GOOD, "200 OK", "content-encoding: br"),
    "a good body, coded twice": whole(GOOD, "200 OK", "content-encoding: identity, gzip"),
    "a bomb": whole(zlib.compress(bytes(10**7)), "200 OK", "content-encoding: deflate"),
    "a head that is cut": b"HTTP/1.1 200 OK\r\ncontent-le",
    "a status line that is cut": b"HTTP/1.",
    "a long header": head(f"x: {'y' * 200_000}", "content-length: 0"),
    "a long reason": b"HTTP/1.1 200 " + b"O" * 200_000 + b"\r\n\r\n",
    "many headers": head(*(f"x{k}: y" for k in range(50_000)), "content-length: 0"),
    "one interim answer and no other": b"HTTP/1.1 100 Continue\r\n\r\n",
    "codes of a terminal": whole(b"\x1b[2J\x1b]0;x\x07" * 9, "500 \x1b[2J"),
    "lines in an error": whole(b"a\r\nERROR forged\nline", "400 Bad Request"),
    **{
        f"status {status}": whole(
            GOOD, f"{status} X", "location: http://127.0.0.1:9/", "retry-after: 0"
        )
        for status in STATUSES
    },
}
"""Bytes that are sent, after which the connection is closed."""

BODIES: dict[str, bytes] = {
    "no JSON": b"<html>",
    "no text": b"\xff\xfe\x00" * 9,
    "UTF-16": GOOD.decode().encode("utf-16"),
    "an array": b"[]",
    "a number": b"5",
    "null": b"null",
    "an empty object": b"{}",
    "JSON twice": GOOD + GOOD,
    "cut": GOOD[:-9],
    "deep": b'{"choices": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "a long number": b'{"choices": [' + b"9" * 5000 + b"]}",
    "NaN": GOOD.replace(b"-0.5", b"NaN"),
    "minus infinity": GOOD.replace(b"-0.5", b"-Infinity"),
    "a number beyond float": GOOD.replace(b"-0.5", b"-1e999"),
    "a log-probability above 0": GOOD.replace(b"-0.5", b"0.5"),
    "a log-probability of null": GOOD.replace(b"-0.5", b"null"),
    "a log-probability of text": GOOD.replace(b"-0.5", b'"-0.5"'),
    "an id beyond the vocabulary": encode(vllm_body([4, 1000])),
    "an id beyond 64 bits": encode(vllm_body([4, 2**70])),
    "a negative id": encode(vllm_body([4, -1])),
    "an id with a fraction": GOOD.replace(b"[4, 5]", b"[4, 5.5]"),
    "an id of text": GOOD.replace(b"[4, 5]", b'[4, "5"]'),
    "a truth value for an id": GOOD.replace(b"[4, 5]", b"[4, true]"),
    "more tokens than asked": encode(vllm_body(range(1, 10))),
    "fewer log-probabilities": GOOD.replace(b"[4, 5]", b"[4, 5, 6]"),
    "no token": encode(vllm_body([])),
    "two samples": encode({"choices": vllm_body([4])["choices"] * 2}),
    "no sample": encode({"choices": []}),
    "an unknown end": encode(vllm_body([4], finish="\x1b[2Jbye\nforged")),
    "an error": encode({"error": {"message": "no\nforged", "code": 500}}),
    "spans that overlap": encode(vllm_body([4, 5], versions=[("1", 0, 2), ("2", 1, 2)])),
    "spans that leave a gap": encode(vllm_body([4, 5], versions=[("1", 0, 1)])),
    "spans beyond the end": encode(vllm_body([4, 5], versions=[("1", 0, 9)])),
}
"""Bodies of a good head."""


def endless(start: bytes, again: bytes) -> Serve:
    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(again * (65_536 // len(again) + 1))
            await writer.drain()

    return serve


def dripping(start: bytes, again: bytes, pause_s: float = 0.0) -> Serve:
    """Send a byte at a time, each in a packet of its own."""

    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.write(start)
        while True:
            for byte in again:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(pause_s)

    return serve


async def _hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def _hang_in_the_body(writer: asyncio.StreamWriter) -> None:
    writer.write(head("content-length: 5000", body=b'{"choices": ['))
    await asyncio.sleep(3600)


async def _reset(writer: asyncio.StreamWriter) -> None:
    writer.write(head("content-length: 5000", body=b'{"choices": ['))
    await writer.drain()
    lingering = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)
    writer.transport.abort()


STREAMS: dict[str, Serve] = {
    "an endless body": endless(CHUNKED % 200, b"1000\r\n" + b"[" * 0x1000 + b"\r\n"),
    "an endless body of zeros": endless(head(), bytes(4096)),
    "an endless error": endless(CHUNKED % 400, b"1000\r\n" + b"[" * 0x1000 + b"\r\n"),
    "an endless header": endless(b"HTTP/1.1 200 OK\r\na: ", b"b"),
    "silence": _hang,
    "silence in the body": _hang_in_the_body,
    "a reset": _reset,
    "a slow drip": dripping(head("content-length: 900"), b" ", 0.05),
}
"""What does not end by itself, or ends rudely."""


def sending(answer: bytes) -> Serve:
    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return serve


BEHAVIOURS: dict[str, Serve] = {
    **{name: sending(answer) for name, answer in ANSWERS.items()},
    **{f"a body: {name}": sending(whole(body)) for name, body in BODIES.items()},
    **STREAMS,
}


SGLANG_GOOD = encode(sglang_body([4, 5]))


class Hostile:
    """Answers ``num_good`` requests for samples as it should, then all others by ``serve``.

    A context manager, at whose end every connection is closed.
    """

    def __init__(self, serve: Serve, num_good: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._serve = serve
        self._tls = tls
        self._num_good_left = num_good
        self._connections: set[asyncio.Task[None]] = set()
        self.num_draws = 0
        """Requests that ``serve`` answered."""
        self.url = ""

    async def __aenter__(self) -> Hostile:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self.url = f"http{'s' * (self._tls is not None)}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side or the test has ended
        finally:
            # What is written is sent before the end, unless the other side reads no more.
            writer.close()
            with suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 0.5)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", asked.lower())
            payload = await reader.readexactly(int(length[1])) if length else b""
            path = asked.split(b" ")[1]
            if path not in (b"/generate", b"/inference/v1/generate", b"/v1/completions"):
                writer.write(whole(b'{"data": [{"id": "tiny"}]}'))
            elif self._num_good_left:
                self._num_good_left -= 1
                writer.write(whole(GOOD if b"token_ids" in payload else SGLANG_GOOD))
            else:
                self.num_draws += 1
                return await self._serve(writer)
            await writer.drain()

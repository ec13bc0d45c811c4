"""A real HTTP server on the loopback interface that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trajpack.agent.errors import GenerationError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, SamplingParams
from trajpack.agent.servers.engine import ServerEngine
from trajpack.agent.servers.options import RetryLimits, ServerOptions, TimeLimits

_E = TypeVar("_E", bound=ServerEngine)
EIGHT_TOKENS = SamplingParams(8)
QUICK = RetryLimits(max_attempts=4, wait_initial_s=0.005, rest_s=0.01)
SHORT = TimeLimits(request_s=5, generation_s=10, outage_s=2, start_s=5)


def options(**changes: Any) -> ServerOptions:
    return ServerOptions(**({"retries": QUICK, "time_limits": SHORT} | changes))


@dataclass
class Asked:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    payload: Any

    @property
    def is_draw(self) -> bool:
        return self.path in ("/generate", "/inference/v1/generate", "/v1/completions")


@dataclass
class Answer:
    status: int = 200
    body: bytes | Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | Iterable[bytes] | None = None
    """Sent in place of everything; the connection is closed after it."""


NOTHING = Answer(404, {"error": {"message": "Not Found"}})


class Loopback:
    """Serves ``say`` while its context lasts; may be entered again, on the same port."""

    def __init__(
        self, say: Callable[[Asked], Awaitable[Answer]], tls: ssl.SSLContext | None = None
    ) -> None:
        self.say = say
        self.tls = tls
        self.asked: list[Asked] = []
        self.hung_up: list[Asked] = []
        """Requests whose client was gone before it had its answer."""
        self.noticed = asyncio.Event()
        """Set when a client has gone."""
        self.port = 0
        self._came = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http{'s' * bool(self.tls)}://127.0.0.1:{self.port}"

    @property
    def draws(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.is_draw]

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked if asked.path not in ("/health", "/v1/models")]

    async def __aenter__(self) -> Loopback:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        for _ in range(3):  # a connection may just have been accepted
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await asyncio.sleep(0)

    async def wait_for_draws(self, count: int) -> None:
        while len(self.draws) < count:
            await self.wait_for_more()

    async def wait_for_more(self) -> None:
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), 10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        asked = Asked(method, path, headers, json.loads(body) if body else None)
        self.asked.append(asked)
        self._came.set()
        answer = await self._unless_gone(asked, reader)
        if answer is None:
            return False
        if answer.raw is not None:
            for piece in [answer.raw] if isinstance(answer.raw, bytes) else answer.raw:
                writer.write(piece)
                await writer.drain()
            return False
        content = answer.body if isinstance(answer.body, bytes) else encode(answer.body)
        lines = {"content-length": str(len(content)), **answer.headers}
        told = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {answer.status} OK\r\n{told}\r\n".encode() + content)
        await writer.drain()
        return True

    async def _unless_gone(self, asked: Asked, reader: asyncio.StreamReader) -> Answer | None:
        saying = asyncio.ensure_future(self.say(asked))
        going = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({saying, going}, return_when=asyncio.FIRST_COMPLETED)
        if saying.done():
            going.cancel()
            await asyncio.wait({going})
            return saying.result()
        saying.cancel()
        self.hung_up.append(asked)
        self.noticed.set()
        return None


async def until(condition: Callable[[], bool]) -> None:
    """Let others go on until something has become so that no event tells of."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come")


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def vllm_body(
    ids: Sequence[int],
    logprobs: Sequence[Any] | None = None,
    finish: str = "stop",
    versions: Sequence[tuple[str, int, int]] | None = None,
) -> dict[str, Any]:
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    content = [{"token_id": i, "logprob": v} for i, v in zip(ids, logprobs, strict=True)]
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "token_ids": list(ids)}
    choice["logprobs"] = {"content": content}
    if versions is not None:
        choice["weight_versions"] = [
            {"version": version, "start": start, "end": end} for version, start, end in versions
        ]
    return {"choices": [choice]}


def sglang_body(
    ids: Sequence[int],
    finish: dict[str, Any] | None = None,
    versions: Sequence[tuple[str, int, int]] = (),
) -> dict[str, Any]:
    meta: dict[str, Any] = {"finish_reason": finish or {"type": "stop", "matched": ids[-1]}}
    meta["output_token_logprobs"] = [[-0.25, token, None] for token in ids]
    meta["weight_versions"] = [
        {"version": version, "start": start, "end": end}
        for version, start, end in versions or [("default", 0, len(ids))]
    ]
    return {"text": "", "output_ids": list(ids), "meta_info": meta}


async def say_vllm(asked: Asked) -> Answer:
    """Continue each prompt with the two numbers after its last token."""
    if asked.path == "/health":
        return Answer()
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "tiny"}]})
    if asked.path == "/inference/v1/generate":
        last = asked.payload["token_ids"][-1]
        return Answer(body=vllm_body([last + 1, last + 2]))
    return NOTHING


async def say_sglang(asked: Asked) -> Answer:
    """Continue each prompt with the two numbers after its last token."""
    if asked.path == "/health":
        return Answer()
    if asked.path == "/generate":
        last = asked.payload["input_ids"][-1]
        return Answer(body=sglang_body([last + 1, last + 2]))
    return NOTHING


def drawing(
    draw: Callable[[Asked], Awaitable[Answer]],
    other: Callable[[Asked], Awaitable[Answer]] = say_vllm,
) -> Callable[[Asked], Awaitable[Answer]]:
    """Answer requests for samples in one way and all others in another."""

    async def say(asked: Asked) -> Answer:
        return await (draw(asked) if asked.is_draw else other(asked))

    return say


async def never(asked: Asked) -> Answer:
    await asyncio.Event().wait()
    raise AssertionError


Say = Callable[[Asked], Awaitable[Answer]]


def always(answer: Any, other: Say = say_vllm) -> Say:
    """Answer every request for a sample in the same way, by an `Answer` or its body."""

    async def draw(asked: Asked) -> Answer:
        return answer if isinstance(answer, Answer) else Answer(body=answer)

    return drawing(draw, other)


def gated(gate: asyncio.Event, say: Say) -> Say:
    """Answer requests for samples once the gate is open."""

    async def draw(asked: Asked) -> Answer:
        await gate.wait()
        return await say(asked)

    return drawing(draw, say)


@asynccontextmanager
async def serving(
    engine_type: Callable[..., _E],
    say: Callable[[Asked], Awaitable[Answer]],
    num_servers: int = 1,
    **arguments: Any,
) -> AsyncIterator[tuple[list[Loopback], _E]]:
    """Enter servers that all say the same, and an engine that asks them."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Loopback(say)) for _ in range(num_servers)]
        arguments.setdefault("options", options())
        engine = engine_type([server.url for server in servers], **arguments)
        yield servers, await stack.enter_async_context(engine)


async def ask(
    engine: ServerEngine,
    qid: str = "a@0",
    prompt: Sequence[int] = (1, 2, 3),
    sampling: Any = EIGHT_TOKENS,
) -> GenerationOutput | GenerationError:
    """Ask once, and return the error if there is one."""
    try:
        return await generate(engine, qid, prompt, sampling)
    except GenerationError as error:
        return error


async def generate(
    engine: ServerEngine,
    qid: str = "a@0",
    prompt: Sequence[int] = (1, 2, 3),
    sampling: Any = EIGHT_TOKENS,
) -> GenerationOutput:
    return await asyncio.wait_for(engine.generate(GenerationRequest(qid, prompt, sampling)), 20)

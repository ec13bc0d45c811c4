"""What all engines behind HTTP servers have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trajpack.agent.engines.queues import (
    End,
    ObservationQueue,
    check_entered,
    warn_unentered,
)
from trajpack.agent.engines.transformers_batching import Limits, read_prompt, read_sampling
from trajpack.agent.errors import GenerationError, RequestRefusedError
from trajpack.agent.protocols import GenerationOutput, Observation, Reply
from trajpack.agent.servers.client import ServerClient
from trajpack.agent.servers.completion import Ask
from trajpack.agent.servers.control import Control
from trajpack.agent.servers.dialect import Dialect
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.requesting import Requester, unforeseen
from trajpack.agent.servers.routing import Router, Server
from trajpack.agent.servers.url import ServerURL
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_Self = TypeVar("_Self", bound="ServerEngine")


@dataclass(eq=False)
class _Episode:
    replies: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[GenerationOutput]] = field(default_factory=set)
    num_requests: int = 0


class ServerEngine:
    """Generates with inference servers; use `SGLangEngine` or `VLLMEngine`.

    Use it as an asynchronous context manager. Each observation gets exactly one reply: a
    `GenerationOutput`, a `GenerationError` that says why there is none, or an `EngineEndedError`
    once the context has been left. The third item of an observation is a `SamplingParams` or any
    object with ``max_new_tokens`` and, optionally, ``temperature``, ``top_p``, ``top_k``,
    ``greedy`` and ``stop_token_ids``.

    Args:
        urls: Addresses of the servers. A user and a password in one are sent as such, and shown
            nowhere.
        dialect: How the servers are spoken to.
        options: Limits, retries, the token.
        version: Version of the weights that the servers hold now.

    Raises:
        ValueError: If there is no address, or one is no address of a server.
    """

    def __init__(
        self, urls: str | Sequence[str], dialect: Dialect, options: ServerOptions, version: int
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise ValueError("urls: expected the address of one server at least, got none")
        require("httpx", "httpcore", "sniffio", "stamina")
        self._urls = [ServerURL.parse(url) for url in given]
        if len({url.base for url in self._urls}) < len(self._urls):
            raise ValueError("urls: one server is named twice")
        if not 0 <= version <= INT32_MAX:
            raise ValueError(f"version must be in [0, {INT32_MAX}], got {version}")
        self._dialect = dialect
        self._options = options
        self._version = version
        self._obs_queue = ObservationQueue(self._take_at_once)
        self._episodes: dict[str, _Episode] = {}
        self._tasks: set[asyncio.Task[GenerationOutput]] = set()
        self._requester: Requester | None = None
        self._router: Router | None = None
        self._control: Control | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: End | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._control.version if self._control else self._version

    @property
    def obs_queue(self) -> asyncio.Queue[Observation]:
        """Where agents put what they ask."""
        return self._obs_queue

    def check_serving(self) -> None:
        """Raise unless the engine serves requests.

        Raises:
            RuntimeError: If the engine has not been entered, was left, or was entered in another
                event loop.
        """
        check_entered(self, self._end, self._loop)

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        """Return the queue on which replies to ``qid`` will come.

        Raises:
            ValueError: If an episode of that name is open.
        """
        if qid in self._episodes:
            raise ValueError(f"episode {qid!r} is open already")
        episode = self._episodes[qid] = _Episode()
        return episode.replies

    def close_episode(self, qid: str) -> None:
        """Forget ``qid``; what is in flight for it is cancelled, at its server too.

        Closing an episode that is not open does nothing.
        """
        episode = self._episodes.pop(qid, None)
        if episode is not None:
            for task in episode.tasks:
                task.cancel()
            if self._router is not None:
                self._router.forget(qid)

    async def set_version(self, version: int) -> None:
        """Declare that the servers have new weights, and tell those that listen.

        Call it after the weights were brought there by other means than this engine. A server
        that cannot be told gets no requests until the next update reaches it.

        Raises:
            ValueError: If the version is below the present one.
            WeightUpdateError: If no server could be told; the version stays as it was.
            RuntimeError: If the engine is not running.
        """
        await self._running("set_version").set_version(version)

    async def pause(self, *, interrupt: bool = False) -> None:
        """Let the servers stop generating, and send no new requests.

        Args:
            interrupt: End what is in flight where it is. It is resumed from its last token, with
                whatever weights there are after `resume`. Else it stands still, with its cache.

        Raises:
            WeightUpdateError: If a server in use did not stop; those that did go on.
            RuntimeError: If the engine is not running.
        """
        await self._running("pause").pause(interrupt=interrupt)

    async def resume(self) -> None:
        """Let servers and requests go on.

        Raises:
            WeightUpdateError: If a server in use did not; it gets no requests until it is well.
            RuntimeError: If the engine is not running.
        """
        await self._running("resume").resume()

    async def __aenter__(self: _Self) -> _Self:
        if self._control is not None or self._end is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered once")
        options = self._options
        servers = [
            Server(ServerClient(url, options), label=f"server {place} of {len(self._urls)}")
            for place, url in enumerate(self._urls, 1)
        ]
        self._router = Router(servers, self._greet, options.retries, options.time_limits)
        requester = Requester(self._router, self._dialect, options)
        self._control = Control(self._router, self._dialect, options, requester, self._version)
        try:
            await self._router.start()
        except BaseException:
            self._end = End("the engine could not be started")
            await self._close()
            raise
        self._requester, self._loop = requester, asyncio.get_running_loop()
        while not self._obs_queue.empty():
            self._take(self._obs_queue.get_nowait())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._end = End("the engine was shut down", has_left=True)
        for task in self._tasks:
            task.cancel()
        await self._close()

    async def _close(self) -> None:
        assert self._router is not None
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._router.stop()
            if self._requester is not None:
                await self._requester.finish()
        finally:
            for server in self._router.servers:
                await server.client.close()
            while not self._obs_queue.empty():
                self._take(self._obs_queue.get_nowait())

    async def _greet(self, server: Server) -> None:
        assert self._control is not None
        await self._control.greet(server)

    def _running(self, name: str) -> Control:
        if self._control is None or self._requester is None or self._end is not None:
            raise RuntimeError(f"{name}: the engine is not running")
        return self._control

    def _take_at_once(self, observation: Observation) -> bool:
        """Begin with an observation, unless the engine has not been entered yet."""
        if self._requester is None and self._end is None:
            if self._control is None and self._obs_queue.empty():
                warn_unentered(self)
            return False
        self._take(observation)
        return True

    def _take(self, observation: Observation) -> None:
        try:
            qid, token_ids, sampling = observation
            episode = self._episodes.get(qid)
        except (TypeError, ValueError):
            return _logger.warning("ignored, no (qid, ids, sampling): %s", one_line(observation))
        if episode is None:
            return _logger.warning("ignored, an episode that is not open: %s", one_line(qid))
        if self._end is not None or self._requester is None:
            end = self._end or End("the engine has not been entered")
            return episode.replies.put_nowait(end.as_error(qid))
        try:
            ask = self._read(qid, episode, token_ids, sampling)
        except Exception as error:  # noqa: BLE001 - a request of any shape must leave the rest alone
            refusal = RequestRefusedError(qid, one_line(f"refused: {error}"))
            refusal.__cause__ = error
            return episode.replies.put_nowait(refusal)
        task = asyncio.get_running_loop().create_task(self._requester.generate(ask))
        episode.tasks.add(task)
        self._tasks.add(task)
        task.add_done_callback(self._replier(qid, episode))

    def _read(self, qid: str, episode: _Episode, token_ids: Any, sampling: Any) -> Ask:
        options = self._options
        stops = tuple(int(token) for token in getattr(sampling, "stop_token_ids", None) or ())
        limits = Limits(
            vocabulary_size=options.vocab_size or INT32_MAX + 1,
            capacity=INT32_MAX,
            max_positions=options.max_request_tokens,
            eos_token_ids=frozenset(stops),
        )
        params = read_sampling(sampling, limits)
        prompt = read_prompt(token_ids, params.max_new_tokens, limits)
        ask = Ask(qid, episode.num_requests, prompt, params, stops)
        episode.num_requests += 1
        return ask

    def _replier(
        self, qid: str, episode: _Episode
    ) -> Callable[[asyncio.Task[GenerationOutput]], None]:
        """Return what turns the end of a task into the one reply, unless nobody waits for it."""

        def reply(task: asyncio.Task[GenerationOutput]) -> None:
            episode.tasks.discard(task)
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if self._episodes.get(qid) is not episode:
                return
            answer: Reply
            if task.cancelled():
                cancelled = GenerationError(qid, "the generation was cancelled")
                answer = cancelled if self._end is None else self._end.as_error(qid)
            elif error is None:
                answer = task.result()
            elif isinstance(error, GenerationError):
                # it says all there is to say, and may be kept for long: let go of frames and bodies
                error.__context__ = None
                answer = error.with_traceback(None)
            else:
                answer = unforeseen(qid, error)
            episode.replies.put_nowait(answer)

        return reply

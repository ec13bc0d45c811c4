"""The embedded engine: transformers continuous batching behind the `Engine` protocol.

Every sampled token is reported to the event loop as it comes, through one first-in,
first-out queue of callbacks; a weight update joins the same queue while generation is
paused. So whatever is reported before it was sampled by the older weights, and whatever
is reported after it by the newer ones.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.engines import transformers_batching as batching
from trajpack.agent.engines.transformers_requests import (
    End,
    ObservationQueue,
    OpenEpisode,
    Request,
    check_entered,
    warn_unentered,
)
from trajpack.agent.errors import GenerationError
from trajpack.agent.protocols import Observation, Reply
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)
_Loop: TypeAlias = asyncio.AbstractEventLoop
_WATCH_INTERVAL_S = 0.1


class TransformersEngine:
    """Generates with a Hugging Face model inside this process, on a CPU or a GPU.

    Use it as an asynchronous context manager; requests of all open episodes are batched
    together. Each observation gets exactly one reply: a `GenerationOutput`, a
    `GenerationError` if the request cannot be honoured (the others live on), or an
    `EngineEndedError` if generation has died or the engine was shut down. The third item of
    an observation is a `SamplingParams` or any object with ``max_new_tokens`` and,
    optionally, ``temperature``, ``top_p``, ``top_k`` and ``greedy``.

    Log-probabilities are those of the distribution sampled from: after temperature, top-k
    and top-p. For greedy decoding that is 0, unless two tokens are equally likely.

    While the context lasts, the model is in evaluation mode and its attention may be
    switched to a paged implementation; both are put back. Sampling draws from torch's
    global random generator, which entering the context seeds.

    Args:
        model: A causal language model on its device. Its attention must be ``sdpa``,
            ``eager`` or a flash implementation.
        eos_token_id: Token or tokens that end a completion; ``None`` takes the model's.
        num_blocks: Size of the key-value cache in blocks of ``page_size`` tokens.
            ``None`` is 512 on a CPU, and what memory allows on a GPU.
        page_size: Tokens of one block; ``None`` is 32 on a CPU and 256 on a GPU.
        max_batch_tokens: Tokens of one forward pass at most. ``None`` is 512 on a CPU,
            and what memory allows on a GPU.
        seed: Of the sampling.
        version: Version of the weights that ``model`` holds now.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_id: int | list[int] | None = None,
        num_blocks: int | None = None,
        page_size: int | None = None,
        max_batch_tokens: int | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        require("transformers")
        self._model: Any = model
        self._eos_token_ids = batching.read_eos(model, eos_token_id)
        self._build = partial(
            batching.build_batching,
            model,
            eos_token_ids=self._eos_token_ids,
            num_blocks=num_blocks,
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            seed=seed,
        )
        self._was_training = self._model.training
        self._attention = self._model.config._attn_implementation
        self._version = version
        self._reported_version = version
        self._updating = threading.Lock()
        self._obs_queue = ObservationQueue(self._take_late)
        self._episodes: dict[str, OpenEpisode] = {}
        self._requests: dict[str, Request] = {}
        self._request_numbers = itertools.count()
        self._batching: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._limits = batching.Limits(vocabulary_size=0, capacity=0)
        self._end: End | None = None
        self._unsilence: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    @property
    def obs_queue(self) -> asyncio.Queue[Observation]:
        """Where agents put what they ask."""
        return self._obs_queue

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and completion of one request at most, known once running."""
        if self._batching is None:
            raise RuntimeError("max_request_tokens: the engine is not running")
        return self._limits.max_request_tokens

    def check_serving(self) -> None:
        """Raise unless the engine serves requests, or has died while it did so.

        Raises:
            RuntimeError: If the engine has not been entered, was left, or was entered in another
                event loop.
        """
        check_entered(self, self._end, self._tasks[0].get_loop() if self._tasks else None)

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        """Return the queue on which replies to ``qid`` will come.

        Raises:
            ValueError: If an episode of that name is open.
        """
        if qid in self._episodes:
            raise ValueError(f"episode {qid!r} is open already")
        episode = self._episodes[qid] = OpenEpisode()
        return episode.replies

    def close_episode(self, qid: str) -> None:
        """Forget ``qid``; what is in flight for it is cancelled and never replied to.

        Closing an episode that is not open does nothing.
        """
        episode = self._episodes.pop(qid, None)
        for request_id in episode.request_ids if episode else ():
            del self._requests[request_id]
            self._batching.cancel_request(request_id)
            self._batching.output_router.result_handlers.pop(request_id, None)

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights between two tokens, without losing a request in flight.

        Requests in flight keep the cache that older weights filled. Each of their tokens
        is reported with the version that sampled it.

        Args:
            state_dict: A tensor for every weight of the model; weights tied to another may
                be left out. Copied before the call returns, from any device and dtype.
            version: Of the new weights, above the present one.

        Raises:
            ValueError: If the version does not increase, or names or shapes differ from
                the model's. The weights stay as they were.
            RuntimeError: If generation is not running, or transformers is older than 5.19.

        Cost: generation stands still while the weights are copied.
        """
        if self._batching is None or self._end is not None:
            raise RuntimeError("update_weights: the engine is not running")
        loop = asyncio.get_running_loop()
        await run_to_end(lambda: self._load(state_dict, version, loop))

    async def __aenter__(self) -> TransformersEngine:
        if self._batching is not None or self._end is not None:
            raise RuntimeError("a TransformersEngine can be entered once")
        try:
            await run_to_end(self._start)
        except BaseException:
            await run_to_end(self._stop)
            raise
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._has_ended)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._finish(End("the engine was shut down", has_left=True))
        try:
            await run_to_end(self._stop)
        finally:
            left = [task for task in self._tasks if not task.done()]
            await asyncio.gather(*left, return_exceptions=True)

    def _start(self) -> None:
        self._batching = self._build()
        self._limits = batching.read_limits(self._model, self._batching, self._eos_token_ids)
        self._unsilence = batching.silence_tracebacks()
        self._batching.start()

    def _stop(self) -> None:
        if self._batching is not None:
            self._batching.stop(block=True, hard_stop=True)
        self._unsilence()
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        self._model.train(self._was_training)

    def _load(self, state_dict: Mapping[str, torch.Tensor], version: int, loop: _Loop) -> None:
        def switch() -> None:
            self._version = version
            loop.call_soon_threadsafe(setattr, self, "_reported_version", version)

        with self._updating:
            if version <= self._version:
                raise ValueError(f"version must exceed {self._version}, got {version}")
            batching.load_weights(self._batching, self._model, state_dict, switch)

    async def _serve(self) -> None:
        while True:
            self._take(await self._obs_queue.get())

    async def _watch(self) -> None:
        while self._batching.is_running():
            await asyncio.sleep(_WATCH_INTERVAL_S)
            # Tokens that were on their way when their episode closed end up here.
            while self._batching.get_result(timeout=0) is not None:
                pass
        # Whatever the loop reported before it ended stands in the queue of callbacks.
        await asyncio.sleep(0)
        cause = self._batching.background_thread_status.fatal_error
        _logger.error("generation has died: %s", one_line(repr(cause)))
        self._finish(End(f"generation has died: {cause!r}", cause))

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        """Reply to all requests if a task of the engine was ended by something else than it."""
        if self._end is not None:
            return
        error = None if task.cancelled() else task.exception()
        how = "was cancelled" if task.cancelled() else f"has failed: {error!r}"
        _logger.error("the engine's task %s", one_line(how))
        self._finish(End(f"the engine's task {how}", error))

    def _finish(self, end: End) -> None:
        """Refuse what waits, what is in flight and whatever comes later."""
        self._end = self._end or end
        for request_id in list(self._requests):
            self._reply(request_id, self._end.as_error(self._requests[request_id].qid))
        while not self._obs_queue.empty():
            self._take(self._obs_queue.get_nowait())

    def _take_late(self, observation: Observation) -> bool:
        """Refuse an observation at once if nobody will ever take it from the queue."""
        if self._end is None:
            if self._batching is None and self._obs_queue.empty():
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
            return _logger.warning("observation for %r, which is not open, ignored", qid)
        if self._end is not None:
            return episode.replies.put_nowait(self._end.as_error(qid))
        try:
            self._submit(qid, episode, token_ids, sampling)
        except Exception as error:  # noqa: BLE001 - a request of any shape must leave the rest alone
            refusal = GenerationError(qid, f"refused: {error}")
            refusal.__cause__ = error
            episode.replies.put_nowait(refusal)

    def _submit(self, qid: str, episode: OpenEpisode, token_ids: Any, sampling: Any) -> None:
        limits = self._limits
        params = batching.read_sampling(sampling, limits)
        prompt = batching.read_prompt(token_ids, params.max_new_tokens, limits)
        request_id = f"{next(self._request_numbers)}:{qid}"
        self._batching.register_result_handler(request_id, self._report)
        # If generation is dying it drops the request; then the watch replies, with the cause.
        self._batching.add_request(
            prompt,
            request_id=request_id,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(self._eos_token_ids) or -1,
            streaming=True,
            **batching.processor_arguments(params, limits.vocabulary_size),
        )
        self._requests[request_id] = Request(qid, prompt)
        episode.request_ids.add(request_id)

    def _report(self, result: Any) -> None:
        """Take in all tokens that a request has so far; called for each token."""
        request = self._requests.get(result.request_id)
        if request is None:
            return
        if result.error is not None:
            # If generation dies, so it will in a moment: one tells which case this is.
            fail = partial(self._fail, result.request_id, result.error)
            asyncio.get_running_loop().call_later(_WATCH_INTERVAL_S, fail)
            return
        request.extend_to(len(result.generated_tokens), self._reported_version)
        if result.is_finished():
            self._reply(result.request_id, request.complete(result, self._eos_token_ids))

    def _fail(self, request_id: str, reason: str) -> None:
        """Reply that one request has failed; if all have, the watch replies."""
        request = self._requests.get(request_id)
        if request and self._batching.background_thread_status.fatal_error is None:
            self._reply(request_id, GenerationError(request.qid, f"generation failed: {reason}"))

    def _reply(self, request_id: str, reply: Reply) -> None:
        request = self._requests.pop(request_id)
        episode = self._episodes[request.qid]
        episode.request_ids.remove(request_id)
        episode.replies.put_nowait(reply)

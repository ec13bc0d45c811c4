"""The embedded engine: transformers continuous batching behind the `Engine` protocol.

Each sampled token is reported to the event loop by a callback. A weight update schedules its own
in the same queue while generation is paused, so tokens reported before it are of older weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.engines import transformers_batching as batching
from trajpack.agent.engines.serving import End, ServedEngine
from trajpack.agent.errors import GenerationError, RequestRefusedError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest
from trajpack.packing.conversion import INT32_MAX, as_integer
from trajpack.packing.optional import require
from trajpack.packing.text import one_line
from trajpack.packing.types import VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)
_Loop: TypeAlias = asyncio.AbstractEventLoop
_WATCH_INTERVAL_S = 0.1


class TransformersEngine(ServedEngine):
    """Generates with a Hugging Face model inside this process, on a CPU or a GPU.

    Use it as an asynchronous context manager; requests of all calls are batched together. The
    third item of a request is a `SamplingParams` or any object with ``max_new_tokens`` and,
    optionally, others of its attributes and ``greedy``.

    Log-probabilities are those of the distribution sampled from: after temperature, top-k
    and top-p. For greedy decoding that is 0, unless two tokens are equally likely.

    While the context lasts, the model is in evaluation mode and its attention may be
    switched to a paged implementation; both are put back. Sampling draws from torch's
    global random generator, which entering the context seeds.

    Args:
        model: A causal language model on its device. Its attention must be ``sdpa``,
            ``eager`` or a flash implementation.
        tokenizer: Decodes tokens for ``SamplingParams.stop``; requests with texts to stop at are
            refused without it.
        eos_token_id: Token or tokens that end a completion; ``None`` takes the model's.
        num_blocks: Size of the key-value cache in blocks of ``page_size`` tokens.
            ``None`` is 512 on a CPU, and what memory allows on a GPU.
        page_size: Tokens of one block; ``None`` is 32 on a CPU and 256 on a GPU.
        max_batch_tokens: Tokens of one forward pass at most. ``None`` is 512 on a CPU,
            and what memory allows on a GPU.
        seed: Of the sampling.
        version: Version of the weights that ``model`` holds now.

    Raises:
        ImportError: If the installed transformers is older than 5.15.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any = None,
        eos_token_id: int | list[int] | None = None,
        num_blocks: int | None = None,
        page_size: int | None = None,
        max_batch_tokens: int | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        require("transformers")
        from transformers import __version__ as installed

        if tuple(map(int, installed.split(".")[:2])) < (5, 15):
            needed = "TransformersEngine needs transformers 5.15 or later"
            raise ImportError(f"{needed}, got {installed}")
        super().__init__()
        version = as_integer("version", version)
        if not 0 <= version <= INT32_MAX:
            raise ValueError(f"version must be in [0, {INT32_MAX}], got {version}")
        self._model: Any = model
        self._tokenizer = tokenizer
        configs = (self._model.generation_config, self._model.config.get_text_config())
        if eos_token_id is None:
            defaults = (getattr(config, "eos_token_id", None) for config in configs)
            eos_token_id = next((ids for ids in defaults if ids is not None), [])
        ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
        self._eos_token_ids = frozenset(ids)
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
        self._generations: dict[str, _Generation] = {}
        self._request_numbers = itertools.count()
        self._batching: Any = None
        self._watching: asyncio.Task[None]
        self._limits: Any = None

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and completion of one request at most, known once running."""
        if self._limits is None:
            raise RuntimeError("max_request_tokens: the engine is not running")
        return int(self._limits.max_request_tokens)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion, batched with the requests of all other calls.

        A cancelled call ends its generation.

        Raises:
            RequestRefusedError: If the request cannot be honoured, as where it is too long.
            GenerationError: If its generation failed.
            EngineEndedError: If generation has died or the engine was shut down.
            RuntimeError: If the engine has not been entered.
        """
        qid, token_ids, sampling = request
        async with self._answering(qid):
            try:
                params = batching.read_sampling(sampling, self._limits)
                prompt = batching.read_prompt(token_ids, params.max_new_tokens, self._limits)
                if params.stop and self._tokenizer is None:
                    raise ValueError("stop: texts need the engine's tokenizer, and it has none")
            except Exception as error:  # a request of any shape must leave the others alone
                raise RequestRefusedError(qid, f"refused: {error}") from error
            request_id = f"{next(self._request_numbers)}:{qid}"
            ends = self._eos_token_ids.union(params.stop_token_ids)
            done: asyncio.Future[GenerationOutput] = asyncio.Future()
            generation = _Generation(qid, prompt, done, ends, params.stop)
            self._batching.register_result_handler(request_id, self._report)
            # Dying batching drops the request; `_watch` then ends it, with the cause.
            self._batching.add_request(
                prompt,
                request_id=request_id,
                max_new_tokens=params.max_new_tokens,
                eos_token_id=sorted(ends) or -1,
                streaming=True,
                **batching.processor_arguments(params, self._limits.vocabulary_size),
            )
            self._generations[request_id] = generation
            try:
                return await done
            finally:
                del self._generations[request_id]
                if done.cancelled() or generation.has_stop_text:
                    self._batching.cancel_request(request_id)
                    self._batching.output_router.result_handlers.pop(request_id, None)

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights between two tokens; no request is lost.

        Requests in flight keep the cache that older weights filled.

        Args:
            state_dict: A dense tensor for every weight of the model; weights tied to another may
                be left out. Copied before the call returns, from any device and real dtype.
            version: Of the new weights, above the present one.

        Raises:
            TypeError, ValueError: If the version does not increase, or the names, a shape or a
                value do not suit the model: all are checked before the first is copied.
            RuntimeError: If generation is not running, or transformers is older than 5.19.
        """
        if self._batching is None or self._end is not None:
            raise RuntimeError("update_weights: the engine is not running")
        loop = asyncio.get_running_loop()
        version = as_integer("version", version)
        await run_to_end(lambda: self._load(state_dict, version, loop))

    async def __aenter__(self) -> TransformersEngine:
        if self._batching is not None or self._end is not None:
            raise RuntimeError("a TransformersEngine can be entered once")
        try:
            await run_to_end(self._start)
        except BaseException:
            await run_to_end(self._stop)
            raise
        self._watching = asyncio.create_task(self._watch())
        self._begin_serving()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._end_serving(End("the engine was shut down", has_left=True))
        self._watching.cancel()
        try:
            await run_to_end(self._stop)
        finally:
            if not self._watching.done():  # it has ended where this is another event loop
                await asyncio.wait({self._watching})

    def _start(self) -> None:
        self._batching = self._build()
        self._limits = batching.read_limits(self._model, self._batching)
        self._batching.start()

    def _stop(self) -> None:
        if self._batching is not None:
            self._batching.stop(block=True, hard_stop=True)
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        self._model.train(self._was_training)

    def _load(self, state_dict: Mapping[str, torch.Tensor], version: int, loop: _Loop) -> None:
        def switch() -> None:
            self._version = version
            loop.call_soon_threadsafe(setattr, self, "_reported_version", version)

        with self._updating:
            if not self._version < version <= INT32_MAX:
                expected = f"exceed {self._version} and fit int32"
                raise ValueError(f"version must {expected}, got {version}")
            batching.load_weights(self._batching, self._model, state_dict, switch)

    async def _watch(self) -> None:
        """Notice the death of generation."""
        while self._batching.is_running():
            await asyncio.sleep(_WATCH_INTERVAL_S)
            # Drops tokens that arrived after their request was cancelled.
            while self._batching.get_result(timeout=0) is not None:
                pass
        # Runs the callbacks that batching has scheduled before it ended.
        await asyncio.sleep(0)
        cause = self._batching.background_thread_status.fatal_error
        _logger.error("generation has died: %s", one_line(repr(cause)))
        self._end_serving(End(f"generation has died: {cause!r}", cause))

    def _report(self, result: Any) -> None:
        """Take in all tokens that a request has so far; called for each token."""
        generation = self._generations.get(result.request_id)
        if generation is None:
            return
        if result.error is not None:
            # Dying batching reports an error for each request; `_watch` then ends them all.
            loop = asyncio.get_running_loop()
            loop.call_later(_WATCH_INTERVAL_S, self._fail, generation, result.error)
            return
        ids = result.generated_tokens
        num_kept = generation.length_until_stop(ids, self._tokenizer)
        generation.extend_to(num_kept or len(ids), self._reported_version)
        if num_kept or result.is_finished():
            num_kept = num_kept or len(ids)
            generation.complete(ids[:num_kept], result.logprobs[:num_kept])

    def _fail(self, generation: _Generation, reason: str) -> None:
        """Fail one request, unless all have failed together."""
        if self._batching.background_thread_status.fatal_error is None:
            generation.fail(f"generation failed: {reason}")


@dataclass(eq=False)
class _Generation:
    """One request in flight."""

    qid: str
    prompt: list[int]
    done: asyncio.Future[GenerationOutput]
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    spans: list[VersionSpan] = field(default_factory=list)
    """Policy versions of the tokens reported so far."""
    has_stop_text: bool = False
    """Whether a text to stop at has come."""

    def length_until_stop(self, ids: list[int], tokenizer: Any) -> int | None:
        """Return how many tokens there are up to the one that completes a text to stop at."""
        if not self.stop:
            return None
        longest = max(len(text.encode()) for text in self.stop) + 8  # a token has a byte at least
        for end in range(self.spans[-1].end if self.spans else 0, len(ids)):
            tail = tokenizer.decode(
                ids[max(0, end + 1 - longest) : end + 1], clean_up_tokenization_spaces=False
            )
            if any(text in tail for text in self.stop):
                self.has_stop_text = True
                return end + 1
        return None

    def extend_to(self, num_tokens: int, version: int) -> None:
        """Tag the tokens that have come since the last call."""
        start = self.spans[-1].end if self.spans else 0
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, num_tokens))

    def complete(self, ids: list[int], logprobs: list[float]) -> None:
        """Hand over all tokens."""
        if len(ids) != len(logprobs) or not ids:
            return self.fail(f"{len(ids)} tokens came with {len(logprobs)} log-probabilities")
        has_stopped = self.has_stop_text or ids[-1] in self.stop_token_ids
        if not self.done.done():
            self.done.set_result(
                GenerationOutput(
                    qid=self.qid,
                    prompt_ids=self.prompt,
                    output_ids=ids,
                    output_logprobs=logprobs,
                    no_eos=not has_stopped,
                    version_start=self.spans[0].version,
                    version_end=self.spans[-1].version,
                    version_spans=tuple(self.spans) if len(self.spans) > 1 else None,
                    stop_reason="stop" if has_stopped else "length",
                )
            )

    def fail(self, reason: str) -> None:
        """End the request with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(GenerationError(self.qid, reason))
            self.done.exception()  # a call that was just cancelled does not retrieve it

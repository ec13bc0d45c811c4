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

    Log-probabilities are those of the distribution sampled from: after temperature, top-k and
    top-p. For greedy decoding that is 0, unless two tokens are equally likely.

    While the context lasts, the model is in evaluation mode, its attention may be a paged one, and
    torch's global random generator, which entering seeds, is drawn from.

    Args:
        model: A causal language model on its device, with ``sdpa``, ``eager`` or flash attention.
        tokenizer: Decodes tokens; requests with ``SamplingParams.stop`` are refused without it.
        eos_token_id: Token or tokens that end a completion; None takes the model's.
        num_blocks: Blocks of the key-value cache; None is 512 on a CPU, what fits on a GPU.
        page_size: Tokens of one block; None is 32 on a CPU, 256 on a GPU.
        max_batch_tokens: Tokens of one forward pass at most; None is as for ``num_blocks``.
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
        if eos_token_id is None:
            configs = (self._model.generation_config, self._model.config.get_text_config())
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
        """Return one completion, batched with those of other calls, see `Engine.generate`.

        Raises:
            RequestRefusedError: If the request cannot be honoured, as where it is too long.
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
        self._watching.add_done_callback(self._end_unwatched)
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
        with self._updating:
            if not self._version < version <= INT32_MAX:
                expected = f"exceed {self._version} and fit int32"
                raise ValueError(f"version must {expected}, got {version}")
            if not hasattr(self._batching, "pause"):
                raise RuntimeError("weight updates in flight need transformers 5.19 or newer")
            batching.check_weights(self._model.state_dict(), state_dict)
            with self._batching.pause():
                self._model.load_state_dict(state_dict, strict=False)
                if self._model.device.type == "cuda":
                    torch.cuda.synchronize(self._model.device)
                self._version = version
                loop.call_soon_threadsafe(setattr, self, "_reported_version", version)

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

    def _end_unwatched(self, watching: asyncio.Task[None]) -> None:
        """End serving however `_watch` ended: no request would notice the death of generation."""
        cause = None if watching.cancelled() else watching.exception()
        self._end_serving(End("the engine's task was ended", cause))

    def _report(self, result: Any) -> None:
        """Take in all tokens that a request has so far; called for each token."""
        generation = self._generations.get(result.request_id)
        if generation is None or generation.done.done():
            return
        if result.error is not None:
            # Dying batching reports an error for each request; `_watch` then ends them all.
            loop = asyncio.get_running_loop()
            loop.call_later(_WATCH_INTERVAL_S, self._fail, generation, result.error)
            return
        generation.extend(result.generated_tokens, self._reported_version, self._tokenizer)
        if generation.has_stop_text or result.is_finished():
            generation.complete(result.generated_tokens, result.logprobs)

    def _fail(self, generation: _Generation, reason: str) -> None:
        """Fail one request, unless all have failed together."""
        is_alive = self._batching.background_thread_status.fatal_error is None
        if is_alive and not generation.done.done():
            error = GenerationError(generation.qid, f"generation failed: {reason}")
            generation.done.set_exception(error)
            generation.done.exception()  # a call that was just cancelled does not retrieve it


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
    """Whether the last of these tokens completes a text to stop at."""

    def extend(self, ids: list[int], version: int, tokenizer: Any) -> None:
        """Tag the tokens that are new, up to one that completes a text to stop at."""
        start = end = self.spans[-1].end if self.spans else 0
        longest = max((len(text.encode()) for text in self.stop), default=0)
        longest += 8  # a token has a byte at least
        while end < len(ids) and not self.has_stop_text:
            end += 1
            if self.stop:
                tail = ids[max(0, end - longest) : end]
                said = tokenizer.decode(tail, clean_up_tokenization_spaces=False)
                self.has_stop_text = any(text in said for text in self.stop)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end))

    def complete(self, ids: list[int], logprobs: list[float]) -> None:
        """Hand over the tagged tokens."""
        end = self.spans[-1].end
        has_stopped = self.has_stop_text or ids[end - 1] in self.stop_token_ids
        self.done.set_result(
            GenerationOutput(
                qid=self.qid,
                prompt_ids=self.prompt,
                output_ids=ids[:end],
                output_logprobs=logprobs[:end],
                no_eos=not has_stopped,
                version_start=self.spans[0].version,
                version_end=self.spans[-1].version,
                version_spans=tuple(self.spans) if len(self.spans) > 1 else None,
                stop_reason="stop" if has_stopped else "length",
            )
        )

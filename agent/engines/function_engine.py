"""The engine of an asynchronous function that completes a prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeAlias

from trajpack.agent.engines.serving import ServedEngine
from trajpack.agent.errors import MalformedResponseError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest
from trajpack.packing.conversion import INT32_MAX, as_integer, shown
from trajpack.packing.types import FloatArray, IntArray

Completion: TypeAlias = GenerationOutput | tuple[IntArray, FloatArray, bool]
"""A completion, or its token ids, their log-probabilities, and whether it has no end-of-sequence
token."""


class FunctionEngine(ServedEngine):
    """Generates with an asynchronous function, any number of calls at the same time.

    A call is cancelled with its request, and at the end of the engine's context. What the function
    raises is raised as it is; a runner, which also checks the completion, fails that request alone.

    Args:
        function: Called with the token ids of the whole conversation and the sampling parameters;
            its coroutine returns ``(output_ids, output_logprobs, no_eos)``, sampled by the version
            at the time of the call, or a `GenerationOutput`, which gets the ``qid`` of the request.
        version: Policy version of the weights.

    Raises:
        TypeError, ValueError: If the function cannot be called, or the version is out of range.

    Example:
        >>> import asyncio
        >>> async def next_number(prompt_ids, sampling):
        ...     return [prompt_ids[-1] + 1], [-0.5], False
        >>> async def ask():
        ...     async with FunctionEngine(next_number, version=3) as engine:
        ...         return await engine.generate(("q", [1, 2], None))
        >>> output = asyncio.run(ask())
        >>> output.output_ids, output.version_end
        ([3], 3)
    """

    def __init__(
        self, function: Callable[[Sequence[int], Any], Awaitable[Completion]], *, version: int = 0
    ) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"function must be an asynchronous function, got {shown(function)}")
        self._function = function
        self._version = 0
        self.set_version(version)

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    def set_version(self, version: int) -> None:
        """Declare that calls from now on sample with other weights, of a version not below."""
        version = as_integer("version", version)
        if not self._version <= version <= INT32_MAX:
            raise ValueError(f"version must be in [{self._version}, {INT32_MAX}], got {version}")
        self._version = version

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("a FunctionEngine can be entered once")
        self._begin_serving()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._shut_down()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return the completion of one call, see `Engine.generate`."""
        qid, prompt_ids, sampling = request
        prompt_ids = list(prompt_ids)  # the function and the caller may change theirs
        async with self._answering(qid):
            version = self._version
            completion = await self._function(prompt_ids.copy(), sampling)
        if isinstance(completion, GenerationOutput):
            return replace(completion, qid=qid)
        if not isinstance(completion, tuple) or len(completion) != 3:
            expected = "(output_ids, output_logprobs, no_eos) or a GenerationOutput"
            reason = f"the engine's function must return {expected}, got {shown(completion)}"
            raise MalformedResponseError(qid, reason)
        ids, logprobs, no_eos = completion
        return GenerationOutput(qid, prompt_ids, ids, logprobs, no_eos, version, version)

"""What a server's log-probabilities are: before temperature and filters, or after.

A trainer needs those of the distribution that was sampled from. vLLM reports, unless told
otherwise, those of temperature 1 without filters ("raw"); SGLang those after the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.client import Order
from trajpack.agent.servers.dialect import Dialect, read_json
from trajpack.agent.servers.failures import MalformedError, RefusedError
from trajpack.agent.servers.options import LogprobSemantics
from trajpack.agent.servers.routing import Server

_TOKENS = (0, 1, 2, 3, 5, 8, 13, 21)
"""Prompts that are tried: in every vocabulary, though a server may refuse some."""
_MIN_GAP = 0.05
"""Between the greatest log-probability and the fifth: far above what rounding does."""
_MAX_LOGPROB = 0.01
"""A log-probability is 0 at most, and their probabilities sum up to 1: but for rounding."""


def mismatch(
    params: SamplingParams, logprobs: LogprobSemantics, *, filters_are_processed: bool
) -> str | None:
    """Return what would be amiss with the log-probabilities of a request, or None.

    Args:
        params: Of the request.
        logprobs: What the server's are.
        filters_are_processed: Whether processed ones are those after top-k and top-p.

    Example:
        >>> mismatch(SamplingParams(), "raw", filters_are_processed=True)
        >>> mismatch(SamplingParams(temperature=0.5), "raw", filters_are_processed=True)
        "temperature 0.5: the server's log-probabilities are those of temperature 1"
    """
    if logprobs == "raw" and params.temperature != 1:
        given = f"temperature {params.temperature:g}"
        return f"{given}: the server's log-probabilities are those of temperature 1"
    has_filter = params.top_p < 1 or params.top_k > 0
    if (
        has_filter
        and params.temperature
        and not (logprobs == "processed" and filters_are_processed)
    ):
        given = f"top_p {params.top_p:g} and top_k {params.top_k}"
        return f"{given}: the server's log-probabilities are those without these filters"
    return None


async def detect_logprobs(
    server: Server, dialect: Dialect, ask: Callable[[Order], Awaitable[bytes]]
) -> LogprobSemantics:
    """Find out what a server's log-probabilities are.

    The greatest ones after the same prompt lie twice as far apart at temperature 0.5 as at 1
    where they are processed, and as far where they are raw.

    Args:
        server: To ask.
        dialect: How.
        ask: Sends an order to it.

    Raises:
        RetryableError: If the server cannot be asked now.
        MalformedError: If its answers fit neither.

    Cost: two generations of one token, more where the model is undecided.
    """
    for token_id in _TOKENS:
        try:
            gaps = [
                await _gap(server, dialect, ask, token_id, temperature)
                for temperature in (1.0, 0.5)
            ]
        except RefusedError:
            continue
        if gaps[0] > _MIN_GAP:
            ratio = gaps[1] / gaps[0]
            if 0.8 < ratio < 1.25:
                return "raw"
            if 1.6 < ratio < 2.5:
                return "processed"
    raise MalformedError(
        "its log-probabilities look neither raw nor processed; declare what they are (the option "
        "logprobs)",
        server.name,
    )


async def _gap(
    server: Server,
    dialect: Dialect,
    ask: Callable[[Order], Awaitable[bytes]],
    token_id: int,
    temperature: float,
) -> float:
    """Return how far the five greatest log-probabilities lie apart."""
    body = await ask(dialect.top_logprobs(server, token_id, temperature))
    try:
        values = sorted((float(value) for value in dialect.read_top(read_json(body))), reverse=True)
        gap = values[0] - values[min(4, len(values) - 1)]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"no top log-probabilities in the answer ({type(error).__name__})"
        raise MalformedError(reason, server.name) from None
    if not math.isfinite(gap):
        raise MalformedError("top log-probabilities that are not finite", server.name)
    if values[0] > _MAX_LOGPROB or sum(map(math.exp, set(values))) > 1 + len(values) * _MAX_LOGPROB:
        raise MalformedError(
            f"logits for log-probabilities: the greatest are {values[:5]}", server.name
        )
    return gap

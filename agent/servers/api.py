"""Interface to the HTTP API of one kind of server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.client import HTTPRequest, RefusedError
from trajpack.agent.servers.engine_response import EngineResponse, ResponseLimits
from trajpack.agent.servers.options import LogprobSemantics

if TYPE_CHECKING:
    from trajpack.agent.servers.routing import Server

NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sent with each request: a server may fill missing ones in from the model's folder."""


@dataclass(frozen=True)
class SampleRequest:
    """Request for one sample, as every kind of server needs it."""

    request_id: str
    """Id under which the request can be aborted."""
    token_ids: list[int]
    """Token ids of the prompt, and of the tokens sampled already."""
    params: SamplingParams
    """Sampling parameters; ``max_new_tokens`` is the number of missing tokens."""
    seed: int | None = None
    """Seed of this request."""
    wants_routes: bool = False
    """Whether the response is to have the routed experts."""


class ServerAPI(Protocol):
    """HTTP API of one kind of server: writes requests and reads responses."""

    @property
    def default_logprobs(self) -> LogprobSemantics:
        """Semantics of the log-probabilities of a server with default settings."""

    @property
    def filters_are_processed(self) -> bool:
        """Whether "processed" log-probabilities are those after top-k and top-p."""

    def write_sample(self, server: Server, sample: SampleRequest) -> HTTPRequest:
        """Return the request for a sample."""

    def read_sample(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        """Parse the response to it, or raise a ValueError."""

    def use_fallback(self, server: Server, error: RefusedError) -> bool:
        """Switch a server that refused to another endpoint, if there is one."""

    def abort(self, server: Server, request_id: str) -> HTTPRequest | None:
        """Return the request that aborts a sample; None if closing the connection does so."""

    def set_version(self, version: int) -> HTTPRequest:
        """Return the request that sets the name of the weights."""

    def get_version(self) -> HTTPRequest:
        """Return the request for that name; the response has it as ``weight_version``."""

    def pause(self, *, interrupt: bool) -> HTTPRequest:
        """Return the request that pauses generation; ``interrupt`` ends requests in flight."""

    def resume(self) -> HTTPRequest:
        """Return the request that resumes generation."""


def logprob_mismatch(
    params: SamplingParams, logprobs: LogprobSemantics, *, filters_are_processed: bool
) -> str | None:
    """Return why log-probabilities would not be those of the distribution sampled from, or None.

    Args:
        params: Sampling parameters of the request.
        logprobs: Semantics of the server's log-probabilities.
        filters_are_processed: Whether processed ones include top-k and top-p.

    Example:
        >>> logprob_mismatch(SamplingParams(), "raw", filters_are_processed=True)
        >>> logprob_mismatch(SamplingParams(temperature=0.5), "raw", filters_are_processed=True)
        "temperature 0.5: the server's log-probabilities are those of temperature 1"
    """
    if logprobs == "raw" and params.temperature != 1:
        given = f"temperature {params.temperature:g}"
        return f"{given}: the server's log-probabilities are those of temperature 1"
    has_filter = params.temperature and (params.top_p < 1 or params.top_k > 0)
    if has_filter and not (logprobs == "processed" and filters_are_processed):
        given = f"top_p {params.top_p:g} and top_k {params.top_k}"
        return f"{given}: the server's log-probabilities are those without these filters"
    return None

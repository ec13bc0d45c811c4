"""Generation by vLLM servers: `VLLMEngine`, and vLLM's HTTP API as of version 0.32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from trajpack.agent.servers.api import NEUTRAL, SampleRequest
from trajpack.agent.servers.client import HTTPRequest, RefusedError
from trajpack.agent.servers.engine import ServerEngine
from trajpack.agent.servers.engine_response import (
    EngineResponse,
    ResponseLimits,
    read_vllm_response,
)
from trajpack.agent.servers.options import DEFAULT_OPTIONS, LogprobSemantics, ServerOptions
from trajpack.agent.servers.routing import Server

VLLMEndpoint: TypeAlias = Literal["generate", "completions"]


class VLLMEngine(ServerEngine):
    """Generates with vLLM servers, token ids in and out.

    Uses ``/inference/v1/generate`` (servers started with ``--enable-scale-out``), which reports the
    version of the weights of each token, and ``/v1/completions`` on servers without it. The
    endpoint is detected once for each server, unless it is declared.

    Log-probabilities are those before temperature, top-k and top-p, unless the server was started
    with ``--logprobs-mode processed_logprobs``; declare that with
    ``ServerOptions(logprobs="processed")``. Requests whose log-probabilities
    would not be those of the distribution sampled from are refused.

    Weight updates and pauses need servers with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        urls: Addresses of the servers.
        options: Limits, retries, the token.
        endpoint: ``"generate"`` or ``"completions"``; ``None`` detects it.
        version: Policy version of the servers' weights.

    Raises:
        ValueError: If there is no address, or one is not the address of a server.
        SetupError: On entering, if no server is healthy in time.

    Example:
        >>> VLLMEngine(["http://127.0.0.1:8000", "http://127.0.0.1:8001"]).version
        0
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        options: ServerOptions = DEFAULT_OPTIONS,
        endpoint: VLLMEndpoint | None = None,
        version: int = 0,
    ) -> None:
        if endpoint not in ("generate", "completions", None):
            raise ValueError(
                f"endpoint must be 'generate', 'completions' or None, got {endpoint!r}"
            )
        super().__init__(urls, VLLMServerAPI(endpoint), options, version=version)


@dataclass(frozen=True)
class VLLMServerAPI:
    """vLLM's ``/inference/v1/generate`` and ``/v1/completions``.

    Source: the documentation of vLLM, and responses recorded from vLLM 0.32.
    """

    endpoint: VLLMEndpoint | None = None
    """Endpoint of all servers; ``None`` detects it for each."""
    default_logprobs: LogprobSemantics = "raw"
    """``--logprobs-mode processed_logprobs`` changes it."""
    filters_are_processed: bool = True
    """Processed log-probabilities are those after top-k and top-p."""

    def write_sample(self, server: Server, sample: SampleRequest) -> HTTPRequest:
        """Return the request for a sample with the log-probability of each of its tokens."""
        params = sample.params
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,  # 0 takes all
            "logprobs": 0,
            **NEUTRAL,
        }
        if params.stop:
            sampling["stop"] = list(params.stop)
            sampling["include_stop_str_in_output"] = True
        if params.stop_token_ids:
            sampling["stop_token_ids"] = list(params.stop_token_ids)
        if sample.seed is not None:
            sampling["seed"] = sample.seed
        return self._request(server, sample.request_id, sample.token_ids, sampling=sampling)

    def read_sample(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        """Parse the response of either endpoint."""
        return read_vllm_response(body, limits)

    def use_fallback(self, server: Server, error: RefusedError) -> bool:
        """Switch a server without ``/inference/v1/generate`` to ``/v1/completions``."""
        if self._is_completions(server) or self.endpoint or not error.is_absence:
            return False
        server.endpoint = "completions"
        return True

    def abort(self, server: Server, request_id: str) -> HTTPRequest | None:
        """Return the abort request; ``/v1/completions`` aborts when the connection is closed."""
        if self._is_completions(server):
            return None
        names = [f"generate-tokens-{request_id}"]
        return HTTPRequest("/inference/v1/abort_requests", {"request_ids": names})

    def set_version(self, version: int) -> HTTPRequest:
        """Return the request that names the weights, for servers in development mode."""
        return HTTPRequest("/update_weight_version", {"new_version": str(version)})

    def get_version(self) -> HTTPRequest:
        """Return the request for the name of the weights, for servers in development mode."""
        return HTTPRequest("/weight_info", method="GET")

    def pause(self, *, interrupt: bool) -> HTTPRequest:
        """Return the pause request, for servers in development mode."""
        return HTTPRequest(f"/pause?mode={'abort' if interrupt else 'keep'}")

    def resume(self) -> HTTPRequest:
        """Return the resume request."""
        return HTTPRequest("/resume")

    def _is_completions(self, server: Server) -> bool:
        return (self.endpoint or server.endpoint) == "completions"

    def _request(
        self, server: Server, request_id: str, token_ids: list[int], *, sampling: dict[str, Any]
    ) -> HTTPRequest:
        payload: dict[str, Any] = {} if server.model is None else {"model": server.model}
        if self._is_completions(server):
            # without this, two tokens of the same text would count as one
            payload |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
            payload |= {"request_id": request_id, "prompt": token_ids, **sampling}
            return HTTPRequest("/v1/completions", payload)
        payload |= {"request_id": request_id, "token_ids": token_ids, "sampling_params": sampling}
        return HTTPRequest("/inference/v1/generate", payload)

"""Generation by SGLang servers: `SGLangEngine`, and SGLang's HTTP API as of version 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trajpack.agent.servers.api import NEUTRAL, SampleRequest
from trajpack.agent.servers.client import HTTPRequest, RefusedError
from trajpack.agent.servers.engine import ServerEngine
from trajpack.agent.servers.engine_response import (
    EngineResponse,
    ResponseLimits,
    read_sglang_response,
)
from trajpack.agent.servers.options import DEFAULT_OPTIONS, LogprobSemantics, ServerOptions
from trajpack.agent.servers.routing import Server


class SGLangEngine(ServerEngine):
    """Generates with SGLang servers, token ids in and out, through their native ``/generate``.

    Log-probabilities are those after the temperature, before top-k and top-p, so requests with
    these filters are refused. Servers that run with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` report
    those before the temperature; declare that with ``ServerOptions(logprobs="raw")``.

    Args:
        urls: Addresses of the servers.
        options: Limits, retries, the token.
        version: Policy version of the servers' weights.

    Raises:
        ValueError: If there is no address, or one is not the address of a server.
        SetupError: On entering, if no server is healthy in time.

    Example:
        >>> SGLangEngine("http://127.0.0.1:30000", version=3).version
        3
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        options: ServerOptions = DEFAULT_OPTIONS,
        version: int = 0,
    ) -> None:
        super().__init__(urls, SGLangServerAPI(), options, version=version)

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load weights from a folder on every server, and declare their version.

        A server that fails gets no requests until a later update succeeds. SGLang waits for the
        requests in flight, unless it is called within ``pause(interrupt=True)``.

        Args:
            path: Path of the folder on the servers.
            version: Policy version of the new weights, above the present one.

        Raises:
            ValueError: If the version does not increase.
            WeightUpdateError: If every server failed; the version stays as it was.
            RuntimeError: If the engine is not running.
        """
        payload = {"model_path": str(path), "weight_version": str(version)}
        control = self._running("update_weights_from_disk")
        await control.update(HTTPRequest("/update_weights_from_disk", payload), version)


@dataclass(frozen=True)
class SGLangServerAPI:
    """SGLang's ``/generate``.

    Source: the published types of SGLang 0.5.23, and its page "Return Routed Experts".
    """

    default_logprobs: LogprobSemantics = "processed"
    """``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` changes it."""
    filters_are_processed: bool = False
    """Processed log-probabilities are those after the temperature, before top-k and top-p."""

    def write_sample(self, server: Server, sample: SampleRequest) -> HTTPRequest:
        """Return the request for a sample with the log-probability of each of its tokens."""
        params = sample.params
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "skip_special_tokens": False,
            "no_stop_trim": True,  # the stop token or text belongs to the completion
            **NEUTRAL,
        }
        if params.stop:
            sampling["stop"] = list(params.stop)
        if params.stop_token_ids:
            sampling["stop_token_ids"] = list(params.stop_token_ids)
        if sample.seed is not None:
            sampling["sampling_seed"] = sample.seed
        payload = {"rid": sample.request_id, **_payload(sample.token_ids, sampling)}
        if sample.wants_routes:
            payload["return_routed_experts"] = True
        return HTTPRequest("/generate", payload)

    def read_sample(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        """Parse the response."""
        return read_sglang_response(body, limits)

    def use_fallback(self, server: Server, error: RefusedError) -> bool:
        """Return False: there is one endpoint."""
        return False

    def abort(self, server: Server, request_id: str) -> HTTPRequest | None:
        """Return the abort request: SGLang may notice a closed connection late."""
        return HTTPRequest("/abort_request", {"rid": request_id})

    def set_version(self, version: int) -> HTTPRequest:
        """Return the request that names the weights; requests in flight go on."""
        payload = {"new_version": str(version), "abort_all_requests": False}
        return HTTPRequest("/update_weight_version", payload)

    def get_version(self) -> HTTPRequest:
        """Return the request for the description of the model."""
        return HTTPRequest("/model_info", method="GET")

    def pause(self, *, interrupt: bool) -> HTTPRequest:
        """Return the pause request."""
        return HTTPRequest("/pause_generation", {"mode": "abort" if interrupt else "in_place"})

    def resume(self) -> HTTPRequest:
        """Return the resume request."""
        return HTTPRequest("/continue_generation", {})


def _payload(token_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_ids": token_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,  # those of the prompt would recompute its prefix
        "stream": False,
    }

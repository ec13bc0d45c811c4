"""How vLLM is spoken to: facts of its HTTP interface, as of version 0.32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from trajpack.agent.servers.client import Order
from trajpack.agent.servers.dialect import NEUTRAL, Draw
from trajpack.agent.servers.engine_response import (
    EngineResponse,
    ResponseLimits,
    read_vllm_response,
)
from trajpack.agent.servers.options import LogprobSemantics
from trajpack.agent.servers.routing import Server

VLLMEndpoint: TypeAlias = Literal["generate", "completions"]
_GENERATE = "/inference/v1/generate"
_ABSENT = frozenset((403, 404, 405, 501))
"""Statuses of an endpoint that the server does not have, or does not open."""


@dataclass(frozen=True)
class VLLMDialect:
    """Speaks ``/inference/v1/generate``, else ``/v1/completions``.

    Source: the documentation of vLLM, and responses recorded from vLLM 0.32.
    """

    endpoint: VLLMEndpoint | None = None
    """The one to use; ``None`` finds it out, for each server once."""
    default_logprobs: LogprobSemantics = "raw"
    """``--logprobs-mode processed_logprobs`` changes it."""
    filters_are_processed: bool = True
    """Its processed log-probabilities are those after top-k and top-p."""

    def draw(self, server: Server, draw: Draw) -> Order:
        """Ask for a sample with the log-probability of each token in it."""
        params = draw.params
        sampling: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,  # 0 takes all
            "logprobs": 0,
            **NEUTRAL,
        }
        if draw.stop_token_ids:
            sampling["stop_token_ids"] = list(draw.stop_token_ids)
        if draw.seed is not None:
            sampling["seed"] = draw.seed
        return self._order(server, draw.request_id, draw.token_ids, sampling)

    def read(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        """Read the answer of either endpoint."""
        return read_vllm_response(body, limits)

    def turn_to_other(self, server: Server, status: int) -> bool:
        """Turn to ``/v1/completions`` where the other endpoint is not there."""
        if self._is_completions(server) or self.endpoint is not None or status not in _ABSENT:
            return False
        server.endpoint = "completions"
        return True

    def cancel(self, server: Server, request_id: str) -> Order | None:
        """Name the request; on ``/v1/completions`` the closed connection says enough."""
        if self._is_completions(server):
            return None
        names = [f"generate-tokens-{request_id}"]
        return Order("/inference/v1/abort_requests", {"request_ids": names})

    def tell_version(self, version: int) -> Order:
        """Set the version that spans are labelled with; a server in development mode listens."""
        return Order("/update_weight_version", {"new_version": str(version)})

    def ask_version(self) -> Order:
        """Ask a server in development mode."""
        return Order("/weight_info", method="GET")

    def pause(self, *, interrupt: bool) -> Order:
        """Pause a server in development mode."""
        return Order(f"/pause?mode={'abort' if interrupt else 'keep'}")

    def resume(self) -> Order:
        """Let it go on."""
        return Order("/resume")

    def top_logprobs(self, server: Server, token_id: int, temperature: float) -> Order:
        """Ask for five, and that of the sampled token."""
        sampling = {"max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        sampling |= {"logprobs": 5, "seed": 0, **NEUTRAL}
        return self._order(server, f"top-{token_id}-{temperature:g}", [token_id], sampling)

    def read_top(self, response: Any) -> Sequence[Any]:
        """Read them from the answer of either endpoint."""
        logprobs = response["choices"][0]["logprobs"]
        if logprobs.get("content"):
            return [entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]]
        return list(logprobs["top_logprobs"][0].values())

    def _is_completions(self, server: Server) -> bool:
        return (self.endpoint or server.endpoint) == "completions"

    def _order(
        self, server: Server, request_id: str, token_ids: list[int], sampling: dict[str, Any]
    ) -> Order:
        payload: dict[str, Any] = {} if server.model is None else {"model": server.model}
        if self._is_completions(server):
            # without this, two tokens of the same text would count as one
            payload |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
            payload |= {"request_id": request_id, "prompt": token_ids, **sampling}
            return Order("/v1/completions", payload, request_id=request_id)
        payload |= {"request_id": request_id, "token_ids": token_ids}
        return Order(_GENERATE, payload | {"sampling_params": sampling}, request_id=request_id)

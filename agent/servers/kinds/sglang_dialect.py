"""How SGLang is spoken to: facts of its native HTTP interface, as of version 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trajpack.agent.servers.client import Order
from trajpack.agent.servers.dialect import NEUTRAL, Draw
from trajpack.agent.servers.engine_response import (
    EngineResponse,
    ResponseLimits,
    read_sglang_response,
)
from trajpack.agent.servers.options import LogprobSemantics
from trajpack.agent.servers.routing import Server


@dataclass(frozen=True)
class SGLangDialect:
    """Speaks ``/generate``.

    Source: the published types of SGLang 0.5.23.
    """

    default_logprobs: LogprobSemantics = "processed"
    """``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` changes it."""
    filters_are_processed: bool = False
    """Its log-probabilities are those after the temperature, before top-k and top-p."""

    def draw(self, server: Server, draw: Draw) -> Order:
        """Ask for a sample with the log-probability of each token in it."""
        params = draw.params
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "skip_special_tokens": False,
            "no_stop_trim": True,  # the stop token belongs to the completion
            **NEUTRAL,
        }
        if draw.stop_token_ids:
            sampling["stop_token_ids"] = list(draw.stop_token_ids)
        if draw.seed is not None:
            sampling["sampling_seed"] = draw.seed
        payload = {
            "rid": draw.request_id,
            "input_ids": draw.token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,  # none of the prompt's: they would recompute its prefix
            "stream": False,
        }
        return Order("/generate", payload, request_id=draw.request_id)

    def read(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        """Read the answer."""
        return read_sglang_response(body, limits)

    def turn_to_other(self, server: Server, status: int) -> bool:
        """There is one endpoint."""
        return False

    def cancel(self, server: Server, request_id: str) -> Order | None:
        """Name the request: a closed connection is not noticed everywhere at once."""
        return Order("/abort_request", {"rid": request_id})

    def tell_version(self, version: int) -> Order:
        """Set the version that spans are labelled with; what is in flight goes on."""
        payload = {"new_version": str(version), "abort_all_requests": False}
        return Order("/update_weight_version", payload)

    def ask_version(self) -> Order:
        """Ask for what is known of the model."""
        return Order("/model_info", method="GET")

    def pause(self, *, interrupt: bool) -> Order:
        """Pause a server."""
        return Order("/pause_generation", {"mode": "abort" if interrupt else "in_place"})

    def resume(self) -> Order:
        """Let it go on."""
        return Order("/continue_generation", {})

    def load_weights(self, path: str, version: int) -> Order:
        """Ask for the weights in a folder that the server can read."""
        payload = {"model_path": path, "weight_version": str(version)}
        return Order("/update_weights_from_disk", payload)

    def top_logprobs(self, server: Server, token_id: int, temperature: float) -> Order:
        """Ask for five."""
        payload = {
            "input_ids": [token_id],
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                **NEUTRAL,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 5,
            "stream": False,
        }
        return Order("/generate", payload)

    def read_top(self, response: Any) -> Sequence[Any]:
        """Read the first entries of each."""
        return [entry[0] for entry in response["meta_info"]["output_top_logprobs"][0]]

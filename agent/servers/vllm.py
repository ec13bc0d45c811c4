"""Generation by vLLM servers: `VLLMEngine`, and vLLM's HTTP API as of version 0.32."""

from __future__ import annotations

from typing import Any

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.client import HTTPRequest, Server
from trajpack.agent.servers.control import Orders
from trajpack.agent.servers.engine import ServerEngine


class VLLMEngine(ServerEngine):
    """Generates with vLLM servers, token ids in and out.

    Uses ``/inference/v1/generate`` (servers started with ``--enable-scale-out``), which reports the
    version of the weights of each token, and ``/v1/completions`` on servers without it.

    Log-probabilities are those before temperature, top-k and top-p, unless the server was started
    with ``--logprobs-mode processed_logprobs``; declare that with
    ``ServerOptions(logprobs="processed")``. Requests that need others are refused.

    Weight updates and pauses need servers with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        urls: Addresses of the servers.
        options: Limits, retries, the token.
        version: Policy version of the servers' weights.

    Raises:
        ValueError: If one is not the address of a server.
        SetupError: On entering, if no server is healthy in time.

    Example:
        >>> VLLMEngine(["http://127.0.0.1:8000", "http://127.0.0.1:8001"]).version
        0
    """

    _dialect = "vLLM"
    _default_logprobs = "raw"
    _filters_are_processed = True
    _can_fall_back = True
    _orders = Orders(
        set_version=lambda version: HTTPRequest(
            "/update_weight_version", {"new_version": str(version)}
        ),
        get_version=HTTPRequest("/weight_info", method="GET"),
        pause=lambda interrupt: HTTPRequest(f"/pause?mode={'abort' if interrupt else 'keep'}"),
        resume=HTTPRequest("/resume"),
    )

    def _write(
        self, server: Server, token_ids: list[int], params: SamplingParams, seed: int | None
    ) -> HTTPRequest:
        sampling = self._sampling(
            params,
            max_tokens=params.max_new_tokens,
            top_k=params.top_k,  # 0 takes all
            logprobs=0,
            seed=seed,
            # texts to stop at are looked for in the whole text
            include_stop_str_in_output=True if params.stop else None,
            skip_special_tokens=False if params.stop else None,
        )
        payload: dict[str, Any] = {} if server.model is None else {"model": server.model}
        if server.has_fallen_back:
            # as ids, or two tokens of the same text would count as one
            payload |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
            return HTTPRequest("/v1/completions", payload | {"prompt": token_ids, **sampling})
        payload |= {"token_ids": token_ids, "sampling_params": sampling}
        return HTTPRequest("/inference/v1/generate", payload)

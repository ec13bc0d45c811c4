"""Generation by SGLang servers: `SGLangEngine`, and SGLang's HTTP API as of version 0.5.23."""

from __future__ import annotations

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.client import HTTPRequest, Server
from trajpack.agent.servers.control import Orders
from trajpack.agent.servers.engine import ServerEngine


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
        ValueError: If one is not the address of a server.
        SetupError: On entering, if no server is healthy in time.

    Example:
        >>> SGLangEngine("http://127.0.0.1:30000", version=3).version
        3
    """

    _dialect = "SGLang"
    _default_logprobs = "processed"
    _filters_are_processed = False
    _orders = Orders(
        set_version=lambda version: HTTPRequest(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        ),
        get_version=HTTPRequest("/model_info", method="GET"),
        pause=lambda interrupt: HTTPRequest(
            "/pause_generation", {"mode": "abort" if interrupt else "in_place"}
        ),
        resume=HTTPRequest("/continue_generation", {}),
    )

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
        await self._update(HTTPRequest("/update_weights_from_disk", payload), version)

    def _write(
        self, server: Server, token_ids: list[int], params: SamplingParams, seed: int | None
    ) -> HTTPRequest:
        sampling = self._sampling(
            params,
            max_new_tokens=params.max_new_tokens,
            top_k=params.top_k or -1,
            sampling_seed=seed,
            skip_special_tokens=False,
            no_stop_trim=True,  # the stop token or text belongs to the completion
        )
        payload = {
            "input_ids": token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,  # those of the prompt would recompute its prefix
            "stream": False,
        }
        if self._options.routed_experts is not None:
            payload["return_routed_experts"] = True
        return HTTPRequest("/generate", payload)

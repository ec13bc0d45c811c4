"""Generation by vLLM servers."""

from __future__ import annotations

from collections.abc import Sequence

from trajpack.agent.servers.engine import ServerEngine
from trajpack.agent.servers.kinds.vllm_dialect import VLLMDialect, VLLMEndpoint
from trajpack.agent.servers.options import DEFAULT_OPTIONS, ServerOptions


class VLLMEngine(ServerEngine):
    """Generates with vLLM servers, token ids in and out.

    Speaks ``/inference/v1/generate`` (servers started with ``--enable-scale-out``), which says
    which version of the weights sampled which token, and ``/v1/completions`` where a server does
    not have it. Which of the two is found out once for each server, unless it is declared.

    Log-probabilities are vLLM's own: before temperature, top-k and top-p, unless it was started
    with ``--logprobs-mode processed_logprobs``; say so with ``ServerOptions(logprobs="processed")``
    or let it be detected. Requests whose log-probabilities would not be those of the distribution
    sampled from are refused.

    Weight updates and pauses need servers with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        urls: Addresses of the servers.
        options: Limits, retries, the token.
        endpoint: ``"generate"`` or ``"completions"``; ``None`` finds it out.
        version: Version of the weights that the servers hold now.

    Raises:
        ValueError: If there is no address, or one is no address of a server.
        SetupError: On entering, if no server is healthy in time.

    Cost: a task and a connection for each request in flight; parsing beside the event loop from
    128 KiB.

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
        super().__init__(urls, VLLMDialect(endpoint), options, version)

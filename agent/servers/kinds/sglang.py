"""Generation by SGLang servers."""

from __future__ import annotations

from collections.abc import Sequence

from trajpack.agent.servers.engine import ServerEngine
from trajpack.agent.servers.kinds.sglang_dialect import SGLangDialect
from trajpack.agent.servers.options import DEFAULT_OPTIONS, ServerOptions


class SGLangEngine(ServerEngine):
    """Generates with SGLang servers, token ids in and out, through their native ``/generate``.

    Log-probabilities are SGLang's own: after the temperature, before top-k and top-p, so requests
    with these filters are refused. Servers that run with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``
    report those before the temperature; say so with ``ServerOptions(logprobs="raw")``.

    Args:
        urls: Addresses of the servers.
        options: Limits, retries, the token.
        version: Version of the weights that the servers hold now.

    Raises:
        ValueError: If there is no address, or one is no address of a server.
        SetupError: On entering, if no server is healthy in time.

    Cost: a task and a connection for each request in flight; parsing beside the event loop from
    128 KiB.

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
        self._sglang = SGLangDialect()
        super().__init__(urls, self._sglang, options, version)

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every server load the weights in a folder, and declare their version.

        A server that does not manage gets no requests until a later update reaches it. SGLang
        waits until what is in flight has ended; within ``pause(interrupt=True)`` it need not.

        Args:
            path: Of the folder, as the servers see it.
            version: Of the new weights, above the present one.

        Raises:
            ValueError: If the version does not increase.
            WeightUpdateError: If no server managed; the version stays as it was.
            RuntimeError: If the engine is not running.
        """
        control = self._running("update_weights_from_disk")
        await control.load_weights(self._sglang.load_weights(str(path), version), version)

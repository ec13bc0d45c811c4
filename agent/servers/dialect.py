"""What differs between kinds of servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.client import Order
from trajpack.agent.servers.engine_response import EngineResponse, ResponseLimits
from trajpack.agent.servers.options import LogprobSemantics
from trajpack.agent.servers.routing import Server

NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said with each request: left out, a server may take other values from the model's folder."""


@dataclass(frozen=True)
class Draw:
    """One request for a sample."""

    request_id: str
    """What the request is called when it is cancelled."""
    token_ids: list[int]
    """The prompt, and what was sampled already."""
    params: SamplingParams
    """How to sample; ``max_new_tokens`` is what remains."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, beside the model's own."""
    seed: int | None = None
    """Of this request."""


class Dialect(Protocol):
    """How one kind of server is spoken to."""

    @property
    def default_logprobs(self) -> LogprobSemantics:
        """What its log-probabilities are, unless it was told otherwise when it was started."""
        ...

    @property
    def filters_are_processed(self) -> bool:
        """Whether its "processed" log-probabilities are those after top-k and top-p, too."""
        ...

    def draw(self, server: Server, draw: Draw) -> Order:
        """Ask for a sample."""
        ...

    def read(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        """Read the answer to it, or raise a ValueError."""
        ...

    def turn_to_other(self, server: Server, status: int) -> bool:
        """Choose another endpoint, if there is one, for a server that refused with ``status``."""
        ...

    def cancel(self, server: Server, request_id: str) -> Order | None:
        """Free the server of a request whose answer nobody waits for; None if nothing is to do."""
        ...

    def tell_version(self, version: int) -> Order:
        """Say what the weights that the server has now are called."""
        ...

    def ask_version(self) -> Order:
        """Ask for that name; the answer has it as ``weight_version``."""
        ...

    def pause(self, *, interrupt: bool) -> Order:
        """Stop generating; ``interrupt`` ends what is in flight where it is."""
        ...

    def resume(self) -> Order:
        """Generate again."""
        ...

    def top_logprobs(self, server: Server, token_id: int, temperature: float) -> Order:
        """Ask for the greatest log-probabilities after a prompt of one token."""
        ...

    def read_top(self, response: Any) -> Sequence[Any]:
        """Return them, in any order; raise a LookupError or TypeError where there are none."""
        ...


def read_json(body: bytes) -> Any:
    """Return what a short body says.

    Raises:
        ValueError: If it is no JSON.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None

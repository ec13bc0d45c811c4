"""Conventions for tokens that were not generated, as coefficients of the recurrence.

A scan walks a sequence from its end. Behind token t the state ``xₜ₊₁`` is the discounted credit of
all later tokens. A generated token has advantage ``rₜ - vₜ + xₜ₊₁`` and leaves the state
``xₜ = γ·vₜ + γλ·(rₜ - vₜ + xₜ₊₁)``. Each convention replaces this step on tokens that were not
generated, so all of them are one first-order recurrence ``xₜ = decay·xₜ₊₁ + increment``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Observation: TypeAlias = Literal["carry", "carry_drop", "compact", "ignore", "multiply", "reset"]
"""Conventions for tokens that were not generated:

- ``"carry"``: the next value and the running advantage pass through unchanged. Their reward
  belongs to the last generated token before them; it is lost if there is none.
- ``"carry_drop"``: the same, but their reward is lost (verl, NeMo-RL, AReaL).
- ``"compact"``: they are removed before the scan. Only a reward on the sequence's last token
  counts, for the last generated token (miles).
- ``"ignore"``: they are treated like generated tokens (slime, SkyRL, ROLL, TRL's PPO).
- ``"multiply"``: their reward and value are 0, but they discount (OpenRLHF).
- ``"reset"``: they end the credit of later tokens; the token before them takes on their reward
  less their value (open-instruct).

Outputs are 0 on these tokens in every convention.
"""

OBSERVATIONS: tuple[str, ...] = get_args(Observation)

PASSING = ("carry", "carry_drop", "compact")
"""Conventions in which the state passes unchanged through tokens that were not generated."""

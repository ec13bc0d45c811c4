"""Conventions for tokens that were not generated, as coefficients of the recurrence.

A scan walks a sequence from its end. Behind token t the state ``xₜ₊₁`` is the discounted credit of
all later tokens. A generated token has advantage ``rₜ - vₜ + xₜ₊₁`` and leaves the state
``xₜ = γ·vₜ + γλ·(rₜ - vₜ + xₜ₊₁)``. Each convention replaces this step on tokens that were not
generated, so all of them are one first-order recurrence ``xₜ = decay·xₜ₊₁ + increment``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Observation: TypeAlias = Literal["carry", "carry_drop", "compact", "ignore", "multiply", "reset"]
"""Conventions for tokens that were not generated; `trajpack.kernels.gae` explains each. Outputs are
0 on these tokens in every convention."""

OBSERVATIONS: tuple[str, ...] = get_args(Observation)

PASSING = ("carry", "carry_drop", "compact")
"""Conventions in which the state passes unchanged through tokens that were not generated."""

"""What a token that was not generated means to a scan over tokens: the choices, by name.

A scan walks a sequence from its end. Past token t it holds what the token before t is given for
all that follows, ``xₜ``; a generated token has advantage ``rₜ - vₜ + xₜ₊₁`` and leaves
``xₜ = γ·vₜ + γλ·(rₜ - vₜ + xₜ₊₁)``. Every choice is another step for the tokens between the
generated ones, so that all of them are one first-order recurrence ``xₜ = gain·xₜ₊₁ + gift``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

Observation: TypeAlias = Literal["carry", "carry_drop", "compact", "ignore", "multiply", "reset"]
"""What the tokens between generated ones do:

- ``"carry"``: nothing; the next value and the running advantage pass through unchanged. A reward
  on one belongs to the last generated token before it (to nobody, where there is none).
- ``"carry_drop"``: the same, but a reward on one is lost (verl, NeMo-RL, AReaL).
- ``"compact"``: they are taken out first. Of their rewards only the one on the sequence's last
  token counts, for the last generated token (miles).
- ``"ignore"``: they are tokens like all others (slime, SkyRL, ROLL, TRL's PPO).
- ``"multiply"``: their rewards and values are 0, but they are steps that discount (OpenRLHF).
- ``"reset"``: each ends what comes behind it: its own advantage is its reward less its value,
  which the token before it takes on (open-instruct).

What is put out for them is 0 in every choice.
"""

OBSERVATIONS: tuple[str, ...] = get_args(Observation)

PASSING = ("carry", "carry_drop", "compact")
"""Those in which the state passes through tokens that were not generated."""


class Steps(NamedTuple):
    """The recurrence of each token, and what its advantage is made of. All float64 ``[tokens]``."""

    gain: torch.Tensor
    gift: torch.Tensor
    reward: torch.Tensor
    value: torch.Tensor


def check_observation(op: str, observation: str) -> None:
    """Raise unless ``observation`` is one of `OBSERVATIONS`."""
    if observation not in OBSERVATIONS:
        known = ", ".join(repr(name) for name in OBSERVATIONS)
        raise ValueError(f"{op}: observation must be one of {known}, got {observation!r}")


def steps_of_tokens(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
    is_last: torch.Tensor,
    rates: tuple[torch.Tensor, torch.Tensor],
    observation: str,
) -> Steps:
    """Return the steps of GAE; ``rates`` are each token's γ and λ, ``is_last`` ends sequences."""
    gamma, lam = rates
    reward = rewards.double()
    value = torch.zeros_like(reward) if values is None else values.double()
    generated = torch.ones_like(is_last) if loss_mask is None else loss_mask
    if observation == "multiply":
        reward = torch.where(generated, reward, 0.0)
        value = torch.where(generated, value, 0.0)
    gain = gamma * lam
    gift = gamma * (1 - lam) * value + gain * reward
    if observation == "reset":
        gain = torch.where(generated, gain, 0.0)
    elif observation in PASSING:
        gain = torch.where(generated, gain, 1.0)
        gift = torch.where(generated, gift, passed_on(reward, is_last, observation))
    return Steps(gain, gift, reward, value)


def passed_on(reward: torch.Tensor, is_last: torch.Tensor, observation: str) -> torch.Tensor:
    """Return what tokens that were not generated hand to the last generated one before them."""
    if observation == "carry":
        return reward
    if observation == "compact":
        return torch.where(is_last, reward, 0.0)
    return torch.zeros_like(reward)

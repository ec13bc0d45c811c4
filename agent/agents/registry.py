"""Agents by name, for configuration files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.protocols import Agent

_AGENTS: dict[str, Callable[..., Agent]] = {"math-multi-turn": MathMultiTurnAgent}


def register_agent(name: str, cls: Callable[..., Agent]) -> None:
    """Register a class, or any callable that returns an agent, as ``name`` for `make_agent`.

    Raises:
        ValueError: If ``name`` is empty or already taken.
        TypeError: If ``name`` is not a string or ``cls`` cannot be called.
    """
    if not isinstance(name, str):
        raise TypeError(f"register_agent: a name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("register_agent: an agent needs a name")
    if not callable(cls):
        raise TypeError(f"register_agent: {name!r} needs a class, got {type(cls).__name__}")
    if name in _AGENTS:
        raise ValueError(f"register_agent: an agent named {name!r} is already registered")
    _AGENTS[name] = cls


def make_agent(name: str, **kwargs: Any) -> Agent:
    """Return a new agent of the kind registered as ``name``.

    Args:
        name: ``"math-multi-turn"``, or a name given to `register_agent`.
        **kwargs: Arguments of the agent's class.

    Raises:
        ValueError: If no agent has that name; the message lists those that exist.
    """
    if name not in _AGENTS:
        known = ", ".join(repr(known) for known in sorted(_AGENTS))
        raise ValueError(f"make_agent: no agent is named {name!r}; known agents: {known}")
    return _AGENTS[name](**kwargs)

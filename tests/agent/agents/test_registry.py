from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from trajpack.agent.agents import registry
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.agents.registry import make_agent, register_agent


class Parrot:
    def __init__(self, colour: str = "green") -> None:
        self.colour = colour

    async def collect_trajectory(self, *_: Any) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_AGENTS", dict(registry._AGENTS))


def test_the_math_agent_is_known_and_takes_its_options_by_name() -> None:
    agent = make_agent(
        "math-multi-turn", gconfig=None, tokenizer=None, answer_save_path=None, num_turns=1
    )
    assert isinstance(agent, MathMultiTurnAgent)
    assert agent.num_turns == 1


def test_a_registered_agent_is_made_with_the_given_options() -> None:
    register_agent("parrot", Parrot)
    agent = make_agent("parrot", colour="red")
    assert isinstance(agent, Parrot)
    assert agent.colour == "red"


def test_a_second_registration_of_a_name_raises() -> None:
    register_agent("parrot", Parrot)
    with pytest.raises(ValueError, match="'parrot' is already registered"):
        register_agent("parrot", Parrot)
    with pytest.raises(ValueError, match="'math-multi-turn' is already registered"):
        register_agent("math-multi-turn", Parrot)


def test_an_unknown_name_lists_the_known_ones_in_order() -> None:
    register_agent("zebra", Parrot)
    register_agent("ant", Parrot)
    with pytest.raises(ValueError, match=r"'cow'.*'ant', 'math-multi-turn', 'zebra'$"):
        make_agent("cow")


def test_what_has_no_name_or_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        register_agent("", Parrot)
    with pytest.raises(TypeError, match="'parrot' needs a class, got Parrot"):
        register_agent("parrot", Parrot())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a name must be a str, got int"):
        register_agent(7, Parrot)  # type: ignore[arg-type]


@pytest.mark.slow
def test_importing_the_agents_loads_no_optional_package() -> None:
    code = (
        "import sys, trajpack.agent.agents.registry, trajpack.agent.environments.math_verify, "
        "trajpack.agent.environments.questions\n"
        "names = {'transformers', 'math_verify', 'reasoning_gym', 'sympy'}\n"
        "assert not names & sys.modules.keys(), names & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""``trajpack rollout`` with servers, and over Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    drawing,
    say_sglang,
    say_vllm,
    sglang_body,
    vllm_body,
)
from tests.commands.command import call, refusal
from trajpack import load
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.servers.options import ServerOptions, TimeLimits

pytestmark = pytest.mark.usefixtures("warm_judge")
torch.set_num_threads(1)
SMALL = ["--num-prompts", 3, "--turns", 2, "--max-new-tokens", 8]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tiny_model()[1].save_pretrained(folder)
    return folder


@contextmanager
def served(say: Callable[[Asked], Awaitable[Answer]], count: int) -> Iterator[list[Loopback]]:
    """Serve from another thread, as another program would."""
    servers = [Loopback(say) for _ in range(count)]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)

    try:
        for server in servers:
            there(server.__aenter__())
        yield servers
    finally:
        for server in servers:
            there(server.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("engine", "say", "body"),
    [("vllm", say_vllm, vllm_body), ("sglang", say_sglang, sglang_body)],
)
def test_a_rollout_by_servers(
    engine: str, say: Any, body: Any, tokenizer_folder: Path, tmp_path: Path
) -> None:
    _, tokenizer = build_tiny_model()
    answer = [*tokenizer.encode("5", add_special_tokens=False), tokenizer.eos_token_id]
    out = tmp_path / "batch.safetensors"

    async def draw(asked: Asked) -> Answer:
        return Answer(body=body(answer))

    with served(drawing(draw, say), 2) as servers:
        named = [part for server in servers for part in ("--server", server.url)]
        done = call(
            "rollout", *SMALL, "--out", out, "--engine", engine, *named, "--model", tokenizer_folder
        )
    assert done.status == 0, done.stderr
    trajectories = load(out).unpack()
    assert len(trajectories) == 6
    completions = [list(turn.completion_ids) for one in trajectories for turn in one.turns]
    assert completions == [answer] * len(completions)
    assert all(server.draws for server in servers)
    assert sum(len(server.draws) for server in servers) == len(completions)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "no server is healthy after 0.2 s: 127.0.0.1:9: "),
        ("localhost:8000", "expected http:// or https://, a host"),
        ("http://user:secret@127.0.0.1:1", "127.0.0.1"),
    ],
)
def test_servers_are_refused_in_one_line(
    url: str,
    words: str,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorter = partial(ServerOptions, time_limits=TimeLimits(start_s=0.2))
    monkeypatch.setattr("trajpack.agent.servers.options.ServerOptions", shorter)
    options = ["--engine", "sglang", "--model", tokenizer_folder, "--server", url]
    said = refusal("rollout", *SMALL, "--out", tmp_path / "batch.safetensors", *options)
    assert words in said
    assert "secret" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.usefixtures("cluster")
def test_a_rollout_over_ray_goes_on_from_its_log(tmp_path: Path) -> None:
    out, folder = tmp_path / "batch.safetensors", tmp_path / "log"
    options = [*SMALL, "--out", out, "--log", folder, "--ray", 1]
    done = call("rollout", *options)
    assert done.status == 0, done.stderr
    first = load(out)
    assert len(first.ids) == 6
    done = call("rollout", *options)
    assert "has 6 of 6 episodes" in done.stderr
    again = load(out)
    assert again.ids == first.ids
    assert torch.equal(again.input_ids, first.input_ids)

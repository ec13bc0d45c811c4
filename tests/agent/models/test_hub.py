"""Models by name, from a hub that has one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from tests.commands.command import call, refusal
from trajpack import load
from trajpack.agent.models.causal_model import load_model, model_folder
from trajpack.agent.models.tiny_model import build_tiny_model

SMALL = ["--num-prompts", 1, "--turns", 1, "--max-new-tokens", 8, "--concurrency", 1]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a hub with ``owner/tiny`` in place of the client; the names of files asked for."""
    asked: list[str] = []
    served = tmp_path / "served"
    model, tokenizer = build_tiny_model()
    model.save_pretrained(served)
    tokenizer.save_pretrained(served)
    (served / "modeling_tiny.py").write_text("raise SystemExit('code of a model was run')")
    (served / "pytorch_model.bin").write_text("a pickle")

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        if repo_id != "owner/tiny":
            raise RuntimeError(f"404: {repo_id}\nfurther lines")
        kept = tmp_path / "cache"
        kept.mkdir(exist_ok=True)
        names = [path.name for path in served.iterdir()]
        asked[:] = filter_repo_objects(names, allow_patterns=allow_patterns)
        for name in asked:
            shutil.copy(served / name, kept)
        return str(kept)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_model_is_fetched_without_its_code_and_a_tokenizer_without_weights(
    asked: list[str],
) -> None:
    said: list[str] = []
    folder = model_folder("owner/tiny", said.append, weights=False)
    assert said == ["fetching owner/tiny from the Hugging Face hub, if it is not kept already"]
    assert "tokenizer.json" in asked
    assert "model.safetensors" not in asked
    assert model_folder("owner/tiny", said.append) == folder
    assert "model.safetensors" in asked
    assert not {"modeling_tiny.py", "pytorch_model.bin"} & {*asked}
    model, tokenizer = load_model(folder)
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.usefixtures("warm_judge")
def test_a_rollout_takes_a_model_by_name(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "batch.safetensors"
    done = call("rollout", *SMALL, "--model", "owner/tiny", "--out", out)
    assert done.status == 0, done.stderr
    assert "trajpack: fetching owner/tiny from the Hugging Face hub" in done.stderr
    assert load(out).num_turns == 2
    shown = call("inspect", out, "--tokenizer", "owner/tiny")
    assert re.search(r"\d\+\d", shown.stdout), "the question is decoded"


def test_a_model_that_the_hub_does_not_have_is_refused_in_one_line(
    asked: list[str], tmp_path: Path
) -> None:
    line = refusal("rollout", "--model", "owner/gone", "--out", tmp_path / "batch.safetensors")
    assert "cannot fetch owner/gone: it is no folder on this machine, and the Hugging" in line
    assert line.endswith("--model also takes the folder of a model")
    assert not (tmp_path / "batch.answers").exists()


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "./owner/tiny", "/tiny", "owner/"])
def test_what_is_no_name_is_a_folder_and_comes_before_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_folder(name, pytest.fail) == Path(name)
    monkeypatch.chdir(tmp_path)
    Path("owner/tiny").mkdir(parents=True)
    assert model_folder("owner/tiny", pytest.fail) == Path("owner/tiny")

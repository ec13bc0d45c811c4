"""Models and tokenizers in folders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import load_model, load_tokenizer, save_tokenizer
from trajpack.agent.models.tiny_model import build_tiny_model

torch.set_num_threads(1)
MODEL, TOKENIZER = build_tiny_model(seed=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    MODEL.save_pretrained(tmp_path)
    save_tokenizer(TOKENIZER, tmp_path)
    return tmp_path


def test_a_saved_model_loads_unchanged(folder: Path) -> None:
    loaded, tokenizer = load_model(folder)
    assert not loaded.training
    for name, tensor in MODEL.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert tokenizer.encode("Let's try again.") == TOKENIZER.encode("Let's try again.")
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer.eos_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "", r"cannot load a (model|tokenizer) from"),
        ("config.json", "{}", r"cannot load a (model|tokenizer) from"),
        ("config.json", '{"model_type": "no-such"}', r"cannot load a (model|tokenizer) from"),
        ("tokenizer.json", '{"model": 1}', "cannot load a tokenizer from"),
        ("model.safetensors", None, r"it lacks 1 weight, the first is model\.norm\.weight"),
    ],
)
def test_a_broken_folder_is_refused(
    folder: Path, file: str, content: str | None, words: str
) -> None:
    if content is None:
        weights = load_file(folder / file)
        del weights["model.norm.weight"]
        save_file(weights, folder / file, metadata={"format": "pt"})
    else:
        (folder / file).write_text(content)
    with pytest.raises(SetupError, match=words):
        load_model(folder)


@pytest.mark.parametrize("name", ["some/model", "none", "a\0b"])
def test_what_is_no_folder_is_refused_and_not_looked_up(name: str) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(SetupError, match=f"cannot load a .* from {name}: it is not a folder"):
            load(name)


def test_only_errors_of_the_system_become_os_errors(tmp_path: Path) -> None:
    def raising(error: Exception) -> Any:
        def save_pretrained(folder: Any) -> None:
            raise error

        return SimpleNamespace(save_pretrained=save_pretrained)

    with pytest.raises(OSError, match="No space left on device"):
        save_tokenizer(raising(Exception("No space left on device (os error 28)")), tmp_path)
    for error in (TypeError("a bug"), PermissionError("not yours")):
        with pytest.raises(type(error), match=str(error)):
            save_tokenizer(raising(error), tmp_path)

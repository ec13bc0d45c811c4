"""Models and tokenizers in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import load_model, load_tokenizer, save_tokenizer
from trajpack.agent.models.tiny_model import build_tiny_model

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = build_tiny_model()
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    return tmp_path


def test_a_saved_model_loads_unchanged(folder: Path) -> None:
    model, tokenizer = build_tiny_model()
    loaded, loaded_tokenizer = load_model(folder)
    assert not loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded_tokenizer.encode("Let's try again.") == tokenizer.encode("Let's try again.")


def test_a_model_that_lacks_weights_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"it lacks 1 weight, the first is model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"model_type": "no-such"}'])
def test_a_broken_configuration_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(SetupError, match=r"cannot load a (model|tokenizer) from"):
        load_model(folder)


def test_a_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(SetupError, match="cannot load a tokenizer from"):
        load_tokenizer(folder)


def test_a_name_of_a_model_on_a_hub_is_not_looked_up() -> None:
    with pytest.raises(SetupError, match="cannot load a model from some/model: it is not a folder"):
        load_model("some/model")


class FullDisk:
    def save_pretrained(self, folder: Any) -> None:
        raise Exception("No space left on device (os error 28)")


class Broken:
    def save_pretrained(self, folder: Any) -> None:
        raise TypeError("a bug")


def test_only_errors_of_the_system_become_os_errors(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        save_tokenizer(FullDisk(), tmp_path)
    with pytest.raises(TypeError, match="a bug"):
        save_tokenizer(Broken(), tmp_path)

"""Models by name, from a server on loopback that speaks the protocol of the hub."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from tests.commands.command import call, refusal
from trajpack import load
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import load_model
from trajpack.agent.models.hub import model_folder
from trajpack.agent.models.tiny_model import build_tiny_model

REVISION = "a" * 40
SMALL = ["--num-prompts", 1, "--turns", 1, "--max-new-tokens", 8, "--concurrency", 1]


class Hub(BaseHTTPRequestHandler):
    """The repository ``owner/tiny``: a listing of its files, and the files."""

    def __init__(self, folder: Path, asked: list[str], *arguments: object) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.asked.append(self.path.rpartition("/")[2])
        path = self.path.partition("?")[0]
        names = sorted(path.name for path in self.folder.iterdir())
        if path.startswith("/api/models/owner/tiny/tree/"):
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            tree = [
                {"type": "file", "path": name, "size": size, "oid": "b" * 40}
                for name, size in sizes.items()
            ]
            self.answer(json.dumps(tree).encode(), "tree")
        elif path.startswith("/api/models/owner/tiny"):
            listing = {
                "id": "owner/tiny",
                "sha": REVISION,
                "siblings": [{"rfilename": name} for name in names],
            }
            self.answer(json.dumps(listing).encode(), "info")
        elif path.startswith("/owner/tiny/resolve/") and path.rpartition("/")[2] in names:
            body = (self.folder / path.rpartition("/")[2]).read_bytes()
            self.answer(body, hashlib.sha256(body).hexdigest())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, body: bytes, etag: str) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and files that are not to be fetched."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = build_tiny_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a model was run')")
    (folder / "pytorch_model.bin").write_text("a pickle")
    return folder


@pytest.fixture
def asked(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the model; the names of the files that were asked for."""
    asked = list[str]()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, served, asked))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    constants = huggingface_hub.constants
    address = f"http://127.0.0.1:{server.server_address[1]}"
    resolve = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{resolve}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_is_fetched_once_and_without_its_code(asked: list[str]) -> None:
    said: list[str] = []
    folder = model_folder("owner/tiny", said.append)
    assert said == ["fetching owner/tiny from the Hugging Face hub, if it is not kept already"]
    model, tokenizer = load_model(folder)
    assert model.config.vocab_size >= len(tokenizer)
    assert not {"modeling_tiny.py", "pytorch_model.bin"} & {path.name for path in folder.iterdir()}
    asked.clear()
    assert model_folder("owner/tiny", said.append) == folder
    assert "model.safetensors" not in asked


def test_a_tokenizer_needs_no_weights(asked: list[str]) -> None:
    folder = model_folder("owner/tiny", lambda line: None, weights=False)
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "model.safetensors").exists()


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


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SetupError, match=r"the Hugging Face hub says: .*; --model also takes"):
        model_folder("owner/tiny", lambda line: None)


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "./owner/tiny", "/owner/tiny", "owner/", ".."])
def test_what_is_no_name_is_a_folder(name: str) -> None:
    assert model_folder(name, pytest.fail) == Path(name)


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("owner/tiny").mkdir(parents=True)
    assert model_folder("owner/tiny", pytest.fail) == Path("owner/tiny")

"""Requests that are refused: status 2, one line that names the reason, and nothing written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.command import refusal
from trajpack import Trajectory, TrajectoryLog, Turn, pack, save

LONG = "x" * 300
REFUSED = [
    # options, as typer refuses them
    ("rollout --turns two", "'--turns'"),
    ("rollout --turns 0", "'--turns'"),
    ("rollout --num-prompts 10000001", "'--num-prompts'"),
    (f"rollout --max-new-tokens {'1' * 30}", "'--max-new-tokens'"),
    ("rollout --layout packed", "'--layout'"),
    ("rollout --engine llama", "'--engine'"),
    ("rollout --attempts 0", "'--attempts'"),
    ("rollout --ray -1", "'--ray'"),
    ("rollout --turn-discount big", "'--turn-discount'"),
    ("rollout --metrics-port 65536", "'--metrics-port'"),
    ("rollout --seed 4294967296", "'--seed'"),
    ("rollout --concurency 3", "No such option: --concurency"),
    ("rollout --out", "'--out' requires an argument"),
    ("rollout --dataset none.jsonl", "'--dataset'"),
    ("rollout --dataset .", "'--dataset'"),
    ("inspect", "Missing argument 'FILE'"),
    ("inspect none.safetensors", "does not exist"),
    ("report none.safetensors", "does not exist"),
    ("plan none.safetensors --capacity 8", "does not exist"),
    ("plan batch.safetensors", "Missing option '--capacity'"),
    ("plan batch.safetensors --capacity 8 --algorithm x", "'--algorithm'"),
    ("replay", "Missing argument 'FOLDER'; see trajpack replay --help"),
    ("teach", "No such command 'teach'"),
    ("rolout", "No such command 'rolout'. Did you mean 'rollout'"),
    # values
    ("rollout --turn-discount nan", "--turn-discount must be finite, got nan"),
    ("rollout --engine vllm", "--server is missing: with vllm"),
    ("rollout --engine vllm --server http://a:1", "--model is missing: with vllm"),
    ("rollout --server http://a:1", "--engine must be sglang or vllm where a server is given"),
    ("rollout --model none", "cannot load a model from none: it is not a folder"),
    ("rollout --model .", "cannot load a model from .: it has no config.json"),
    ("rollout --device no-such", "device 'no-such' cannot be used: "),
    ("rollout --device meta", "device 'meta' cannot be used: "),
    ("rollout --device cuda:99", "device 'cuda:99' cannot be used: "),
    ("rollout --dataset sums.jsonl", "sums.jsonl, line 3: not JSON"),
    ("inspect batch.safetensors --id x", "no trajectory is called 'x'"),
    ("report batch.safetensors --capacity 3", "capacity must be 4 or more"),
    ("plan batch.safetensors --capacity 3", "sequence 0"),
    ("replay log --device meta", ""),
    # files
    ("inspect file", "is not a readable packed batch"),
    ("inspect batch.safetensors --tokenizer .", "a tokenizer from .: it has no tokenizer_config"),
    ("replay my.tokenizer", "holds no trajectory log"),
    ("report my.tokenizer", "holds no trajectory log"),
    ("report .", "holds no trajectory log"),
    # places
    ("rollout --out batch.txt", "--out must be a .safetensors file, got batch.txt"),
    ("rollout --out ''", "--out must be a .safetensors file, got ."),
    ("rollout --out .", "--out must be a .safetensors file, got ."),
    ("rollout --out file/batch.safetensors", "file"),
    ("rollout --answers file", "file"),
    ("rollout --log file", "file: File exists"),
    ("rollout --log log", "is no rollout's log: it has no rollout.json"),
    ("rollout --out a.safetensors --answers a.tokenizer/b", "--answers must not be a.tokenizer or"),
    ("rollout --out my.safetensors", "is not the tokenizer of a batch and will not be replaced"),
    ("rollout --out batch.safetensors", "batch.safetensors exists; --force replaces it"),
    ("replay log --out ''", "--out must be a .safetensors file, got ."),
    ("replay log --out batch.safetensors", "batch.safetensors exists; --force replaces it"),
    ("report /", "--out must be an .html file"),
    ("report batch.safetensors --out page.txt", "--out must be an .html file, got page.txt"),
    ("report batch.safetensors --out ''", "--out must be an .html file, got ."),
    ("report run", "run.json exists; --force replaces it"),
    # names that the system refuses
    (f"rollout --model {LONG}", "File name too long"),
    (f"rollout --log {LONG}", "File name too long"),
    (f"rollout --answers {LONG}", "File name too long"),
    (f"rollout --out {LONG}.safetensors", "File name too long"),
    (f"inspect batch.safetensors --tokenizer {LONG}", "File name too long"),
    (f"report batch.safetensors --out {LONG}.html", "File name too long"),
    (f"report {LONG}", "does not exist"),
    ("rollout --answers circle", ""),
    ("rollout --out circle/a.safetensors", ""),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("refused"), Path.cwd()
    os.chdir(folder)
    prepare(folder)
    yield folder
    os.chdir(before)


def prepare(folder: Path) -> None:
    trajectory = Trajectory("a", [Turn([1, 2, 3], [4], [-0.5])])
    save(pack([trajectory]), folder / "batch.safetensors")
    for name in ("log", "run"):
        with TrajectoryLog.open(folder / name) as log:
            log.append("a", [trajectory])
    (folder / "file").touch()
    (folder / "run.json").write_text("somebody's settings")
    (folder / "sums.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n\n{"question"')
    (folder / "my.tokenizer").mkdir()
    (folder / "my.tokenizer" / "thesis.tex").write_text("years of work")
    (folder / "circle").symlink_to("circle")


def content(folder: Path) -> dict[str, int]:
    """Return what is there, but for files that a log's reader may make."""
    places = (place for place in folder.rglob("*") if place.parent.name not in ("log", "run"))
    return {str(place): place.lstat().st_mtime_ns for place in places if not place.is_dir()}


@pytest.mark.usefixtures("warm_judge")
@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_a_request_is_refused_in_one_line_and_writes_nothing(
    arguments: str, words: str, folder: Path
) -> None:
    before = content(folder)
    assert words in refusal(*shlex.split(arguments))
    assert content(folder) == before


def test_what_can_be_seen_at_once_is_said_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, _ in REFUSED:
        if "'--" in arguments or "exists; --force" in arguments:
            refusal(*shlex.split(arguments))
            assert "loading" not in capsys.readouterr().err


FORBIDDEN = [
    "rollout --out private/x/b.safetensors",
    "rollout --log private/x",
    "rollout --dataset private/x.jsonl",
    "rollout --answers private/x",
    "rollout --model private/x",
    "inspect batch.safetensors --tokenizer private/x",
    "inspect private/b.safetensors",
    "plan private/b.safetensors --capacity 8",
    "report private/b.safetensors",
    "report batch.safetensors --out private/x/p.html",
    "replay private/log",
    "replay log --out private/x/b.safetensors",
]
ALL = """
import io
import json
import sys
import os
from contextlib import redirect_stderr
from trajpack.cli import run
lines = json.load(sys.stdin)
for line in lines:  # imports what it needs, which the other user may not be able to read
    run(line.replace("private", "file").split())
if os.geteuid() == 0:
    os.seteuid(65534)
for line in lines:
    said = io.StringIO()
    with redirect_stderr(said):
        status = run(line.split())
    print(json.dumps([status, said.getvalue()]))
"""


def test_a_folder_that_the_user_may_not_enter_is_one_line() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        prepare(folder)
        (folder / "private").mkdir(mode=0o700)
        if os.geteuid() != 0:
            (folder / "private").chmod(0)
        done = subprocess.run(
            [sys.executable, "-P", "-c", ALL],
            input=json.dumps(FORBIDDEN), capture_output=True, text=True, check=True, cwd=folder,
        )  # fmt: skip
        (folder / "private").chmod(0o700)
    for line, shown in zip(FORBIDDEN, done.stdout.splitlines(), strict=True):
        status, said = json.loads(shown)
        assert status == 2, (line, said)
        assert said.splitlines()[-1].startswith("trajpack: error: "), (line, said)
        assert "private" in said.splitlines()[-1], (line, said)

"""The command: options, progress and exit statuses.

The status is 0 for success, 2 for a wrong request or a file that cannot be read or written,
with one line on standard error, and 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from trajpack.agent.causal_model import first_line, load_tokenizer
from trajpack.agent.errors import SetupError
from trajpack.agent.rollout import Rollout, RolloutSettings, prepare_rollout
from trajpack.agent.rollout_files import check_writable, save_rollout, tokenizer_folder
from trajpack.agent.rollout_report import ProgressBoard, report
from trajpack.agent.runner import EpisodeResult
from trajpack.packing import inspection
from trajpack.packing.batch import PackedBatch
from trajpack.packing.layout import Layout

with contextlib.suppress(ModuleNotFoundError):  # the user is told when the command runs
    import typer

if TYPE_CHECKING:
    from rich.console import Console

REFUSED = 2
INTERRUPTED = 130

Work: TypeAlias = Callable[[], int]
"""What a command does once its options are read; returns the exit status."""


def main() -> None:
    """Run the command with the arguments of this program and exit with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any text can be shown
    try:
        work = _read(arguments)
        return work if isinstance(work, int) else work()
    except SetupError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trajpack"):
            raise
        return _refuse(f"{error}; install trajpack[agent]")
    except KeyboardInterrupt:
        _say("interrupted: no batch was written")
        return INTERRUPTED


def _read(arguments: Sequence[str]) -> Work | int:
    """Return what is to be done, or the exit status where only help was asked for."""
    import rich  # noqa: F401 - missing as often as typer is
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_top)
    app.command("rollout")(rollout)
    app.command("inspect")(inspect_batch)
    usage_error: Any = typer.BadParameter.__bases__[0]  # click's own in older releases of typer
    work: Work | int | None
    try:
        with _writing("standard output"):  # of help
            work = app(list(arguments), prog_name="trajpack", standalone_mode=False)
    except usage_error as error:
        command = "trajpack" if error.ctx is None else error.ctx.command_path
        raise SetupError(f"{error.format_message().rstrip('.')}; see {command} --help") from error
    return work or 0


def _top(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Turns of LLM agents, packed into training batches.

    Try: trajpack rollout --out demo/batch.safetensors

    and: trajpack inspect demo/batch.safetensors
    """
    if show_version:
        typer.echo(f"trajpack {version('trajpack')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(REFUSED)


def rollout(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    dataset: Annotated[Path | None, typer.Option(help=_DATASET, show_default=False)] = None,
    model: Annotated[Path | None, typer.Option(help=_MODEL, show_default=False)] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Turns of an episode.")] = 3,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes for each question.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help=_CONCURRENCY)] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 32,
    layout: Annotated[Layout, typer.Option(help=_LAYOUT)] = "merged",
    turn_discount: Annotated[float, typer.Option(help="Discount from turn to turn.")] = 1.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help=_SEED)] = 0,
    out: Annotated[Path, typer.Option(help=_OUT)] = Path("trajpack-rollout/batch.safetensors"),
    answers: Annotated[Path | None, typer.Option(help=_ANSWERS, show_default=False)] = None,
) -> Work:
    """Let a model answer questions over several turns, and pack the turns into a batch.

    Ctrl-C stops early and keeps what has finished; a second Ctrl-C gives up at once.

    Example: trajpack rollout --dataset gsm8k.jsonl --model ./Qwen3-0.6B
    """
    settings = RolloutSettings(
        dataset=dataset,
        model=model,
        num_prompts=num_prompts,
        num_turns=turns,
        group_size=group_size,
        concurrency=concurrency,
        max_new_tokens=max_new_tokens,
        turn_discount=turn_discount,
        device=device,
        seed=seed,
        answers=out.parent / "answers" if answers is None else answers,
    )
    return partial(_roll_out, settings, layout, out)


_DATASET = "JSONL file of questions and answers. [default: sums made by reasoning-gym]"
_MODEL = "Folder of a transformers causal LM. [default: a tiny Qwen3, random weights]"
_CONCURRENCY = "Episodes at the same time; with 1 the seed decides every token."
_LAYOUT = "A sequence is a whole conversation (merged) or one turn (turns)."
_SEED = "Of tiny model, questions and sampling."
_OUT = "Where the batch goes; its tokenizer goes beside it."
_ANSWERS = "Folder of the answers in plain text. [default: answers/ beside the batch]"


def inspect_batch(
    file: Annotated[Path, typer.Argument(help="A batch that rollout or PackedBatch.save wrote.")],
    tokenizer: Annotated[Path | None, typer.Option(help=_TOKENIZER, show_default=False)] = None,
    sequences: Annotated[int, typer.Option(min=0, help="Sequences to show.")] = 3,
    width: Annotated[int | None, typer.Option(min=40, help=_WIDTH, show_default=False)] = None,
) -> Work:
    """Show a packed batch: what is in it, and who said what in its first sequences.

    Example: trajpack inspect batch.safetensors --sequences 1
    """
    return partial(_inspect, file, tokenizer, sequences, width)


_TOKENIZER = "Folder of a tokenizer. [default: the one beside FILE, if rollout left one]"
_WIDTH = "Columns to use. [default: those of the terminal]"


def _roll_out(settings: RolloutSettings, layout: Layout, out: Path) -> int:
    if out.suffix != ".safetensors" or out.is_dir():
        raise SetupError(f"--out must be a .safetensors file, got {out}")
    _say("loading model and questions")
    prepared = _prepare(settings)
    for folder in filter(None, (out.parent, settings.answers)):
        with _writing(folder):
            check_writable(folder)
    results: list[EpisodeResult] = []
    with ProgressBoard(prepared.num_episodes, _console(stderr=True), _say) as board:
        interrupted = asyncio.run(_collect(prepared, results, board))
    outcome = prepared.outcome(results)
    if not outcome.trajectories and interrupted:
        raise KeyboardInterrupt
    if not outcome.trajectories:
        reason, _ = outcome.failures.most_common(1)[0]
        raise SetupError(f"all {len(results)} episodes failed, most of them so: {reason}")
    buffer = outcome.fill_buffer(settings.device)
    batch = buffer.pack(layout=layout)
    with _writing(out):
        save_rollout(batch, prepared.tokenizer, out)
    title = f"{len(results):,} of {prepared.num_episodes:,} episodes"
    rows = report(outcome, board.progress, batch, buffer.num_tokens)
    with _printing() as console:
        console.print(inspection.as_table(rows, title))
        if settings.model is None:
            _tell(console, "The tiny model has random weights: a right answer is luck.", "dim")
        _tell(console, f"batch      {out}")
        _tell(console, f"tokenizer  {tokenizer_folder(out)}")
        _tell(console, f"answers    {settings.answers}")
        _tell(console, f"Look at it with: trajpack inspect {out}", "dim")
    return INTERRUPTED if interrupted else 0


def _prepare(settings: RolloutSettings) -> Rollout:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepared = prepare_rollout(settings)
    if len(prepared.prompts) < settings.num_prompts:
        num_there = inspection.counted(len(prepared.prompts), "question")
        _say(f"{settings.dataset} has {num_there}, fewer than {settings.num_prompts:,}: all asked")
    return prepared


async def _collect(prepared: Rollout, results: list[EpisodeResult], board: ProgressBoard) -> bool:
    """Gather results until all are there, and return whether Ctrl-C came first.

    The first Ctrl-C cancels this coroutine; a second one raises where the loop stands.
    """
    try:
        async with prepared.episodes(board.update) as stream:
            try:
                async for result in stream:
                    results.append(result)
            except asyncio.CancelledError:
                board.say("stopping; Ctrl-C again to give up what has finished")
                raise
    except asyncio.CancelledError:
        return True
    return False


def _inspect(file: Path, tokenizer: Path | None, num_sequences: int, width: int | None) -> int:
    try:
        file.open("rb").close()  # its errors are the clearer ones
        batch = PackedBatch.load(file)
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except ValueError as error:
        raise SetupError(str(error)) from error
    beside = tokenizer_folder(file)
    folder = beside if tokenizer is None and beside.is_dir() else tokenizer
    decode = None if folder is None or not num_sequences else _decoder(folder, batch)
    num_shown = min(num_sequences, len(batch))
    with _printing(width) as console:
        console.print(inspection.as_table(inspection.describe(batch), file.name))
        if num_shown:
            console.print(inspection.legend(decoded=decode is not None))
        for sequence in range(num_shown):
            console.print(inspection.sequence_panel(batch, sequence, decode))
        if num_shown < len(batch):
            hidden = inspection.counted(len(batch) - num_shown, "more sequence")
            _tell(console, f"{hidden}; --sequences {len(batch)} shows all", "dim")
    return 0


def _decoder(folder: Path, batch: PackedBatch) -> inspection.Decode:
    tokenizer = load_tokenizer(folder)
    num_unknown = int((batch.input_ids >= len(tokenizer)).sum())
    if num_unknown:
        unknown = inspection.counted(num_unknown, "token")
        _say(f"{unknown} not in the vocabulary of {folder}: is it the batch's tokenizer?")
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


@contextlib.contextmanager
def _printing(width: int | None = None) -> Iterator[Console]:
    with _writing("standard output"):
        yield _console(width=width)
        sys.stdout.flush()


@contextlib.contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


def _console(*, stderr: bool = False, width: int | None = None) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def _tell(console: Console, text: str, style: str | None = None) -> None:
    """Print one line that is never wrapped, so that paths can be copied."""
    console.print(inspection.printable(text), style=style, markup=False, soft_wrap=True)


def _say(text: str) -> None:
    """Print one line about what is going on, apart from the result."""
    sys.stderr.write(f"trajpack: {inspection.printable(text)}\n")
    sys.stderr.flush()


def _refuse(message: str) -> int:
    _say(f"error: {' '.join(message.split())}")
    return REFUSED

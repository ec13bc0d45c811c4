"""The options of each sub-command, and the function that does its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

import trajpack
from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.settings import (
    MAX_COUNT,
    EngineName,
    LayoutName,
    RolloutSettings as _Rollout,
)
from trajpack.agent.training.settings import TrainSettings as _Train
from trajpack.commands.terminal import results

_COUNT: Any = {"min": 1, "max": MAX_COUNT}

Work: TypeAlias = Callable[[], int]
"""The work of a command whose options were read; returns the exit status."""


def read(arguments: Sequence[str]) -> Work | int:
    """Return the work that the arguments ask for, or the exit status of a help text."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_top)
    app.command("rollout")(rollout)
    app.command("replay")(replay)
    app.command("inspect")(inspect_batch)
    app.command("report")(report)
    app.command("train")(train)
    usage_error: Any = typer.BadParameter.__bases__[0]  # click's own in older releases of typer
    work: Work | int | None
    try:
        with results():  # of help
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

    and: trajpack train --out demo/train.html
    """
    if show_version:
        typer.echo(f"trajpack {trajpack.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def rollout(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    dataset: Annotated[Path | None, typer.Option(help=_DATASET, show_default=False)] = None,
    model: Annotated[Path | None, typer.Option(help=_MODEL, show_default=False)] = None,
    num_prompts: Annotated[
        int, typer.Option(**_COUNT, help="Questions to ask.")
    ] = _Rollout.num_prompts,
    num_turns: Annotated[int, typer.Option("--turns", **_COUNT, help=_TURNS)] = _Rollout.num_turns,
    group_size: Annotated[
        int, typer.Option(**_COUNT, help="Episodes for each question.")
    ] = _Rollout.group_size,
    concurrency: Annotated[int, typer.Option(**_COUNT, help=_CONCURRENCY)] = _Rollout.concurrency,
    max_new_tokens: Annotated[
        int, typer.Option(**_COUNT, help="Tokens of a completion.")
    ] = _Rollout.max_new_tokens,
    layout: Annotated[LayoutName, typer.Option(help=_LAYOUT)] = "merged",
    turn_discount: Annotated[
        float, typer.Option(help="Discount from turn to turn.")
    ] = _Rollout.turn_discount,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = _Rollout.device,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help=_SEED)] = _Rollout.seed,
    out: Annotated[Path, typer.Option(help=_OUT)] = Path("trajpack-rollout/batch.safetensors"),
    answers: Annotated[Path | None, typer.Option(help=_ANSWERS, show_default=False)] = None,
    engine: Annotated[EngineName, typer.Option(help=_ENGINE)] = _Rollout.engine,
    server: Annotated[list[str] | None, typer.Option(metavar="<url>", **_SERVER)] = None,
    log: Annotated[Path | None, typer.Option(help=_LOG, show_default=False)] = None,
    num_workers: Annotated[
        int, typer.Option("--ray", min=0, max=MAX_COUNT, help=_RAY)
    ] = _Rollout.num_workers,
    max_attempts: Annotated[
        int, typer.Option("--attempts", **_COUNT, help=_ATTEMPTS)
    ] = _Rollout.max_attempts,
    metrics_port: Annotated[int | None, typer.Option(help=_METRICS, show_default=False)] = None,
) -> Work:
    """Let a model answer questions over several turns, and pack the turns into a batch.

    Ctrl-C or SIGTERM stops early and keeps what has finished; a second one gives up at once.

    Example: trajpack rollout --dataset gsm8k.jsonl --model ./Qwen3-0.6B --log run
    """
    chosen: dict[str, Any] = dict(locals())  # an option is called as its setting is
    del chosen["layout"], chosen["out"], chosen["server"]
    from trajpack.agent.rollout.files import answers_folder
    from trajpack.commands.rollout import roll_out

    chosen["answers"] = answers_folder(out) if answers is None else answers
    chosen["servers"] = tuple(server or ())
    return partial(roll_out, _Rollout(**chosen), layout, out)


_DATASET = "JSONL file of questions and answers. [default: sums made by reasoning-gym]"
_MODEL = "Folder of a transformers causal LM. [default: a tiny Qwen3, random weights]"
_TURNS = "Turns of an episode."
_CONCURRENCY = "Episodes at the same time; with 1 the seed decides every token."
_LAYOUT = (
    "A sequence is a whole conversation (merged) or one turn (turns); tree also shares prefixes "
    "of conversations, in the file of merged."
)
_SEED = "Of tiny model, questions and sampling."
_OUT = "Where the batch goes; its tokenizer goes beside it."
_ANSWERS = "Folder of the answers in plain text. [default: beside the batch]"
_ENGINE = "The model in this process, or servers; then --model is the folder of the tokenizer."
_SERVER: Any = {"help": "Address of a server; more than once for several.", "show_default": False}
_LOG = "Folder that keeps each episode; the same command goes on from it after a crash."
_RAY = "Workers on Ray, each with an engine of its own; 0 stays in this process."
_ATTEMPTS = "Times an episode that fails is begun."
_METRICS = "Port on this machine for Prometheus; 0 takes any. [default: no metrics]"


def replay(
    folder: Annotated[Path, typer.Argument(help="A log that rollout --log or a program wrote.")],
    out: Annotated[Path | None, typer.Option(help=_REPLAYED, show_default=False)] = None,
    layout: Annotated[LayoutName, typer.Option(help=_LAYOUT)] = "merged",
    device: Annotated[str, typer.Option(help="Where the batch is packed.")] = "cpu",
) -> Work:
    """Read a log of trajectories back, pack it into a batch, and say what is in it.

    Example: trajpack replay run --out again.safetensors
    """
    from trajpack.commands.replay import replay_log

    return partial(replay_log, folder, out, layout, device)


_REPLAYED = "Where to write the batch. [default: nowhere]"


def inspect_batch(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    file: Annotated[Path, typer.Argument(help="A batch that rollout or PackedBatch.save wrote.")],
    tokenizer: Annotated[Path | None, typer.Option(help=_TOKENIZER, show_default=False)] = None,
    sequences: Annotated[int, typer.Option(min=0, max=MAX_COUNT, help="Sequences to show.")] = 3,
    name: Annotated[str | None, typer.Option("--id", help=_ID, show_default=False)] = None,
    group: Annotated[str | None, typer.Option(help=_GROUP, show_default=False)] = None,
    order: Annotated[Literal["batch", "best", "worst"], typer.Option(help=_ORDER)] = "batch",
    width: Annotated[
        int | None, typer.Option(min=20, max=10_000, help=_WIDTH, show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help=_FULL)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> Work:
    """Show a packed batch: what is in it, and who said what in some of its sequences.

    Example: trajpack inspect batch.safetensors --order worst --sequences 1
    """
    from trajpack.commands.inspect import Chosen, inspect_as_json, inspect_file

    if as_json:
        return partial(inspect_as_json, file)
    chosen = Chosen(name, group, order, sequences)
    return partial(inspect_file, file, tokenizer, chosen, width=width, full=full)


_ID = "Only the sequences of this trajectory."
_GROUP = "Only the sequences of this group."
_ORDER = "Order of the sequences: of the batch, or by summed rewards, best or worst first."
_JSON = "Print numbers as JSON, those of `trajpack report`, and nothing else."
_TOKENIZER = "Folder of a tokenizer. [default: the one beside FILE, if rollout left one]"
_FULL = "Leave nothing out of a sequence that is shown, and no prefix break."
_WIDTH = "Columns to use. [default: those of the terminal]"


def report(
    source: Annotated[Path, typer.Argument(help="A saved batch, or the folder of a log.")],
    out: Annotated[Path | None, typer.Option(help=_PAGE, show_default=False)] = None,
    tokenizer: Annotated[Path | None, typer.Option(help=_TOKENIZER, show_default=False)] = None,
    capacity: Annotated[
        int | None, typer.Option(**_COUNT, help=_CAPACITY, show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=10_000, help="Data-parallel ranks.")] = 8,
    align: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Multiple that each sequence is padded to.")
    ] = 1,
) -> Work:
    """Write a page with pictures of a batch or a log: micro-batches, lengths, rewards and texts.

    The page is one file that loads nothing; its numbers are written as JSON beside it.

    Example: trajpack report batch.safetensors --capacity 16384 --out page.html
    """
    from trajpack.commands.report import report_source
    from trajpack.packing.report.figures import ReportOptions

    return partial(report_source, source, out, tokenizer, ReportOptions(capacity, ranks, align))


_PAGE = "HTML file. [default: beside SOURCE, with .html]"
_CAPACITY = "Tokens of a micro-batch to show first. [default: twice the longest sequence]"


def train(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    steps: Annotated[int, typer.Option(help="Steps of policy gradients.")] = _Train.num_steps,
    num_prompts: Annotated[int, typer.Option(help="Questions for each step.")] = _Train.num_prompts,
    group_size: Annotated[
        int, typer.Option(help="Episodes for each question.")
    ] = _Train.group_size,
    turns: Annotated[int, typer.Option(help="Answers of an episode at most.")] = _Train.num_turns,
    warm_up_steps: Annotated[
        int, typer.Option(help="Supervised steps before.")
    ] = _Train.warm_up_steps,
    learning_rate: Annotated[
        float, typer.Option(help="Of policy gradients.")
    ] = _Train.learning_rate,
    layout: Annotated[LayoutName, typer.Option(help=_TRAINED)] = _Train.layout,
    seed: Annotated[int, typer.Option(help="Of weights, questions and sampling.")] = _Train.seed,
    out: Annotated[Path, typer.Option(help=_CURVES)] = Path("trajpack-train/train.html"),
    batch: Annotated[Path | None, typer.Option(help=_LAST_BATCH, show_default=False)] = None,
) -> Work:
    """Let a tiny model learn sums from verified answers, on a CPU, in a few minutes.

    Ctrl-C or SIGTERM stops early and writes the curves so far; a second one gives up at once.

    Example: trajpack train --out demo/train.html
    """
    from trajpack.commands.train import train

    settings = _Train(
        num_steps=steps,
        num_prompts=num_prompts,
        group_size=group_size,
        num_turns=turns,
        warm_up_steps=warm_up_steps,
        learning_rate=learning_rate,
        layout=layout,
        seed=seed,
    )
    return partial(train, settings, out, batch)


_TRAINED = "A sequence is a whole conversation (merged) or one turn (turns); tree trains on trees."
_LAST_BATCH = "Where the batch of the last step goes. [default: nowhere]"
_CURVES = "HTML page for the curves of success, speed, fill and staleness."

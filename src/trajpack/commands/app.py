"""The options of each sub-command, and the function that does its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

import trajpack
from trajpack.agent.errors import SettingError, SetupError
from trajpack.agent.rollout.places import answers_folder, check_places, is_continued
from trajpack.agent.rollout.settings import (
    MAX_COUNT,
    EngineName,
    LayoutName,
    RolloutSettings as _Rollout,
)
from trajpack.commands.terminal import say

Order = Literal["batch", "best", "worst"]
Oversized = Literal["raise", "drop", "truncate_at_turn", "own_bin"]
Algorithm = Literal["next_fit", "best_fit_decreasing", "karmarkar_karp"]
Source = Literal["slime", "prime-rl", "areal", "trajpack"]
Target = Literal["slime", "prime-rl", "torchtitan", "trajpack"]
Credit = Literal["grpo", "dr-grpo", "rloo"]

Work: TypeAlias = Callable[[], int]
"""The work of a command whose options were read; returns the exit status."""

OPTIONS = {
    "max_attempts": "--attempts",
    "num_turns": "--turns",
    "num_workers": "--ray",
    "servers": "--server",
}
"""Options of settings that have other names."""


def _option(text: str, *names: str, **more: Any) -> Any:
    """Return an option whose help is ``text``, with its default unless the text says that."""
    return typer.Option(*names, help=text, show_default="[default: " not in text, **more)


def _count(text: str, *names: str, least: int = 1, most: int = MAX_COUNT) -> Any:
    """Return an option that takes a whole number in a range."""
    return _option(text, *names, min=least, max=most, metavar="N")


_THERE: Any = {"exists": True, "dir_okay": False}
_Batch: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="File of a packed batch.", **_THERE)
]
_LAYOUT = (
    "merged: a sequence is a whole conversation; turns: one turn; tree: conversations that also "
    "share prefixes, saved as merged."
)
_Layout: TypeAlias = Annotated[LayoutName, _option(_LAYOUT)]
_Force: TypeAlias = Annotated[bool, _option("Replace a file that exists.", "--force")]
_TOKENIZER = (
    "Folder of a tokenizer, or its name on the Hugging Face hub. [default: that of the batch]"
)
_Tokenizer: TypeAlias = Annotated[str | None, _option(_TOKENIZER, metavar="MODEL")]
_Ranks: TypeAlias = Annotated[int, _count("Data-parallel ranks.", most=10_000)]
_Align: TypeAlias = Annotated[
    int, _count("Multiple that each sequence is padded to.", most=1 << 20)
]
_DATASET = (
    "JSONL file of questions and answers; dataset.to_json(FILE) writes one of a Hugging Face data "
    "set. [default: sums of two numbers]"
)
_MODEL = (
    "Folder of a causal language model, or its name on the Hugging Face hub, such as "
    "Qwen/Qwen3-0.6B. [default: a tiny Qwen3 with random weights]"
)
_CONCURRENCY = "Episodes that run at the same time. With 1 the seed decides every token."
_SEED = "Seed of the tiny model, the questions and the sampling."
_OUT = "File of the batch. Its tokenizer goes beside it."
_ANSWERS = "Folder of the answers in plain text. [default: beside the batch]"
_ENGINE = (
    "Where the model runs: in this process, or on servers, for which --model names the tokenizer."
)
_SERVER = (
    "Address of a server, such as http://localhost:8000. Repeat it for several. [default: none]"
)
_LOG = (
    "Folder that keeps each episode. The same command continues from it after a crash. [default: "
    "none]"
)
_RAY = "Workers on Ray, each with its own engine. 0 runs in this process."
_ATTEMPTS = "Attempts at an episode before it counts as failed."
_METRICS = "Port of Prometheus metrics on this machine, 0 for any. [default: no metrics]"


def read(arguments: Sequence[str]) -> Work | int:
    """Return the work that the arguments ask for, or the exit status of a help text."""
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_top)
    app.command("rollout", short_help="Let a model answer questions, and pack the turns.")(rollout)
    app.command("replay", short_help="Pack the episodes of a log.")(replay)
    app.command("inspect", short_help="Show what is in a packed batch.")(inspect_batch)
    app.command("report", short_help="Draw a batch or a log on a page.")(report)
    app.command("plan", short_help="Show the micro-batches of a saved batch.")(plan)
    app.command("convert", short_help="Write the rollouts of one trainer for another.")(convert)
    usage_error: Any = typer.BadParameter.__bases__[0]  # click's own in older releases of typer
    try:
        work: Work | int | None = app(list(arguments), prog_name="trajpack", standalone_mode=False)
    except usage_error as error:
        command = "trajpack" if error.ctx is None else error.ctx.command_path
        raise SetupError(f"{error.format_message().rstrip('.')}; see {command} --help") from error
    except SettingError as error:
        option = OPTIONS.get(error.name, f"--{error.name.replace('_', '-')}")
        raise SetupError(f"{option} {error.problem}") from error
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
        typer.echo(f"trajpack {trajpack.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _check_free(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise SetupError(f"{file} exists; --force replaces it")


def rollout(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    dataset: Annotated[Path | None, _option(_DATASET, metavar="FILE", **_THERE)] = None,
    model: Annotated[str | None, _option(_MODEL, metavar="MODEL")] = None,
    num_prompts: Annotated[int, _count("Number of questions.")] = _Rollout.num_prompts,
    num_turns: Annotated[int, _count("Turns of an episode.", "--turns")] = _Rollout.num_turns,
    group_size: Annotated[int, _count("Episodes for each question.")] = _Rollout.group_size,
    concurrency: Annotated[int, _count(_CONCURRENCY)] = _Rollout.concurrency,
    max_new_tokens: Annotated[
        int, _count("Tokens of an answer at most.")
    ] = _Rollout.max_new_tokens,
    layout: _Layout = "merged",
    turn_discount: Annotated[
        float, _option("Factor of the rewards of the next turn.")
    ] = _Rollout.turn_discount,
    device: Annotated[
        str, _option("Device of the model: cpu, cuda, cuda:1, ...", metavar="DEVICE")
    ] = _Rollout.device,
    seed: Annotated[int, _count(_SEED, least=0, most=2**32 - 1)] = _Rollout.seed,
    out: Annotated[Path, _option(_OUT, metavar="FILE")] = Path(
        "trajpack-rollout/batch.safetensors"
    ),
    force: _Force = False,
    answers: Annotated[Path | None, _option(_ANSWERS, metavar="FOLDER")] = None,
    engine: Annotated[EngineName, _option(_ENGINE)] = _Rollout.engine,
    server: Annotated[list[str] | None, _option(_SERVER, metavar="URL")] = None,
    log: Annotated[Path | None, _option(_LOG, metavar="FOLDER")] = None,
    num_workers: Annotated[int, _count(_RAY, "--ray", least=0)] = _Rollout.num_workers,
    max_attempts: Annotated[int, _count(_ATTEMPTS, "--attempts")] = _Rollout.max_attempts,
    metrics_port: Annotated[int | None, _count(_METRICS, least=0, most=2**16 - 1)] = None,
) -> Work:
    """Let a model answer questions over several turns, and pack the turns into a batch.

    Ctrl-C or SIGTERM stops early and keeps what has finished; a second one ends at once.

    Example: trajpack rollout --dataset gsm8k.jsonl --model Qwen/Qwen3-0.6B --log run
    """
    chosen: dict[str, Any] = dict(locals())  # an option is called as its setting is
    del chosen["layout"], chosen["out"], chosen["server"], chosen["force"]
    check_places(out, answers, replace=force or is_continued(log))
    chosen["answers"] = answers_folder(out) if answers is None else answers
    chosen["servers"] = tuple(server or ())
    settings = _Rollout(**chosen)
    say("loading torch and transformers")
    from trajpack.commands.rollout import roll_out

    return partial(roll_out, settings, layout, out)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Log of rollout --log.")],
    out: Annotated[
        Path | None, _option("File of the batch. [default: none is written]", metavar="FILE")
    ] = None,
    force: _Force = False,
    layout: _Layout = "merged",
    device: Annotated[
        str, _option("Device on which the batch is packed.", metavar="DEVICE")
    ] = "cpu",
) -> Work:
    """Read a log of trajectories, pack it into a batch, and say what is in it.

    Example: trajpack replay run --out again.safetensors
    """
    if out is not None:
        check_places(out, None, replace=force)
    from trajpack.commands.replay import replay_log

    return partial(replay_log, folder, out, layout, device)


_ID = "Only the sequences of this trajectory. [default: all]"
_GROUP = "Only the sequences of this group. [default: all]"
_ORDER = "Order of the sequences: of the batch, or by summed rewards, best or worst first."
_WIDTH = "Width in columns. [default: the terminal's]"
_FULL = "Show all tokens of a sequence, and all prefix breaks."
_JSON = "Print numbers as JSON, those of `trajpack report`, and nothing else."


def inspect_batch(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    file: _Batch,
    tokenizer: _Tokenizer = None,
    sequences: Annotated[int, _count("Number of sequences to show.", least=0)] = 3,
    name: Annotated[str | None, _option(_ID, "--id", metavar="ID")] = None,
    group: Annotated[str | None, _option(_GROUP, metavar="GROUP")] = None,
    order: Annotated[Order, _option(_ORDER)] = "batch",
    width: Annotated[int | None, _count(_WIDTH, least=20, most=10_000)] = None,
    full: Annotated[bool, _option(_FULL, "--full")] = False,
    as_json: Annotated[bool, _option(_JSON, "--json")] = False,
) -> Work:
    """Show what is in a packed batch, and the text of some of its sequences by role.

    Example: trajpack inspect batch.safetensors --order worst --sequences 1
    """
    from trajpack.commands.inspect import Chosen, inspect_as_json, inspect_file

    if as_json:
        return partial(inspect_as_json, file)
    chosen = Chosen(name, group, order, sequences)
    return partial(inspect_file, file, tokenizer, chosen, width=width, full=full)


_PAGE = "HTML file. [default: beside SOURCE, with .html]"
_CAPACITY = "Tokens of a micro-batch. [default: twice the longest sequence]"


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="File of a packed batch, or folder of a log.", exists=True
        ),
    ],
    out: Annotated[Path | None, _option(_PAGE, metavar="FILE")] = None,
    tokenizer: _Tokenizer = None,
    capacity: Annotated[int | None, _count(_CAPACITY)] = None,
    ranks: _Ranks = 8,
    align: _Align = 1,
    force: _Force = False,
) -> Work:
    """Write a page with pictures of a batch or a log: micro-batches, lengths, rewards and texts.

    The page is one file that loads nothing. Its numbers are written as JSON beside it.

    Example: trajpack report batch.safetensors --capacity 16384 --out page.html
    """
    place = source if source.name.strip(".") else source.resolve()  # "." has no name
    if out is None and not place.name:
        raise SetupError(f"--out is missing: {source} has no name that the page could have")
    page = place.with_suffix(".html") if out is None else out
    if page.suffix != ".html" or page.is_dir():
        raise SetupError(f"--out must be an .html file, got {page}")
    for file in (page, page.with_suffix(".json")):
        _check_free(file, force=force)
    from trajpack.commands.report import report_source

    options = {"capacity": capacity, "num_ranks": ranks, "align": align}
    return partial(report_source, place, page, tokenizer, **options)


_ALGORITHM = (
    "How micro-batches are filled. [default: best_fit_decreasing, or with several ranks "
    "karmarkar_karp]"
)
_OVERSIZED = "Treatment of a sequence that is longer than the capacity."
_PLAN_JSON = "Print the statistics and the sequences of each micro-batch as JSON."


def plan(
    batch: _Batch,
    capacity: Annotated[int, _count("Tokens of a micro-batch at most.")],
    ranks: _Ranks = 1,
    algorithm: Annotated[Algorithm | None, _option(_ALGORITHM)] = None,
    align: _Align = 1,
    oversized: Annotated[Oversized, _option(_OVERSIZED)] = "raise",
    as_json: Annotated[bool, _option(_PLAN_JSON, "--json")] = False,
) -> Work:
    """Plan the micro-batches of a batch, and show their number, fill, padding and balance.

    Example: trajpack plan batch.safetensors --capacity 16384 --ranks 8
    """
    from trajpack.commands.plan import plan_file

    options: dict[str, Any] = {"align": align, "oversized": oversized}
    if algorithm is not None:
        options["algorithm"] = algorithm
    return partial(plan_file, batch, capacity, ranks, options=options, as_json=as_json)


_CONVERTED = "JSONL, or a .pt file that torch.save wrote; a saved batch with --from trajpack."
_CONVERTED_OUT = "JSONL or .pt file to write; a .safetensors file with --to trajpack."
_ADVANTAGES = "Estimator of the advantages. [default: none, or those of a saved batch]"
_MISSING_REWARD = "Reward of rollouts that have none. [default: they are refused]"


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_CONVERTED, **_THERE)],
    source: Annotated[Source, _option("Format of FILE.", "--from")],
    target: Annotated[Target, _option("Format to write.", "--to")],
    out: Annotated[Path, _option(_CONVERTED_OUT, metavar="FILE")],
    advantages: Annotated[Credit | None, _option(_ADVANTAGES)] = None,
    missing_reward: Annotated[float | None, _option(_MISSING_REWARD)] = None,
    force: _Force = False,
) -> Work:
    """Convert rollouts from one trainer's format to another's.

    Example: trajpack convert samples.jsonl --from slime --to prime-rl --out prime.jsonl
    """
    suffixes = [".safetensors"] if target == "trajpack" else [".jsonl", ".pt"]
    if out.suffix not in suffixes or out.is_dir():
        raise SetupError(f"--out must be a {' or '.join(suffixes)} file, got {out}")
    _check_free(out, force=force)
    from trajpack.commands.convert import convert_file

    return partial(
        convert_file,
        file,
        source,
        target,
        out=out,
        advantages=advantages,
        missing_reward=missing_reward,
    )

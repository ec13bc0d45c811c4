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
from trajpack.commands.option_values import number, one_of, whole
from trajpack.commands.terminal import readable, results, say

_COUNT: Any = whole(1, MAX_COUNT)
Order = Literal["batch", "best", "worst"]
Oversized = Literal["raise", "drop", "truncate_at_turn", "own_bin"]
Algorithm = Literal["next_fit", "best_fit_decreasing", "karmarkar_karp"]
Source = Literal["slime", "prime-rl", "areal", "trajpack"]
Target = Literal["slime", "prime-rl", "torchtitan", "trajpack"]
Credit = Literal["grpo", "dr-grpo", "rloo"]
_LAYOUTS: Any = one_of(LayoutName)
_ALGORITHMS: Any = one_of(Algorithm)
_FILE: Any = {"metavar": "FILE"}
_NAME: Any = {"metavar": "MODEL", "show_default": False}
_FOLDER: Any = {"metavar": "FOLDER", "show_default": False}
_SEED: Any = whole(0, 2**32 - 1)

Work: TypeAlias = Callable[[], int]
"""The work of a command whose options were read; returns the exit status."""

OPTIONS = {
    "max_attempts": "--attempts",
    "num_steps": "--steps",
    "num_turns": "--turns",
    "num_workers": "--ray",
    "servers": "--server",
}
"""Options of settings that have other names."""


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
    work: Work | int | None
    try:
        with results():  # of help
            work = app(list(arguments), prog_name="trajpack", standalone_mode=False)
    except usage_error as error:
        command = "trajpack" if error.ctx is None else error.ctx.command_path
        problem = _problem(error)
        end = "" if problem.endswith("?") else ";"
        raise SetupError(f"{problem}{end} see {command} --help") from error
    except SettingError as error:
        option = OPTIONS.get(error.name, f"--{error.name.replace('_', '-')}")
        raise SetupError(f"{option} {error.problem}") from error
    return work or 0


def _problem(error: Any) -> str:
    """Return what a usage error says, with the name of the option before its problem."""
    if isinstance(error, typer.BadParameter) and error.param is not None and error.message:
        return f"{error.param.opts[0]} {error.message}"
    return str(error.format_message()).rstrip(".")


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


def rollout(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    dataset: Annotated[
        Path | None, typer.Option(**_FILE, help=_DATASET, show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(**_NAME, help=_MODEL)] = None,
    num_prompts: Annotated[
        int, typer.Option(**_COUNT, help="Number of questions.")
    ] = _Rollout.num_prompts,
    num_turns: Annotated[
        int, typer.Option("--turns", **_COUNT, help="Turns of an episode.")
    ] = _Rollout.num_turns,
    group_size: Annotated[
        int, typer.Option(**_COUNT, help="Episodes for each question.")
    ] = _Rollout.group_size,
    concurrency: Annotated[int, typer.Option(**_COUNT, help=_CONCURRENCY)] = _Rollout.concurrency,
    max_new_tokens: Annotated[
        int, typer.Option(**_COUNT, help="Tokens of an answer at most.")
    ] = _Rollout.max_new_tokens,
    layout: Annotated[LayoutName, typer.Option(**_LAYOUTS, help=_LAYOUT)] = "merged",
    turn_discount: Annotated[
        float, typer.Option(**number(), help="Factor of the rewards of the next turn.")
    ] = _Rollout.turn_discount,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device of the model: cpu, cuda, cuda:1, ...")
    ] = _Rollout.device,
    seed: Annotated[int, typer.Option(**_SEED, help=_SEEDED)] = _Rollout.seed,
    out: Annotated[Path, typer.Option(**_FILE, help=_OUT)] = Path(
        "trajpack-rollout/batch.safetensors"
    ),
    force: Annotated[bool, typer.Option("--force", help=_FORCE)] = False,
    answers: Annotated[Path | None, typer.Option(**_FOLDER, help=_ANSWERS)] = None,
    engine: Annotated[
        EngineName, typer.Option(**one_of(EngineName), help=_ENGINE)
    ] = _Rollout.engine,
    server: Annotated[
        list[str] | None, typer.Option(metavar="URL", help=_SERVER, show_default=False)
    ] = None,
    log: Annotated[Path | None, typer.Option(**_FOLDER, help=_LOG)] = None,
    num_workers: Annotated[
        int, typer.Option("--ray", **whole(0, MAX_COUNT), help=_RAY)
    ] = _Rollout.num_workers,
    max_attempts: Annotated[
        int, typer.Option("--attempts", **_COUNT, help=_ATTEMPTS)
    ] = _Rollout.max_attempts,
    metrics_port: Annotated[
        int | None, typer.Option(**whole(0, 2**16 - 1), help=_METRICS, show_default=False)
    ] = None,
) -> Work:
    """Let a model answer questions over several turns, and pack the turns into a batch.

    Ctrl-C or SIGTERM stops early and keeps what has finished; a second one ends at once.

    Example: trajpack rollout --dataset gsm8k.jsonl --model Qwen/Qwen3-0.6B --log run
    """
    chosen: dict[str, Any] = dict(locals())  # an option is called as its setting is
    del chosen["layout"], chosen["out"], chosen["server"], chosen["force"]
    chosen["answers"] = answers_folder(out) if answers is None else answers
    chosen["servers"] = tuple(server or ())
    settings = _Rollout(**chosen)
    check_places(out, settings.answers, replace=force or is_continued(log))
    if dataset is not None:
        _check_data_set(dataset)
    say("loading torch and transformers")
    from trajpack.commands.rollout import roll_out

    return partial(roll_out, settings, layout, out)


def _check_data_set(file: Path) -> None:
    try:
        if file.is_dir():
            raise SetupError(f"cannot read {file}: it is a folder")
        readable(file)
    except SetupError as error:
        raise SetupError(f"{error}; --dataset takes a JSONL file; {_TO_JSON}") from error.__cause__


_TO_JSON = "dataset.to_json(FILE) writes one of a Hugging Face data set"
_DATASET = f"JSONL file of questions and answers; {_TO_JSON}. [default: sums of two numbers]"
_MODEL = (
    "Folder of a causal language model, or its name on the Hugging Face hub, such as "
    "Qwen/Qwen3-0.6B. [default: a tiny Qwen3 with random weights]"
)
_CONCURRENCY = "Episodes that run at the same time. With 1 the seed decides every token."
_LAYOUT = (
    "merged: a sequence is a whole conversation; turns: one turn; tree: conversations that also "
    "share prefixes, saved as merged."
)
_SEEDED = "Seed of the tiny model, the questions and the sampling."
_OUT = "File of the batch. Its tokenizer goes beside it."
_FORCE = "Replace a file that exists."
_ANSWERS = "Folder of the answers in plain text. [default: beside the batch]"
_ENGINE = (
    "Where the model runs: in this process, or on servers, for which --model names the tokenizer."
)
_SERVER = "Address of a server, such as http://localhost:8000. Repeat it for several."
_LOG = "Folder that keeps each episode. The same command continues from it after a crash."
_RAY = "Workers on Ray, each with its own engine. 0 runs in this process."
_ATTEMPTS = "Attempts at an episode before it counts as failed."
_METRICS = "Port of Prometheus metrics on this machine, 0 for any. [default: no metrics]"


def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Log of rollout --log.")],
    out: Annotated[Path | None, typer.Option(**_FILE, help=_REPLAYED, show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help=_FORCE)] = False,
    layout: Annotated[LayoutName, typer.Option(**_LAYOUTS, help=_LAYOUT)] = "merged",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device on which the batch is packed.")
    ] = "cpu",
) -> Work:
    """Read a log of trajectories, pack it into a batch, and say what is in it.

    Example: trajpack replay run --out again.safetensors
    """
    if out is not None:
        check_places(out, None, replace=force)
    from trajpack.commands.replay import replay_log

    return partial(replay_log, folder, out, layout, device)


_REPLAYED = "File of the batch. [default: none is written]"


def inspect_batch(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of a packed batch.")],
    tokenizer: Annotated[str | None, typer.Option(**_NAME, help=_TOKENIZER)] = None,
    sequences: Annotated[
        int, typer.Option(**whole(0, MAX_COUNT), help="Number of sequences to show.")
    ] = 3,
    name: Annotated[
        str | None, typer.Option("--id", metavar="ID", help=_ID, show_default=False)
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help=_GROUP, show_default=False)
    ] = None,
    order: Annotated[Order, typer.Option(**one_of(Order), help=_ORDER)] = "batch",
    width: Annotated[
        int | None, typer.Option(**whole(20, 10_000), help=_WIDTH, show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help=_FULL)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> Work:
    """Show what is in a packed batch, and the text of some of its sequences by role.

    Example: trajpack inspect batch.safetensors --order worst --sequences 1
    """
    readable(file)
    from trajpack.commands.inspect import Chosen, inspect_as_json, inspect_file

    if as_json:
        return partial(inspect_as_json, file)
    chosen = Chosen(name, group, order, sequences)
    return partial(inspect_file, file, tokenizer, chosen, width=width, full=full)


_ID = "Only the sequences of this trajectory."
_GROUP = "Only the sequences of this group."
_ORDER = "Order of the sequences: of the batch, or by summed rewards, best or worst first."
_JSON = "Print numbers as JSON, those of `trajpack report`, and nothing else."
_TOKENIZER = (
    "Folder of a tokenizer, or its name on the Hugging Face hub. [default: that of the batch]"
)
_FULL = "Show all tokens of a sequence, and all prefix breaks."
_WIDTH = "Width in columns. [default: the terminal's]"


def report(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="File of a packed batch, or folder of a log.")
    ],
    out: Annotated[Path | None, typer.Option(**_FILE, help=_PAGE, show_default=False)] = None,
    tokenizer: Annotated[str | None, typer.Option(**_NAME, help=_TOKENIZER)] = None,
    capacity: Annotated[
        int | None, typer.Option(**_COUNT, help=_CAPACITY, show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(**whole(1, 10_000), help="Data-parallel ranks.")] = 8,
    align: Annotated[
        int, typer.Option(**whole(1, 1 << 20), help="Multiple that each sequence is padded to.")
    ] = 1,
) -> Work:
    """Write a page with pictures of a batch or a log: micro-batches, lengths, rewards and texts.

    The page is one file that loads nothing. Its numbers are written as JSON beside it. A page
    that exists is replaced.

    Example: trajpack report batch.safetensors --capacity 16384 --out page.html
    """
    from trajpack.commands.report import report_source
    from trajpack.packing.report.figures import ReportOptions

    return partial(report_source, source, out, tokenizer, ReportOptions(capacity, ranks, align))


_PAGE = "HTML file. [default: beside SOURCE, with .html]"
_CAPACITY = "Tokens of a micro-batch to show first. [default: twice the longest sequence]"


def plan(
    batch: Annotated[Path, typer.Argument(metavar="FILE", help="File of a packed batch.")],
    capacity: Annotated[int, typer.Option(**_COUNT, help="Tokens of a micro-batch at most.")],
    ranks: Annotated[int, typer.Option(**whole(1, 10_000), help="Data-parallel ranks.")] = 1,
    algorithm: Annotated[
        Algorithm | None, typer.Option(**_ALGORITHMS, help=_ALGORITHM, show_default=False)
    ] = None,
    align: Annotated[
        int, typer.Option(**whole(1, 1 << 20), help="Multiple that each sequence is padded to.")
    ] = 1,
    oversized: Annotated[Oversized, typer.Option(**one_of(Oversized), help=_OVERSIZED)] = "raise",
    as_json: Annotated[bool, typer.Option("--json", help=_PLAN_JSON)] = False,
) -> Work:
    """Plan the micro-batches of a batch, and show their number, fill, padding and balance.

    Example: trajpack plan batch.safetensors --capacity 16384 --ranks 8
    """
    from trajpack.commands.plan import plan_file

    return partial(
        plan_file,
        batch,
        capacity,
        ranks,
        algorithm=algorithm,
        align=align,
        oversized=oversized,
        as_json=as_json,
    )


_ALGORITHM = (
    "How micro-batches are filled. [default: best_fit_decreasing, or with several ranks "
    "karmarkar_karp]"
)
_OVERSIZED = "Treatment of a sequence that is longer than the capacity."
_PLAN_JSON = "Print the statistics and the sequences of each micro-batch as JSON."


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_CONVERTED)],
    source: Annotated[Source, typer.Option("--from", **one_of(Source), help="Format of FILE.")],
    target: Annotated[Target, typer.Option("--to", **one_of(Target), help="Format to write.")],
    out: Annotated[Path, typer.Option(**_FILE, help=_CONVERTED_OUT)],
    advantages: Annotated[
        Credit | None, typer.Option(**one_of(Credit), help=_ADVANTAGES, show_default=False)
    ] = None,
    missing_reward: Annotated[
        float | None, typer.Option(**number(), help=_MISSING_REWARD, show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help=_FORCE)] = False,
) -> Work:
    """Convert rollouts from one trainer's format to another's.

    Example: trajpack convert samples.jsonl --from slime --to prime-rl --out prime.jsonl
    """
    if out.exists() and not out.is_dir() and not force:
        raise SetupError(f"{out} exists; --force replaces it")
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


_CONVERTED = "JSONL, or a .pt file that torch.save wrote; a saved batch with --from trajpack."
_CONVERTED_OUT = "JSONL or .pt file to write; a .safetensors file with --to trajpack."
_ADVANTAGES = "Estimator of the advantages. [default: none, or those of a saved batch]"
_MISSING_REWARD = "Reward of rollouts that have none. [default: they are refused]"

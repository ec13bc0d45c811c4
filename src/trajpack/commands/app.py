"""The sub-commands: their options, and what is refused before torch is imported."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

import trajpack
from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.settings import (
    SETTINGS_FILE,
    EngineName,
    LayoutName,
    RolloutSettings as _Rollout,
    check_places,
)
from trajpack.commands.terminal import say

Order = Literal["batch", "best", "worst"]
Oversized = Literal["raise", "drop", "truncate_at_turn", "own_bin"]
Algorithm = Literal["next_fit", "best_fit_decreasing", "karmarkar_karp"]

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's own in older releases of typer


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Turns of LLM agents, packed into training batches.

    Try: trajpack rollout --out demo/batch.safetensors

    and: trajpack inspect demo/batch.safetensors
    """
    if version:
        typer.echo(f"trajpack {trajpack.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text)


def _count(text: str, *names: str, least: int = 1, most: int = 10_000_000) -> Any:
    return typer.Option(*names, help=text, min=least, max=most)


_BatchFile: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="File of a packed batch.", exists=True, dir_okay=False),
]
_LAYOUT = "A sequence is a conversation, or with turns a turn; tree reports shared prefixes, too."
_Layout: TypeAlias = Annotated[LayoutName, _option(_LAYOUT)]
_Force: TypeAlias = Annotated[bool, _option("Replace a file that exists.", "--force")]
_TOKENIZER = "Folder of a tokenizer, or name on the Hugging Face hub. [default: the batch's]"
_Tokenizer: TypeAlias = Annotated[str | None, _option(_TOKENIZER)]
_Ranks: TypeAlias = Annotated[int, _count("Data-parallel ranks.", most=10_000)]
_Align: TypeAlias = Annotated[int, _count("Multiple of padded lengths.", most=1 << 20)]
_JSONL = (
    "JSONL file of questions and answers; dataset.to_json(FILE) writes one of a Hugging Face data "
    "set. [default: sums of two numbers]"
)
_MODEL = (
    "Folder of a causal language model, or its name on the Hugging Face hub, such as "
    "Qwen/Qwen3-0.6B. [default: a tiny Qwen3 with random weights]"
)
_CONCURRENCY = "Episodes that run at the same time. With 1 the seed decides every token."
_SEED = "Seed of the tiny model, the questions and the sampling."
_ENGINE = "The model in this process, or servers, for which --model names the tokenizer."
_SERVER = "Address of a server, such as http://localhost:8000. Repeat it for several."
_OUT = Path("trajpack-rollout/batch.safetensors")
_LOG = "Folder that keeps each episode. The same command continues from it after a crash."
_RAY = "Workers on Ray, each with its own engine. 0 runs in this process."
_ATTEMPTS = "Attempts at an episode before it counts as failed."
_METRICS = "Port of Prometheus metrics on this machine, 0 for any. [default: no metrics]"
_ANSWERS = "Folder of the answers in plain text. [default: beside the batch]"


@app.command()
def rollout(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    dataset: Annotated[Path | None, typer.Option(help=_JSONL, exists=True, dir_okay=False)] = None,
    model: Annotated[str | None, _option(_MODEL)] = None,
    num_prompts: Annotated[int, _count("Number of questions.")] = _Rollout.num_prompts,
    num_turns: Annotated[int, _count("Turns of an episode.", "--turns")] = _Rollout.num_turns,
    group_size: Annotated[int, _count("Episodes for each question.")] = _Rollout.group_size,
    concurrency: Annotated[int, _count(_CONCURRENCY)] = _Rollout.concurrency,
    max_new_tokens: Annotated[int, _count("Tokens of an answer.")] = _Rollout.max_new_tokens,
    layout: _Layout = "merged",
    turn_discount: Annotated[float, _option("Factor of later rewards.")] = _Rollout.turn_discount,
    device: Annotated[str, _option("Device of the model: cpu, cuda, ...")] = _Rollout.device,
    seed: Annotated[int, _count(_SEED, least=0, most=2**32 - 1)] = _Rollout.seed,
    out: Annotated[Path, _option("File of the batch; its tokenizer goes beside it.")] = _OUT,
    force: _Force = False,
    answers: Annotated[Path | None, _option(_ANSWERS)] = None,
    engine: Annotated[EngineName, _option(_ENGINE)] = _Rollout.engine,
    servers: Annotated[list[str], _option(_SERVER, "--server")] = [],  # noqa: B006
    log: Annotated[Path | None, _option(_LOG)] = None,
    num_workers: Annotated[int, _count(_RAY, "--ray", least=0)] = _Rollout.num_workers,
    max_attempts: Annotated[int, _count(_ATTEMPTS, "--attempts")] = _Rollout.max_attempts,
    metrics_port: Annotated[int | None, _count(_METRICS, least=0, most=2**16 - 1)] = None,
) -> int:
    """Let a model answer questions, and pack the turns.

    The model answers over several turns. Ctrl-C or SIGTERM stops early and keeps what has finished;
    a second one ends at once.

    Example: trajpack rollout --dataset gsm8k.jsonl --model Qwen/Qwen3-0.6B --log run
    """
    chosen: dict[str, Any] = dict(locals())  # an option is called as its setting is
    for name in ("layout", "out", "force"):
        del chosen[name]
    is_continued = log is not None and (log / SETTINGS_FILE).exists()
    check_places(out, answers, replace=force or is_continued)
    chosen["servers"] = tuple(servers)
    chosen["answers"] = out.with_suffix(".answers") if answers is None else answers
    settings = _Rollout(**chosen)
    say("loading torch and transformers")
    from trajpack.commands.rollout import roll_out

    return roll_out(settings, layout, out)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Log of rollout --log.")],
    out: Annotated[Path | None, _option("File of the batch. [default: none is written]")] = None,
    force: _Force = False,
    layout: _Layout = "merged",
    device: Annotated[str, _option("Device on which the batch is packed.")] = "cpu",
) -> None:
    """Pack the episodes of a log.

    Example: trajpack replay run --out again.safetensors
    """
    if out is not None:
        check_places(out, None, replace=force)
    from trajpack.commands.saved import replay_log

    replay_log(folder, out, layout, device)


@app.command("inspect")
def inspect_batch(
    file: _BatchFile,
    tokenizer: _Tokenizer = None,
    sequences: Annotated[int, _count("Number of sequences to show.", least=0)] = 3,
    name: Annotated[str | None, _option("Only those of this trajectory.", "--id")] = None,
    group: Annotated[str | None, _option("Only those of this group.")] = None,
    order: Annotated[Order, _option("Of the batch, or by summed rewards.")] = "batch",
    full: Annotated[bool, _option("Show all tokens, and all prefix breaks.", "--full")] = False,
    as_json: Annotated[bool, _option("Print numbers alone, as JSON.", "--json")] = False,
) -> None:
    """Show what is in a packed batch, and some of its text by role.

    Example: trajpack inspect batch.safetensors --order worst --sequences 1
    """
    from trajpack.commands.inspect import inspect_as_json, inspect_file

    if as_json:
        inspect_as_json(file)
    else:
        inspect_file(file, tokenizer, sequences, name=name, group=group, order=order, full=full)


_CAPACITY = "Tokens of a micro-batch. [default: twice the longest sequence]"


@app.command()
def report(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Packed batch, or a log.", exists=True),
    ],
    out: Annotated[Path | None, _option("HTML file. [default: beside SOURCE, with .html]")] = None,
    tokenizer: _Tokenizer = None,
    capacity: Annotated[int | None, _count(_CAPACITY)] = None,
    ranks: _Ranks = 8,
    align: _Align = 1,
    force: _Force = False,
) -> None:
    """Draw a batch or a log on a page, with its numbers beside it.

    Example: trajpack report batch.safetensors --capacity 16384 --out page.html
    """
    place = source if source.name.strip(".") else source.resolve()  # "." has no name
    page = place.parent / f"{place.stem}.html" if out is None else out
    if page.suffix != ".html" or page.is_dir():
        raise SetupError(f"--out must be an .html file, got {page}")
    for file in (page, page.with_suffix(".json")):
        if file.exists() and not force:
            raise SetupError(f"{file} exists; --force replaces it")
    from trajpack.commands.saved import report_source

    options = {"capacity": capacity, "num_ranks": ranks, "align": align}
    report_source(place, page, tokenizer, **options)


_ALGORITHM = "Of filling micro-batches. [default: best_fit_decreasing; over ranks karmarkar_karp]"


@app.command()
def plan(
    file: _BatchFile,
    capacity: Annotated[int, _count("Tokens of a micro-batch at most.")],
    ranks: _Ranks = 1,
    algorithm: Annotated[Algorithm | None, _option(_ALGORITHM)] = None,
    align: _Align = 1,
    oversized: Annotated[Oversized, _option("What to do with longer sequences.")] = "raise",
    as_json: Annotated[bool, _option("Print the plan as JSON.", "--json")] = False,
) -> None:
    """Show the number, fill, padding and balance of micro-batches.

    Example: trajpack plan batch.safetensors --capacity 16384 --ranks 8
    """
    from trajpack.commands.plan import plan_file

    options = {"algorithm": algorithm, "align": align, "oversized": oversized}
    plan_file(file, capacity, ranks, options, as_json=as_json)

"""The engine of a rollout, made from its settings: a model in this process, or servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line, load_model
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.seeding import derive_seed


@asynccontextmanager
async def rollout_engine(
    settings: RolloutSettings, vocab_size: int, *, model: Any = None, seed: int | None = None
) -> AsyncIterator[Any]:
    """Start the engine that ``settings`` name, and shut it down at the end.

    Args:
        settings: Of the rollout.
        vocab_size: Servers that answer with ids from it on are not believed, unless the
            environment names another size.
        model: On its device; ``None`` loads or makes the one of the settings. Servers have
            their own.
        seed: Of the sampling, in place of that of the settings.

    Raises:
        SetupError: If the model cannot be loaded or run, no server is named, or the servers
            do not answer.
    """
    seed = settings.seed if seed is None else seed
    async with AsyncExitStack() as stack:
        try:
            engine = _make_engine(settings, vocab_size, model, seed)
            await stack.enter_async_context(engine)
        except SetupError:
            raise
        except (RuntimeError, ValueError) as error:
            what = "use the servers" if settings.has_servers else "run this model"
            raise SetupError(f"the engine cannot {what}: {first_line(error)}") from error
        yield engine


def sampling_seed(settings: RolloutSettings, *parts: int | str) -> int:
    """Return a seed for an engine that is one of several to sample for the same rollout.

    An engine that goes on where another has stopped must not draw the numbers again that led to
    the first samples: those of the same prompt would be equal.
    """
    return derive_seed(settings.seed, "sampling", *parts) if parts else settings.seed


def _make_engine(settings: RolloutSettings, vocab_size: int, model: Any, seed: int) -> Any:
    if settings.has_servers:
        from trajpack.agent.servers.settings import ServerSettings

        found = ServerSettings.from_environment(settings.servers, seed=seed)
        kind: Any = settings.engine  # not "transformers"
        options = replace(found.options, vocab_size=found.options.vocab_size or vocab_size)
        return replace(found, kind=kind, options=options).make_engine()
    if model is None:
        if settings.model is None:
            model, _ = build_tiny_model(settings.seed)
        else:
            model, _ = load_model(settings.model)
        model = model.to(settings.device)
    return TransformersEngine(model, seed=seed)

"""Requests to an engine whose errors are values."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from trajpack.agent.errors import GenerationError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest

Reply: TypeAlias = GenerationOutput | GenerationError


async def reply_of(engine: Any, qid: str, ids: Any, sampling: Any) -> Any:
    """Return the completion, or the error that was raised."""
    try:
        return await engine.generate(GenerationRequest(qid, ids, sampling))
    except GenerationError as error:
        return error


def asking(engine: Any, qid: str, ids: Any, sampling: Any) -> asyncio.Task[Any]:
    """Ask in a task of its own; cancelling it ends the request."""
    return asyncio.create_task(reply_of(engine, qid, ids, sampling))

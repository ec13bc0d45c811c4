"""The state of a training on disk: written whole or not at all, and read back checked."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.run import Prompts, one_by_one
from trajpack.packing.durable_files import LockTakenError, WriterLock, make_folder, write_durably

_FORMAT = 1
_STATE = "checkpoint.json"
_LOCK = "training.lock"
_TRAINER = "trainer-{}.pt"
_COUNTS = ("num_steps", "num_groups", "num_settled")


class SettledPrompts:
    """Which prompts need nothing more: all up to some place, and some beyond.

    Prompts are taken in an order that is always the same, and settled in any. What has to be
    remembered is a number and a few names, however many there are.

    Args:
        num_settled: How many from the first on.
        ahead: Ids of further ones.
        order: What `order` was then.

    Example:
        >>> settled = SettledPrompts(2)
        >>> settled.take("c"), settled.take("d")
        (False, False)
        >>> settled.add("d")
        >>> settled.num_settled, settled.ahead
        (2, {'d'})
        >>> settled.add("c")
        >>> settled.num_settled, settled.ahead
        (4, set())
    """

    def __init__(self, num_settled: int = 0, ahead: Iterable[str] = (), order: str = "") -> None:
        self.num_settled = num_settled
        """This many prompts, from the first on, are settled."""
        self.ahead = set(ahead)
        """Ids of others that are."""
        self.order = order
        """Stands for the ids of the first `num_settled`, in their order: see `chained`."""
        self._taken: deque[str] = deque()

    def take(self, prompt_id: str) -> bool:
        """Take the next prompt beyond the first `num_settled`; return whether it is settled."""
        self._taken.append(prompt_id)
        is_settled = prompt_id in self.ahead
        self._advance()
        return is_settled

    def add(self, prompt_id: str) -> None:
        """Settle one, which may have been taken or not."""
        self.ahead.add(prompt_id)
        self._advance()

    async def left_of(self, prompts: Prompts) -> AsyncGenerator[Prompt, None]:
        """Take prompts from the first on, and yield those that are not settled.

        Raises:
            ValueError: If the first ones are not those that were settled before.
        """
        num_settled, expected, num_skipped, order = self.num_settled, self.order, 0, ""
        async for prompt in one_by_one(prompts):
            if num_skipped == num_settled:
                if not self.take(prompt.id):
                    yield prompt
                continue
            num_skipped, order = num_skipped + 1, chained(order, prompt.id)
            if num_skipped == num_settled and order != expected:
                raise ValueError(
                    f"the first {num_settled} prompts are not those that the checkpoint has "
                    "settled: a training goes on with the same prompts in the same order"
                )
        if num_skipped < num_settled:
            raise ValueError(
                f"expected at least {num_settled} prompts, those that the checkpoint has settled, "
                f"got {num_skipped}"
            )

    def _advance(self) -> None:
        while self._taken and self._taken[0] in self.ahead:
            name = self._taken.popleft()
            self.ahead.remove(name)
            self.num_settled += 1
            self.order = chained(self.order, name)


def chained(order: str, name: str) -> str:
    """Return what stands for some names and one more, in 32 characters.

    Example:
        >>> chained(chained("", "a"), "b") == chained(chained("", "b"), "a")
        False
    """
    text = f"{order}{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True)
class TrainingState:
    """What the coordinator of a training knows between two steps."""

    num_steps: int = 0
    """Steps taken; the version of the weights."""
    num_groups: int = 0
    """Groups learned from in them."""
    num_settled: int = 0
    """Prompts, from the first on, that were learned from or rejected."""
    ahead: tuple[str, ...] = ()
    """Ids of further such prompts."""
    order: str = ""
    """Stands for the ids of the first `num_settled` prompts."""


class Checkpoints:
    """A folder with the last checkpoint of one training.

    The trainer's state is a file of its own, the coordinator's names it and holds its checksum.
    Both are written beside their place, synchronised and then moved there, in this order:
    whenever the process is killed, the folder holds one whole checkpoint, the old or the new.

    Args:
        folder: Made if need be. A relative path means the folder that it names now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        """Where it is."""
        self._lock: WriterLock | None = None
        make_folder(self.folder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder for this training alone; the system lets go of it when we are killed.

        Raises:
            RuntimeError: If another training has it.
        """
        try:
            lock = WriterLock(self.folder / _LOCK)
        except LockTakenError as error:
            raise self._taken(error) from None
        self._lock = lock
        try:
            yield
        finally:
            self._lock = None
            lock.close()

    def save(self, state: TrainingState, trainer: npt.NDArray[np.uint8]) -> None:
        """Write a checkpoint in place of the last one.

        Raises:
            OSError: If it cannot be written; the last one is still there then.
            RuntimeError: If another training has the folder; nothing of it is changed then.

        Cost: writes the trainer's state and waits until the disk has it.
        """
        with self.held() if self._lock is None else nullcontext():
            self._write(state, trainer)

    def _write(self, state: TrainingState, trainer: npt.NDArray[np.uint8]) -> None:
        try:
            assert self._lock is not None
            self._lock.check()
        except LockTakenError as error:
            raise self._taken(error) from None
        name = _TRAINER.format(state.num_steps)
        write_durably(self.folder / name, np.ascontiguousarray(trainer).data)
        told = {
            "format": _FORMAT,
            **{name: getattr(state, name) for name in _COUNTS},
            "ahead": sorted(state.ahead),
            "order": state.order,
            "trainer": {"file": name, "blake2b": _checksum(trainer)},
        }
        write_durably(self.folder / _STATE, json.dumps(told, indent=1).encode())
        for pattern in (_TRAINER.format("*"), f"{_TRAINER.format('*')}.tmp"):
            for old in self.folder.glob(pattern):
                if old.name != name:
                    old.unlink(missing_ok=True)

    def _taken(self, error: LockTakenError) -> RuntimeError:
        return RuntimeError(f"{self.folder}: another training has its checkpoints here: {error}")

    def load(self) -> tuple[TrainingState, npt.NDArray[np.uint8]] | None:
        """Return the last checkpoint and the trainer's state in it, or ``None``.

        Raises:
            ValueError: If what is there is no checkpoint, is damaged, or was written by a later
                version of this library.
        """
        path = self.folder / _STATE
        if not path.exists():
            return None
        try:
            told: Any = json.loads(path.read_bytes())
            if told["format"] != _FORMAT:
                raise ValueError(
                    f"{path}: expected format {_FORMAT}, got {told['format']}; "
                    "a later version may have written it"
                )
            counts = {name: int(told[name]) for name in _COUNTS}
            ahead = tuple(map(str, told["ahead"]))
            state = TrainingState(**counts, ahead=ahead, order=str(told["order"]))
            checksum = str(told["trainer"]["blake2b"])
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not the checkpoint of a training: {error!r}") from error
        file = self.folder / _TRAINER.format(state.num_steps)
        trainer = np.frombuffer(file.read_bytes() if file.exists() else b"", np.uint8)
        if _checksum(trainer) != checksum:
            raise ValueError(f"{file} is missing or not what was written")
        return state, trainer


def _checksum(values: npt.NDArray[np.uint8]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).hexdigest()

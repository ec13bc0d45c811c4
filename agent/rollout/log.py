"""The log of a rollout, from which the same rollout continues after a crash."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trajpack.agent.errors import EpisodeCancelledError, SetupError
from trajpack.agent.models.causal_model import save_tokenizer
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.places import SETTINGS_FILE
from trajpack.agent.rollout.rollout import Rollout
from trajpack.agent.runner.results import EpisodeResult
from trajpack.packing.durable_files import write_durably
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.records import DamagedLogError

_LOGGER = logging.getLogger(__name__)
_SCHEMA_VERSION = 1


class RolloutLog:
    """The `TrajectoryLog` of one rollout; a context manager.

    Its folder also has the tokenizer, and the settings that decide the episodes, so that no other
    rollout continues in it.

    Raises:
        SetupError: If another process writes the log, it is damaged, it is of another rollout, or
            the folder cannot be written.
    """

    def __init__(self, folder: Path, prepared: Rollout) -> None:
        self.folder = folder
        try:
            self._log = TrajectoryLog.open(folder, flush_seconds=2.0)
        except ValueError as error:
            raise SetupError(str(error)) from error
        except OSError as error:
            raise SetupError(f"cannot write {folder}: {error.strerror or error}") from error
        try:
            self._claim(prepared)
        except BaseException:
            self._log.close()
            raise
        self.finished = self._log.finished
        """Names of the episodes that succeeded in earlier runs."""

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Make all records durable, and close the log; a SetupError if that is impossible.

        A reader that holds the file, as one that was stopped by Ctrl-Z, is waited for.
        """
        with self._writing():
            while True:
                try:
                    return self._log.close()
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    _LOGGER.warning("waiting for a reader of %s to end, to write it", self.folder)

    def record(self, result: EpisodeResult) -> None:
        """Append the result of an episode, unless it was cancelled; a SetupError if impossible."""
        if isinstance(result.error, EpisodeCancelledError):
            return
        error = None if result.error is None else result.error.reason
        with self._writing():
            self._log.append(result.qid, result.trajectories, error=error)

    def earlier(self, prompts: Sequence[Prompt], group_size: int) -> Iterator[EpisodeResult]:
        """Yield the results of episodes that succeeded in earlier runs."""
        samples = {
            f"{prompt.id}@{sample}": (prompt, sample)
            for prompt in prompts
            for sample in range(group_size)
        }
        if not self.finished:
            return
        try:
            for logged in self._log.replay():
                if logged.episode in self.finished and logged.episode in samples:
                    prompt, sample = samples[logged.episode]
                    yield EpisodeResult(prompt, logged.trajectories, sample=sample)
        except (DamagedLogError, OSError) as error:
            raise SetupError(f"cannot read {self.folder}: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (DamagedLogError, OSError) as error:
            reason = getattr(error, "strerror", "") or error
            raise SetupError(f"cannot write {self.folder}: {reason}") from error

    def _claim(self, prepared: Rollout) -> None:
        """Write the settings of the rollout, or compare them with those that are there."""
        place = self.folder / SETTINGS_FILE
        wanted = {"schema_version": _SCHEMA_VERSION, **_identity(prepared)}
        try:
            text = place.read_text(encoding="utf-8") if place.exists() else None
            if text is None and len(self._log):
                raise SetupError(f"{self.folder} is no rollout's log: it has no {SETTINGS_FILE}")
            if text is None:
                save_tokenizer(prepared.tokenizer, logged_tokenizer(self.folder))
                write_durably(place, json.dumps(wanted, indent=1).encode())
                return
        except OSError as error:
            raise SetupError(f"cannot write {place}: {error.strerror or error}") from error
        try:
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise SetupError(f"{place} is not what a rollout wrote: {error}") from error
        for name, value in wanted.items():
            if found.get(name) != value:
                raise SetupError(
                    f"{self.folder} is the log of another rollout: {name} was "
                    f"{found.get(name)!r}, now it is {value!r}"
                )


def logged_tokenizer(folder: Path) -> Path:
    """Return the folder of the tokenizer in a rollout's log."""
    return folder / "tokenizer"


def _identity(prepared: Rollout) -> dict[str, Any]:
    """Return the settings that decide the episodes of a rollout and their names."""
    settings = prepared.settings
    questions = json.dumps([asdict(question) for question in prepared.questions], default=str)
    names = ("group_size", "num_turns", "max_new_tokens", "turn_discount", "engine")
    return {
        "seed": settings.seed,
        "num_prompts": len(prepared.prompts),
        **{name: getattr(settings, name) for name in names},
        "model": None if settings.model is None else str(Path(settings.model).resolve()),
        "questions": hashlib.sha256(questions.encode()).hexdigest()[:16],
    }

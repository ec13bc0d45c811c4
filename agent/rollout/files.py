"""Files of a rollout: the batch with its tokenizer, and the log from which it continues."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trajpack.agent.errors import EpisodeCancelledError, SetupError
from trajpack.agent.models.causal_model import refused, save_tokenizer
from trajpack.agent.rollout.rollout import Rollout
from trajpack.agent.rollout.settings import SETTINGS_FILE
from trajpack.agent.runner.results import EpisodeResult
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.durable_files import remove_leftovers, write_durably
from trajpack.packing.files.storage import save
from trajpack.packing.text import one_line
from trajpack.packing.trajectory_log.log import TrajectoryLog

_logger = logging.getLogger(__name__)


def save_rollout(batch: PackedBatch, tokenizer: Any, batch_file: Path) -> None:
    """Write a batch and its tokenizer; after an `OSError` earlier ones are unchanged."""
    folder = batch_file.with_suffix(".tokenizer")
    with tempfile.TemporaryDirectory(".tmp", f".{folder.name}.", batch_file.parent) as unfinished:
        save_tokenizer(tokenizer, Path(unfinished, "written"))
        save(batch, batch_file)
        if folder.exists():
            folder.rename(Path(unfinished, "replaced"))
        Path(unfinished, "written").rename(folder)
    remove_leftovers(folder)


class RolloutLog:
    """The `TrajectoryLog` of one rollout; a context manager.

    Its folder also has the tokenizer, and the settings that decide the episodes, so that no other
    rollout continues in it. Leaving it makes all records durable, and waits for a reader that holds
    the file, as one that was stopped by Ctrl-Z. A `SetupError` or `OSError` says what is wrong.
    """

    def __init__(self, folder: Path, rollout: Rollout) -> None:
        self.folder, self._rollout = folder, rollout
        with refused(""):
            self._log = TrajectoryLog.open(folder, flush_seconds=2.0)
            try:
                self._claim()
            except BaseException:
                self._log.close()
                raise
        self.finished = self._log.finished
        """Names of the episodes that succeeded in earlier runs."""

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with refused(""):
            while True:
                try:
                    return self._log.close()
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    _logger.warning("waiting for a reader of %s to end", one_line(self.folder))

    def record(self, result: EpisodeResult) -> None:
        """Append the result of an episode, unless it was cancelled."""
        if not isinstance(result.error, EpisodeCancelledError):
            reason = getattr(result.error, "reason", None)
            with refused(""):
                self._log.append(result.qid, result.trajectories, error=reason)

    def earlier(self) -> Iterator[EpisodeResult]:
        """Yield the results of episodes that succeeded in earlier runs."""
        prompts = {prompt.id: prompt for prompt in self._rollout.prompts}
        with refused(""):
            for logged in self._log.replay() if self.finished else ():
                name, _, sample = logged.episode.rpartition("@")
                if logged.episode in self.finished:
                    yield EpisodeResult(prompts[name], logged.trajectories, sample=int(sample))

    def _claim(self) -> None:
        """Write the settings of the rollout, or compare them with those that are there."""
        settings, place = self._rollout.settings, self.folder / SETTINGS_FILE
        questions = json.dumps([asdict(one) for one in self._rollout.questions], default=str)
        names = ("seed", "group_size", "num_turns", "max_new_tokens", "turn_discount", "engine")
        wanted = {
            "schema_version": 1,
            "num_prompts": len(self._rollout.prompts),
            **{name: getattr(settings, name) for name in names},
            "model": None if settings.model is None else str(Path(settings.model).resolve()),
            "questions": hashlib.sha256(questions.encode()).hexdigest()[:16],
        }
        if not place.exists():
            if len(self._log):
                raise SetupError(f"{self.folder} is no rollout's log: it has no {SETTINGS_FILE}")
            save_tokenizer(self._rollout.tokenizer, self.folder / "tokenizer")
            write_durably(place, json.dumps(wanted, indent=1).encode())
            return
        with refused(f"{place} is not what a rollout wrote: ", TypeError):
            there = {**json.loads(place.read_text(encoding="utf-8"))}
        for name, value in wanted.items():
            if (before := there.get(name)) != value:
                change = f"{name} was {before!r}, now it is {value!r}"
                raise SetupError(f"{self.folder} is the log of another rollout: {change}")

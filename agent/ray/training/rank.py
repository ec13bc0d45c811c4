"""What runs in the process of a trainer rank."""

from __future__ import annotations

import datetime
import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trajpack.agent.ray.payload import TrajectoryArrays
from trajpack.agent.ray.training.rank_trainer import RankTrainer
from trajpack.agent.ray.weights import Weights

MakeTrainer: TypeAlias = Callable[[], RankTrainer]
"""Makes the trainer of one rank, on the rank, so that it must survive pickling. All ranks must
get the same weights from it."""


@dataclass(frozen=True)
class RankOptions:
    """How trainer ranks are run.

    Raises:
        ValueError: If a value is out of range.
    """

    num_cpus: float = 1.0
    """Cores that Ray sets aside for a rank."""
    num_gpus: float = 0.0
    """GPUs; ranks with one talk by NCCL, others by gloo."""
    num_threads: int = 1
    """Threads of torch in a rank."""
    start_timeout_s: float = 300.0
    """Seconds until a rank that has not started counts as lost."""
    collective_timeout_s: float = 1800.0
    """Seconds that a rank waits for another that lives but does not come; one that has died
    does not take that long."""

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {self.num_threads}")
        for name in ("start_timeout_s", "collective_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "nccl" if self.num_gpus else "gloo"


class TrainerRank:
    """The actor: one rank of a process group, and the trainer in it.

    Args:
        make_trainer: Makes the trainer.
        rank: From 0.
        num_ranks: Of the group.
        options: As the coordinator has them.
    """

    def __init__(
        self, make_trainer: MakeTrainer, rank: int, num_ranks: int, options: RankOptions
    ) -> None:
        torch.set_num_threads(options.num_threads)
        self._rank, self._num_ranks, self._options = rank, num_ranks, options
        self._trainer = make_trainer()
        self._store: Any = None

    def address(self) -> tuple[str, int]:
        """Return where the ranks of the group can meet: at this one, which listens from now on."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = self._meeting_place(host, 0, is_master=True)
        return host, self._store.port

    def _meeting_place(self, host: str, port: int, *, is_master: bool) -> Any:
        patience = datetime.timedelta(seconds=self._options.start_timeout_s)
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=is_master, timeout=patience, wait_for_workers=False
        )

    def join(self, address: tuple[str, int], state: npt.NDArray[np.uint8] | None) -> int:
        """Meet the other ranks, and go back to a state; return the process id."""
        if state is not None:
            self._load(state)
        if self._num_ranks > 1:
            dist.init_process_group(
                self._options.backend,
                store=self._store or self._meeting_place(*address, is_master=False),
                rank=self._rank,
                world_size=self._num_ranks,
                timeout=datetime.timedelta(seconds=self._options.collective_timeout_s),
            )
        return os.getpid()

    def step(self, arrays: TrajectoryArrays) -> dict[str, float]:
        """Take a step with all trajectories that the group is given."""
        paths = arrays.trajectories()
        return dict(self._trainer.step(paths, self._rank, self._num_ranks))

    def state(self) -> npt.NDArray[np.uint8]:
        """Return the trainer's state as bytes."""
        file = io.BytesIO()
        torch.save(self._trainer.state(), file)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def _load(self, state: npt.NDArray[np.uint8]) -> None:
        # Tensors and plain values only: a checkpoint must not be able to run code.
        self._trainer.load_state(torch.load(io.BytesIO(state.tobytes()), weights_only=True))

    def weights(self, version: int) -> Weights:
        """Return the weights under the name of a version."""
        return Weights.of(self._trainer.weights(), version)

    def watch(self) -> None:
        """Never return: whoever waits for it learns at once that the process has ended."""
        threading.Event().wait()

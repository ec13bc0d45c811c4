"""A Ray cluster of this machine alone, for as long as it is needed."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trajpack.packing.optional import require


@contextmanager
def local_cluster(
    *, num_cpus: int, num_gpus: int = 0, object_store_bytes: int | None = None
) -> Iterator[None]:
    """Use the cluster that this process is connected to, or have one of its own meanwhile.

    Ray listens on all of the machine's addresses, so an own cluster asks every connection for a
    token, which is random and stays in this process's environment. Ray decides about that when
    it is imported: where that has happened before, its settings stand as they are. An own cluster
    sends no usage statistics and has no dashboard.

    Ctrl-C ends an own cluster's processes with the block, and so does a SIGTERM that nobody else
    handles: it is taken for a Ctrl-C. After a SIGKILL they end by themselves, the last of them
    within a minute. What Ray has written about itself stays in its folder of temporary files.

    Args:
        num_cpus: Cores that the own cluster believes to have; it may be more than there are.
        num_gpus: The same for GPUs.
        object_store_bytes: Size of its object store; ``None`` leaves it to Ray.

    Cost: some seconds and some 650 MB of memory for Ray's own processes.
    """
    require("ray")
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    is_main = threading.current_thread() is threading.main_thread()
    on_termination = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=object_store_bytes,
        )
        if is_main and on_termination is not None:  # Ray has put its own there
            ends_at_once = on_termination is signal.SIG_DFL
            signal.signal(signal.SIGTERM, _interrupt if ends_at_once else on_termination)
        yield
    finally:
        ray.shutdown()
        if is_main and on_termination is not None:
            signal.signal(signal.SIGTERM, on_termination)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does, so that all blocks are left: an event loop has its own way there."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if callable(on_interrupt):
        on_interrupt(signal.SIGINT, frame)
    else:
        sys.exit(128 + number)

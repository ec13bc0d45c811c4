"""A temporary Ray cluster on this machine."""

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
    """Use the connected cluster, or start a local one for the duration of the context.

    Ray listens on all addresses of the machine, so that a local cluster asks every connection for
    a random token, which stays in this process's environment. Ray reads that setting when it is
    imported: if it was imported before, the setting does not change. A local cluster sends no
    usage statistics and has no dashboard.

    Ctrl-C ends the local cluster with the context, and so does a SIGTERM without another handler,
    which is treated as Ctrl-C. After a SIGKILL its processes end by themselves, the last within a
    minute. Ray's own logs stay in its folder of temporary files.

    Args:
        num_cpus: Cores that the local cluster offers, which may be more than there are.
        num_gpus: GPUs that the local cluster offers.
        object_store_bytes: Size of its object store; ``None`` leaves it to Ray.
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
    """Call the handler of Ctrl-C, so that all contexts are left; an event loop has its own."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if callable(on_interrupt):
        on_interrupt(signal.SIGINT, frame)
    else:
        sys.exit(128 + number)

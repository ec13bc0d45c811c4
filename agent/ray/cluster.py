"""A Ray cluster for the duration of a context."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trajpack.packing.optional import require


@contextmanager
def local_cluster(
    *, num_cpus: int, num_gpus: int = 0, object_store_bytes: int | None = None
) -> Iterator[None]:
    """Use the cluster of this process or of ``RAY_ADDRESS``, or start one on this machine.

    A new cluster offers these resources, has no dashboard, and ends with the context, or within a
    minute after this process was killed. Since Ray listens on all addresses of the machine, it asks
    every connection for a random token, unless Ray was imported before.
    """
    require("ray")
    address = os.environ.get("RAY_ADDRESS", "local")
    if address == "local" and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    size = {"num_cpus": num_cpus, "num_gpus": num_gpus, "object_store_memory": object_store_bytes}
    options: dict[str, Any] = {"include_dashboard": False, **size} if address == "local" else {}
    on_termination = signal.getsignal(signal.SIGTERM)
    with ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options):
        with suppress(ValueError):  # of another thread than the main one
            signal.signal(signal.SIGTERM, on_termination)  # Ray has put its own there
        yield

"""Which worker of pytest-xdist gets which tests."""

from __future__ import annotations

from typing import Any

import pytest

ON_THE_CLUSTER = "ray"
CLUSTER_FILES = {
    "tests/agent/ray/test_training_example.py",
    "tests/agent/ray/test_workers.py",
    "tests/commands/test_servers.py",
}
LONGEST = (
    "tests/kernels/compiled/test_compiled.py",
    "tests/ptx/test_versions.py",
    "tests/ptx/test_counts.py",
    "tests/kernels/scan/test_credit_scan_triton.py",
    ON_THE_CLUSTER,
    "tests/repository/test_distribution.py",
    "tests/packing/tree/test_tree_models.py",
    "tests/packing/credit/test_credit.py",
    "tests/kernels/scan/test_scan_chunks.py",
    "tests/kernels/credit/test_vtrace.py",
    "tests/repository/test_optional_packages.py",
    "tests/repository/test_hardware.py",
    "tests/commands/test_cli.py",
    "tests/agent/test_train_sums.py",
    "tests/packing/isolation/test_families.py",
)
"""Files that take longest begin first, so that no worker ends long after the others.

What `test_counts.py` compiles, other files find in a cache later.
The cluster starts behind them: beside four compilers its workers start too slowly.
"""


def scope_of(nodeid: str) -> str:
    """Return what one worker gets whole: a file, or all files with tests on the Ray cluster.

    A file's tests share what its fixtures set up; two Ray clusters would starve each other.
    """
    file = nodeid.split("::", 1)[0]
    return ON_THE_CLUSTER if file in CLUSTER_FILES else file


def refuse_a_second_cluster(items: list[pytest.Item]) -> None:
    """Raise where a test asks for the cluster in a file that may go to any worker."""
    for item in items:
        asks = "cluster" in getattr(item, "fixturenames", ())
        if asks and scope_of(item.nodeid) != ON_THE_CLUSTER:
            raise pytest.UsageError(f"{item.nodeid} needs the cluster: name its file in {__name__}")


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what deals by ``scope_of``."""
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            longest = next((scope for scope in LONGEST if scope in self.workqueue), None)
            if longest:
                self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return ByScope(config, log)

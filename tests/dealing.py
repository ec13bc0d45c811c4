"""Which worker of pytest-xdist gets which tests."""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ON_THE_CLUSTER = "ray"


class ByFileAndCluster(LoadFileScheduling):
    """A file's tests share what its fixtures set up; two Ray clusters would starve each other."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        name = Path(file).stem
        is_on_the_cluster = name.startswith("test_ray_") or name == "test_servers_command"
        return ON_THE_CLUSTER if is_on_the_cluster else file

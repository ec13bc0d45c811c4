from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from trajpack.agent.errors import SetupError
from trajpack.agent.sandbox.restrictions import readable
from trajpack.agent.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


def read(sandbox: Sandbox, *paths: str | Path) -> list[str]:
    """Return for each file "read", or the name of what was raised."""
    code = "for path in PATHS:\n    try:\n        open(path, 'rb').read()\n        print('read')\n"
    code += "    except OSError as error:\n        print(type(error).__name__)"
    return sandbox.run(f"PATHS = {[str(path) for path in paths]}\n{code}").output.decode().split()


def test_installed_packages_cannot_be_read(sandbox: Sandbox) -> None:
    """Data sets are installed as packages, with the answers in them."""
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    packages = Path(sysconfig.get_path("purelib", vars=base))
    found = [Path(pytest.__file__), *list(packages.glob("*/__init__.py"))[:2]]
    assert set(read(sandbox, *found)) == {"PermissionError"}
    assert read(sandbox, os.__file__, Path(os.__file__).parent / "json" / "decoder.py") == [
        "read",
        "read",
    ]


def test_only_files_of_the_system_and_the_standard_library_are_readable(tmp_path: Path) -> None:
    bases = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    allowed = ("/lib", "/usr/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    for path in readable(str(tmp_path)):
        if path != str(tmp_path):
            roots = (*allowed, *(os.path.join(base, "lib") for base in bases))
            assert os.path.realpath(path).startswith(roots), path
            assert "-packages" not in path


def test_the_ruleset_is_closed_with_its_sandbox() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    sandbox = Sandbox()
    sandbox.close()
    del sandbox
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_program_does_the_same_each_time(sandbox: Sandbox) -> None:
    code = "print([*{'no', 'fixed', 'order', 'in', 'sets'}], hash('text'), hash(b'bytes'))"
    assert len({sandbox.run(code).output for _ in range(3)}) == 1


def test_files_are_left_open_to_be_read_only_where_that_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajpack.agent.sandbox.sandbox.landlock_ruleset", lambda folder: None)
    with pytest.raises(SetupError, match=r"no Landlock.*allow_file_reads=True"):
        Sandbox()
    (tmp_path / "file").touch()
    with Sandbox(allow_file_reads=True) as sandbox:
        assert "landlock" not in sandbox.protections
        assert read(sandbox, tmp_path / "file") == ["read"]

    def fail(folder: str) -> int:
        raise OSError(22, "landlock failed")

    monkeypatch.setattr("trajpack.agent.sandbox.sandbox.landlock_ruleset", fail)
    with pytest.raises(SetupError, match=r"files cannot be hidden here: .*landlock failed"):
        Sandbox()

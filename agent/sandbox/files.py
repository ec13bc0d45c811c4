"""Landlock ruleset that limits the files which untrusted code may read.

The ruleset is created once and passed to each program's process, which can only restrict it more.
"""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
from collections.abc import Mapping

from trajpack.agent.sandbox.launcher import checked, system_call

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_INSTALLED = ("site-packages", "dist-packages")

_CREATE_RULESET, _ADD_RULE = 444, 445
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_READ = _READ_FILE | _READ_FOLDER


def landlock_ruleset(working_folder: str) -> int | None:
    """Create the ruleset and return its descriptor, which the caller closes; None without Landlock.

    It allows reading the files that `readable` returns and no other access to the file system.

    Raises:
        OSError: If the kernel has Landlock but refuses the ruleset.
    """
    abi = system_call(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return None
    file_rights = (1 << (13, 14, 15, 15)[abi - 1]) - 1 if abi <= 4 else (1 << 16) - 1
    attributes = struct.pack("=QQQ", file_rights, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = checked(system_call(_CREATE_RULESET, attributes[:size], size, 0), "landlock")
    try:
        for path, rights in readable(working_folder).items():
            _allow(ruleset, path, rights)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def readable(working_folder: str) -> Mapping[str, int]:
    """Return the readable paths with their Landlock rights: standard and system libraries.

    Installed packages are excluded, since data sets with answers are distributed as packages too.
    """
    rights = dict.fromkeys([working_folder, *_SYSTEM_FILES], _READ)
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    base |= {"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}
    for name in ("stdlib", "platstdlib"):
        folder = sysconfig.get_path(name, vars=base)
        rights[folder] = _READ_FOLDER  # imports list the folder
        rights |= {entry.path: _READ for entry in _entries(folder) if entry.name not in _INSTALLED}
    for folder in _SYSTEM_LIBRARIES:
        rights |= {
            entry.path: _READ
            for entry in _entries(folder)
            if not entry.name.startswith("python") and not entry.is_symlink()
        }
    for name in {"lib", sys.platlibdir}:
        for entry in _entries(os.path.join(sys.base_prefix, name)):
            if ".so" in entry.name and entry.is_file():
                rights[entry.path] = _READ_FILE
    return rights


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the files and sub-folders of a folder, without linked folders."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as entries:
        return [one for one in entries if one.is_file() or one.is_dir(follow_symlinks=False)]


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # missing or unreadable paths need no rule
    try:
        if not os.path.isdir(path):
            rights &= _READ_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        checked(system_call(_ADD_RULE, ruleset, 1, rule, 0), "landlock")
    finally:
        os.close(descriptor)

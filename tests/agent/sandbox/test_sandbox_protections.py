"""Kernels that lack a protection, refuse it, or say that it is in force where it is not."""

from __future__ import annotations

import re

import pytest

from tests.agent.sandbox.sandbox_cases import (
    EAGAIN,
    EINVAL,
    ENOSYS,
    EOPNOTSUPP,
    EPERM,
    UNSHARE,
    Rule,
    run_as,
)

PRCTL, PRLIMIT, ANY_BIT = 157, 302, 0xFFFFFFFF
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446


def prctl(option: int, error: int) -> Rule:
    return (PRCTL, [(0, "==", option)], error)


MISSING: dict[str, tuple[Rule, str]] = {
    "Landlock is older": ((CREATE_RULESET, [], ENOSYS), "this kernel has no Landlock"),
    "Landlock is off": ((CREATE_RULESET, [], EOPNOTSUPP), "this kernel has no Landlock"),
    "Landlock has no version": ((CREATE_RULESET, [], 0), "this kernel has no Landlock"),
    "no rules": ((ADD_RULE, [], EPERM), "files cannot be hidden here: .*landlock failed"),
    "lost rules": ((ADD_RULE, [], 0), "no program can run here: it crashed"),
    "no rulesets in force": ((RESTRICT_SELF, [], EPERM), "locked up here: .*landlock failed"),
    "rulesets that do nothing": ((RESTRICT_SELF, [], 0), "Landlock does not hold: files can be"),
    "no filters": (prctl(22, EINVAL), r"prctl\(22\) failed"),
    "filters that do nothing": (prctl(22, 0), "seccomp does not hold: the network can be reached"),
    "no vow": (prctl(38, EPERM), r"prctl\(38\) failed"),
    "no death signal": (prctl(1, EPERM), r"prctl\(1\) failed"),
    "a lost death signal": (prctl(1, 0), "PR_SET_PDEATHSIG does not hold"),
    "capabilities stay": ((126, [], EPERM), "capset failed"),
    "no limits": ((PRLIMIT, [(2, "&", ANY_BIT)], EPERM), "setrlimit failed: RLIMIT_CPU"),
    "limits that do nothing": (
        (PRLIMIT, [(2, "&", ANY_BIT)], 0),
        "setrlimit does not hold: RLIMIT_CPU",
    ),
    "no handle of a process": ((434, [], ENOSYS), "could not be started: .*not implemented"),
    "no signal by a handle": ((424, [], EPERM), r"cannot be stopped \(pidfd_send_signal: .*Oper"),
    "signals by a handle are unknown": ((424, [], ENOSYS), r"stopped \(pidfd_send_signal: .*impl"),
    "no files in memory": ((319, [], EPERM), "could not be started: .*Operation not permitted"),
}
"""What the kernel does not do, and the reason that a SetupError gives for both users."""


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("missing", MISSING)
def test_a_sandbox_without_a_protection_is_refused(missing: str, user: str) -> None:
    rule, reason = MISSING[missing]
    report = run_as(user, ["print(1)"], shim=[rule])
    assert report.error is not None
    assert report.error.startswith("Sandbox: ")
    assert re.search(reason, report.error), report.error
    assert not report.has_children
    assert report.num_files == 0


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (prctl(38, 0), "PR_SET_NO_NEW_PRIVS does not hold"),
        ((126, [], 0), "capset does not hold: capabilities are left"),
    ],
)
def test_rights_that_root_has_not_given_up_are_noticed(lie: Rule, reason: str) -> None:
    report = run_as("root", shim=[lie])
    assert report.error is not None
    assert reason in report.error


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("error", [EPERM, EINVAL, ENOSYS, EAGAIN, 0])
def test_namespaces_are_claimed_only_where_they_are(user: str, error: int) -> None:
    report = run_as(user, ["print(1)"], shim=[(UNSHARE, [], error)])
    threads = "thread_limit" if user == "root" else "no_threads"
    assert report.error is None
    assert report.protections == (threads, "landlock", "seccomp")
    assert report.results == [("exited", "1\n")]


def test_reading_is_allowed_by_name_alone_where_there_is_no_landlock() -> None:
    code = f"print(len(open({__file__!r}).read()) > 9)"
    report = run_as("root", [code], shim=[(CREATE_RULESET, [], ENOSYS)], allow_file_reads=True)
    assert "landlock" not in report.protections
    assert report.results == [("exited", "True\n")]
    lie = run_as("root", [code], shim=[(RESTRICT_SELF, [], 0)], allow_file_reads=True)
    assert lie.error is not None
    assert "Landlock does not hold" in lie.error
    assert "landlock" in run_as("root", [code]).protections

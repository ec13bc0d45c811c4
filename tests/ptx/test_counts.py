"""No kernel executes more or moves more than the committed counts say."""

from __future__ import annotations

import json

import triton

from tests.ptx import counts

COMPARED = ("instructions", "read", "written", "load_sectors", "store_sectors")


def test_no_kernel_does_a_tenth_more_than_it_did() -> None:
    known, found = json.loads(counts.COUNTS.read_text()), counts.count()
    assert found.keys() == known.keys(), counts.__doc__
    worse = {
        f"{kernel}: {name}": (known[kernel][name], numbers[name])
        for kernel, numbers in found.items()
        for name in COMPARED
        if numbers[name] > 1.1 * known[kernel][name] + 0.02
    }
    assert not worse, counts.__doc__


def test_the_page_shows_the_committed_counts() -> None:
    known = json.loads(counts.COUNTS.read_text())
    assert counts.PAGE.read_text() == counts.page(known, triton.__version__)

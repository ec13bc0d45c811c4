"""Contests, results and inputs that the tests of benchmarks share."""

import numpy as np

from benchmarks import machine
from benchmarks.contest import Contest

SMALL = 0.002
LENGTHS = np.array([3, 1, 8, 5])


def must_be(wanted):
    def check(result):
        if result != wanted:
            raise AssertionError(f"{result} is not {wanted}")

    return check


def contest(**options):
    return Contest("job", "A: a", 10, must_be("right"), **options)


def says(result):
    return lambda: result


def results_of(*records, measured="cpu"):
    described = machine.describe("command") | {"measured": measured, "contests": list(records)}
    if measured == "gpu":
        described["hardware"] = described["hardware"] | {"gpu": "some GPU", "cuda": "13.0"}
    return described

"""Trainers' own packages, as the tests of their formats reach them."""

from tests.packing.adapters.conftest import (  # noqa: F401
    areal,
    openrlhf,
    peer,
    skyrl,
    trl,
    verl,
)

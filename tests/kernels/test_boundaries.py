"""Boundaries, spans and tables that are wrong: refused on the host, and on a device if asked."""

import importlib

import pytest
import torch

from trajpack import kernels
from trajpack.kernels import validation
from trajpack.kernels.fields.gather_fields import FieldLayout, gather_fields
from trajpack.kernels.runs import Run
from trajpack.kernels.validation import values_to_check

TOKENS = 4
ROWS = torch.zeros(TOKENS)
GIVEN = torch.ones(TOKENS, dtype=torch.bool)
IDS = torch.zeros(TOKENS, dtype=torch.int32)
WRONG = {
    "begins late": [1, 2, 4],
    "begins early": [-1, 2, 4],
    "goes back": [0, 3, 2, 4],
    "ends late": [0, 2, 9],
    "ends early": [0, 2, 3],
}
OF_SEQUENCES = {
    "gae": lambda bounds: kernels.gae(ROWS, ROWS, bounds),
    "td_lambda": lambda bounds: kernels.td_lambda(ROWS, ROWS, bounds),
    "turn_gae": lambda bounds: kernels.turn_gae(ROWS, ROWS, bounds, IDS),
    "vtrace": lambda bounds: kernels.vtrace(ROWS, ROWS, bounds, ROWS, ROWS),
    "discounted_returns": lambda bounds: kernels.discounted_returns(ROWS, bounds, 0.9),
    "discounted_returns, masked": lambda bounds: kernels.discounted_returns(
        ROWS, bounds, 0.9, loss_mask=GIVEN
    ),
    "pad": lambda bounds: kernels.pad(ROWS, bounds, 9),
    "unpad": lambda bounds: kernels.unpad(torch.zeros(len(bounds) - 1, 9), bounds, TOKENS),
    "shift_tokens": lambda bounds: kernels.shift_tokens(ROWS, bounds, "left"),
    "drop_tokens": lambda bounds: kernels.drop_tokens(ROWS, bounds, "last", len(bounds) - 1),
    "context_parallel_index": lambda bounds: kernels.context_parallel_index(bounds, TOKENS, 1, 0),
    "context_parallel_order": lambda bounds: kernels.context_parallel_order(bounds, TOKENS, 1),
}


def runs_of(bounds):
    runs = torch.zeros(len(bounds), 8, dtype=torch.int32)
    runs[:, Run.START] = bounds
    return runs


def table_of(bounds):
    table = torch.zeros(3, len(bounds), dtype=torch.int32)
    table[0] = bounds
    return table


FIELD = FieldLayout(torch.float32, (), bytes(4), True)
OF_TABLES = {
    "build": lambda bounds: kernels.build(IDS, runs_of(bounds), ROWS, TOKENS, "triton"),
    "gather_fields": lambda bounds: gather_fields(
        IDS, runs_of(bounds), torch.zeros(len(bounds), 1, dtype=torch.int64), [FIELD], TOKENS,
        "triton",
    ),
    "select_tokens": lambda bounds: kernels.select_tokens(
        [ROWS], table_of(bounds), TOKENS, [0], impl="triton"
    ),
    "merge_tokens": lambda bounds: kernels.merge_tokens(
        ROWS, table_of(bounds), table_of(bounds), TOKENS, impl="triton"
    ),
}  # fmt: skip
"""Those that take tables; only their kernels trust them."""
SPANS = {"leaves": [[2, 5]], "goes back": [[3, 2]], "is negative": [[-1, 2]]}


@pytest.fixture(params=["host", "device"])
def checked(request, monkeypatch):
    """Tensors of the host, for what they are or for those of a device."""
    if request.param == "device":
        monkeypatch.setattr(validation, "HOSTS", ())
        monkeypatch.setattr(validation, "READS_DEVICE", True)


@pytest.mark.parametrize("bounds", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", OF_SEQUENCES.values(), ids=OF_SEQUENCES)
def test_wrong_boundaries_are_named(call, bounds, checked):
    with pytest.raises(ValueError, match=r"^\w+: cu_seqlens must go from 0 to num_tokens 4 and"):
        call(torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("call", OF_SEQUENCES.values(), ids=OF_SEQUENCES)
def test_right_boundaries_are_taken(call, checked):
    call(torch.tensor([0, 1, 4], dtype=torch.int32))
    call(torch.tensor([0, 4], dtype=torch.int32))


@pytest.mark.parametrize("bounds", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", OF_TABLES.values(), ids=OF_TABLES)
def test_wrong_tables_are_named(call, bounds, checked):
    with pytest.raises(ValueError, match=r"^\w+: (runs|segments) must go from 0 to num_tokens 4"):
        call(torch.tensor(bounds, dtype=torch.int32))


PLACES = {
    "ids behind the stream": ((Run.SOURCE, 1), "SOURCE within 4, run 0 has 4 from 1"),
    "log-probabilities behind the stream": ((Run.LOGPROB, 2), "LOGPROB within 4, run 0 has 4 from"),
    "log-probabilities before it": ((Run.LOGPROB, -1), "LOGPROB within 4, run 0 has 4 from -1"),
    "a turn that is not there": ((Run.TURN, 4), "TURN within 4, run 0 has 1 from 4"),
}


@pytest.mark.parametrize(("change", "match"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_places_outside_of_the_stream_are_named(impl, change, match, checked):
    runs = runs_of(torch.tensor([0, TOKENS]))
    kernels.build(IDS, runs, ROWS, TOKENS, impl)
    runs[0, change[0]] = change[1]
    with pytest.raises(ValueError, match=f"^build: runs must keep Run.{match}"):
        kernels.build(IDS, runs, ROWS, TOKENS, impl)
    runs[0, Run.SOURCE], runs[0, Run.GENERATED] = -1, TOKENS  # padding follows none of them
    kernels.build(IDS, runs, ROWS, TOKENS, impl)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("op", ["segment_sum", "segment_mean", "segment_max"])
def test_wrong_spans_are_named(op, spans, checked):
    with pytest.raises(ValueError, match=f"^{op}: segments must lie within 4 entries"):
        getattr(kernels, op)(ROWS, torch.tensor(spans, dtype=torch.int32))


def test_a_device_is_not_read_unless_asked_for(monkeypatch):
    tensor = torch.zeros(3)
    assert values_to_check(tensor) is tensor
    monkeypatch.setattr(validation, "HOSTS", ())
    assert values_to_check(tensor) is None
    monkeypatch.setattr(validation, "READS_DEVICE", True)
    assert values_to_check(tensor) is tensor
    assert values_to_check(tensor.to("meta")) is None


@pytest.mark.parametrize(
    ("given", "reads"), [(None, False), ("0", False), ("", False), ("1", True)]
)
def test_the_environment_asks_for_it(given, reads, monkeypatch):
    with monkeypatch.context() as environment:
        environment.delenv("TRAJPACK_CHECK", raising=False)
        if given is not None:
            environment.setenv("TRAJPACK_CHECK", given)
        assert importlib.reload(validation).READS_DEVICE is reads
    importlib.reload(validation)

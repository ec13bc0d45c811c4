"""Boundaries, spans and tables that are wrong: refused on the host, and on a device if asked."""

import importlib
import re
import sys
from functools import partial

import pytest
import torch
from torch.autograd.profiler import profile

from trajpack import kernels
from trajpack.kernels import validation
from trajpack.kernels.credit.turns import Turns, scores_of_trajectories, spread as spread_turns
from trajpack.kernels.fields.build import build
from trajpack.kernels.fields.gather_fields import FieldLayout, gather_fields
from trajpack.kernels.groups.group_advantages import (
    Members,
    Rule,
    advantages_of,
)
from trajpack.kernels.rearrange.select_tokens import merge_tokens
from trajpack.kernels.rearrange.shift import drop_tokens, shift_tokens
from trajpack.kernels.runs import Run
from trajpack.kernels.scan.credit_scan import credit_scan
from trajpack.kernels.scan.scan_inputs import Scan
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
    "turn_gae": lambda bounds: kernels.turn_gae(ROWS, ROWS, bounds, IDS),
    "vtrace": lambda bounds: kernels.vtrace(ROWS, ROWS, bounds, ROWS, ROWS),
    "discounted_returns": lambda bounds: kernels.discounted_returns(ROWS, bounds, 0.9),
    "discounted_returns, masked": lambda bounds: kernels.discounted_returns(
        ROWS, bounds, 0.9, loss_mask=GIVEN
    ),
    "pad": lambda bounds: kernels.pad(ROWS, bounds, 9),
    "unpad": lambda bounds: kernels.unpad(torch.zeros(len(bounds) - 1, 9), bounds, TOKENS),
    "shift_tokens": lambda bounds: shift_tokens(ROWS, bounds, "left"),
    "drop_tokens": lambda bounds: drop_tokens(ROWS, bounds, "last", len(bounds) - 1),
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
    "build": lambda bounds: build(IDS, runs_of(bounds), ROWS, TOKENS, "triton"),
    "gather_fields": lambda bounds: gather_fields(
        IDS, runs_of(bounds), torch.zeros(len(bounds), 1, dtype=torch.int64), [FIELD], TOKENS,
        "triton",
    ),
    "select_tokens": lambda bounds: kernels.select_tokens(
        [ROWS], table_of(bounds), TOKENS, [0], impl="triton"
    ),
    "merge_tokens": lambda bounds: merge_tokens(
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
    build(IDS, runs, ROWS, TOKENS, impl)
    runs[0, change[0]] = change[1]
    with pytest.raises(ValueError, match=f"^build: runs must keep Run.{match}"):
        build(IDS, runs, ROWS, TOKENS, impl)
    runs[0, Run.SOURCE], runs[0, Run.GENERATED] = -1, TOKENS  # padding follows none of them
    build(IDS, runs, ROWS, TOKENS, impl)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_wrong_spans_are_named(spans, checked):
    with pytest.raises(ValueError, match=r"^segment_sum: segments must lie within 4 entries"):
        kernels.segment_sum(ROWS, torch.tensor(spans, dtype=torch.int32))


CU_TURNS, TURNS = torch.tensor([0, 1, 2]).int(), torch.tensor([[0, 2], [2, 4]]).int()
TURN_IDS = torch.tensor([0, 0, 1, 1]).int()
ORDER, ORDER_32 = torch.arange(TOKENS), torch.arange(TOKENS).int()
GROUPS = torch.tensor([0, TOKENS]).int()
WORDS = torch.zeros(8, dtype=torch.int32)


def spread(starts=(0, 2, 4), turns=(0, 1, 0), index=None):
    runs = runs_of(torch.tensor(starts))
    runs[:, Run.TURN] = torch.tensor(turns)
    return spread_turns(Turns(TURN_IDS, runs), torch.zeros(2), index=index, impl="triton")


def scanned(
    cu_turns=CU_TURNS, begins=TURNS[:, 0], spans=TURNS, cu_positions=CU_TURNS * 2, ids=TURN_IDS
):
    scan = Scan(
        cu_turns, cu_positions=cu_positions, begins=begins.contiguous(), spans=spans,
        turn_rewards=torch.zeros(2).double(), turn_ids=ids,
    )  # fmt: skip
    return credit_scan(scan, "with_advantages", "triton")


def compared(order=ORDER, groups=GROUPS):
    members = Members(IDS, 1, order, groups)
    return advantages_of(ROWS, members, Rule("mean", "std", 1, 0.0, "raw"), impl="triton")


def weighed(segments):
    return kernels.importance_weights(
        ROWS, ROWS, GIVEN, kernels.Correction.mis(), segments=segments, impl="triton"
    )


def gathered(byte=0):
    sources = torch.tensor([[byte], [0]])
    return gather_fields(WORDS, runs_of(torch.tensor([0, 4])), sources, [FIELD], TOKENS, "triton")


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


FOLLOWED = {
    "runs": (
        lambda table=(0, 2, 4): spread(table), (0, 3, 5),
        "spread: runs must go from 0 to num_tokens",
    ),
    "turns of runs": (
        lambda table=(0, 1, 0): spread(turns=table), (0, 2, 0),
        "spread: turns of runs must be in [0, 2)",
    ),
    "values of turns": (
        lambda table=CU_TURNS[:2]: spread(index=table), ints(0, 3),
        "spread: index must be in [0, 3)",
    ),
    "turns that are scanned": (scanned, ints(0, 1, 3), "with_advantages: cu_turns must go from 0"),
    "begins of chunks": (
        lambda table=TURNS[:, 0]: scanned(begins=table), ints(0, 3),
        "with_advantages: chunks from begins must lie within 4 entries",
    ),
    "spans of chunks": (
        lambda table=TURNS: scanned(spans=table), ints([0, 2], [3, 2]),
        "with_advantages: spans must lie within 4 entries",
    ),
    "turns of tokens": (
        lambda table=TURN_IDS: scanned(ids=table), ints(0, 0, -1, 1),
        "with_advantages: turn_ids must be 0 or more on the tokens of spans alone, token 2 has -1",
    ),
    "turns of values": (
        lambda table=TURN_IDS: spread_turns(
            Turns(table, runs_of(CU_TURNS * 2)), torch.zeros(2), impl="torch"
        ),
        ints(0, 0, 1, 2), "spread: turn_ids must be in [-1, 2), they go from 0 to 2",
    ),
    "lengths of chunks": (
        lambda table=CU_TURNS * 2: scanned(cu_positions=table), ints(0, 2, 9),
        "with_advantages: cu_positions must lie within 4 entries",
    ),
    "scores": (
        lambda table=CU_TURNS: scores_of_trajectories(
            torch.zeros(2).double(), CU_TURNS, table, CU_TURNS[:2], clip=1.0, impl="triton"
        ),
        ints(0, 2, 9), "scores_of_trajectories: cu_turns must go from 0 to turns 2",
    ),
    "order": (compared, ints(0, 1, 2, 4), "group_advantages: order must be in [0, 4)"),
    "groups in an order": (
        lambda table=GROUPS: compared(groups=table), ints(0, 5),
        "group_advantages: groups must lie within 4 entries",
    ),
    "weighed segments": (
        lambda table=CU_TURNS: weighed(table), ints(0, 1, 5), "importance_weights: segments must",
    ),
    "weighed spans": (
        lambda table=TURNS: weighed(table), ints([0, 2], [2, 5]),
        "importance_weights: segments must lie",
    ),
    "rows": (gathered, 17, "gather_fields: sources must keep bytes of field 0 within 32, run 0"),
}  # fmt: skip
"""Calls with tables that are right, one that is wrong, and the error."""


@pytest.mark.parametrize(("call", "wrong", "message"), FOLLOWED.values(), ids=FOLLOWED)
def test_tables_that_lead_elsewhere_are_named(call, wrong, message, checked):
    call()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call(wrong)


CALLS = {
    **{op: partial(call, ints(0, 1, 4)) for op, call in (OF_SEQUENCES | OF_TABLES).items()},
    **{op: call for op, (call, _, _) in FOLLOWED.items()},
    "segment_sum": lambda: kernels.segment_sum(ROWS, TURNS, impl="triton"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_device_that_is_not_checked_has_no_more_to_do(call, executor, monkeypatch):
    def operations(call):
        executor.launched.clear()
        with profile() as profiled:
            call()
        return executor.launched.copy(), [event.name for event in profiled.function_events]

    read, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (read.append(tensor), cpu(tensor))[1])
    monkeypatch.setattr(validation, "HOSTS", ())
    call()  # compiles
    unchecked = operations(call)
    assert not read
    with monkeypatch.context() as patch:
        for module in [module for name, module in sys.modules.items() if "trajpack.ker" in name]:
            for name in vars(module).keys() & CHECKS:
                patch.setattr(module, name, lambda *_, **__: None)
        assert operations(call) == unchecked
    monkeypatch.setattr(validation, "READS_DEVICE", True)
    launched, _ = operations(call)
    assert launched == unchecked[0]
    assert read


CHECKS = {
    "check_boundaries", "check_indices", "check_runs", "check_segments_within", "values_to_check",
    "_check_chunks",
}  # fmt: skip
"""Functions that read tables."""


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


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    class OnDevice:
        __torch_dispatch__ = torch.Tensor.__torch_dispatch__
        device, is_cuda = torch.device("cuda"), True

        def cpu(self):
            return "values"

    monkeypatch.setattr(validation, "READS_DEVICE", True)
    for capturing, expected in ((False, "values"), (True, None)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert values_to_check(OnDevice()) == expected


def test_steps_that_wrap_around_are_refused():
    bounds = torch.tensor([0, 2**31 - 1, -2, 4], dtype=torch.int32)  # no step of int32 is negative
    assert (bounds.diff() >= 0).all()
    with pytest.raises(ValueError, match="cu_seqlens must go from 0 to num_tokens 4"):
        kernels.gae(torch.zeros(4), torch.zeros(4), bounds)


MANY, ENDS = torch.empty(2**31 + 1024, device="meta"), torch.zeros(2, dtype=torch.int32).to("meta")
OF_MANY = {
    "gae": lambda: kernels.gae(MANY, MANY, ENDS),
    "turn_gae": lambda: kernels.turn_gae(MANY, MANY, ENDS, MANY.int()),
    "vtrace": lambda: kernels.vtrace(MANY, MANY, ENDS, MANY, MANY),
    "discounted_returns": lambda: kernels.discounted_returns(MANY, ENDS, 0.9),
    "segment_sum": lambda: kernels.segment_sum(MANY, ENDS),
    "pad": lambda: kernels.pad(MANY, ENDS, 9),
}


@pytest.mark.parametrize("name", OF_MANY)
def test_more_entries_than_boundaries_describe_are_refused(name):
    with pytest.raises(
        ValueError, match=r"number of \w+ must be in \[0, 21474\d+\], got 2147484672"
    ):
        OF_MANY[name]()

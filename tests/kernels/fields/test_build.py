"""The fields of a batch: meaning, every shape of runs, the search, isolation, refusals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st

from trajpack.kernels.fields.build import (
    FIELD_DTYPES,
    RUN_WIDTH,
    Run,
    TokenFields,
    build,
    build_reference,
)
from trajpack.kernels.fields.build_triton import BLOCK
from trajpack.kernels.search_triton import find_segment
from trajpack.testing import assert_same_bits, boundaries, random_build_inputs

OP = torch.ops.trajpack.build.default
LENGTHS = {
    "no tokens": [],
    "only empty runs": [0, 0, 0],
    "one token": [1],
    "one run, a word less than a tile": [BLOCK - 1],
    "one run, exactly a tile": [BLOCK],
    "one run, a word more than a tile": [BLOCK + 1],
    "runs that end where tiles end": [BLOCK, 2 * BLOCK, BLOCK // 2, BLOCK // 2],
    "a tile inside a run that neither begins nor ends there": [5, 3 * BLOCK, 7],
    "a tile of tiny runs": [i % 4 for i in range(300)],
    "empty runs at the ends and at a tile's edge": [0, 0, BLOCK, 0, 0, 9, 0],
    "more runs than one level of the search takes": [i * 31 % 97 for i in range(70)],
}


def by_loop(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int
) -> TokenFields:
    """Write the fields of one token after the other."""
    fields = TokenFields(*(torch.zeros(num_tokens, dtype=dtype) for dtype in FIELD_DTYPES.values()))
    bits = fields.rollout_logprobs.view(torch.int32)
    table = runs.tolist()
    for row, following in pairwise(table):
        start, source, context, logprob, position, sequence, turn, version = row
        for step in range(following[Run.START] - start):
            token = start + step
            generated = step >= context
            fields.input_ids[token] = words[source + step] if source >= 0 else 0
            fields.position_ids[token] = position + step
            fields.sequence_ids[token] = sequence
            fields.turn_ids[token] = turn if generated else -1
            fields.prompt_mask[token] = not generated
            fields.loss_mask[token] = generated
            fields.policy_versions[token] = version if generated else -1
            if generated:
                bits[token] = words[logprob + step - context]
                fields.returns[token] = turn_returns[turn]
    return fields


def assert_same_fields(actual: TokenFields, expected: TokenFields) -> None:
    for name, *pair in zip(TokenFields._fields, actual, expected, strict=True):
        assert_same_bits(*pair, name)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_it_equals_a_loop_over_tokens_bit_for_bit(impl: str, lengths: list[int]) -> None:
    inputs = random_build_inputs(np.random.default_rng(0), lengths)
    expected = by_loop(*inputs)
    assert_same_fields(build(*inputs, impl), expected)
    if impl == "torch":
        assert_same_fields(build_reference(*inputs), expected)


@given(
    lengths=st.lists(st.integers(0, 40) | st.sampled_from([BLOCK - 1, BLOCK]), max_size=12),
    num_turns=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20)
def test_any_runs_equal_a_loop_over_tokens(
    impl: str, lengths: list[int], num_turns: int, seed: int
) -> None:
    inputs = random_build_inputs(np.random.default_rng(seed), lengths, num_turns)
    assert_same_fields(build(*inputs, impl), by_loop(*inputs))


def test_words_that_are_not_numbers_are_copied_bit_for_bit(impl: str) -> None:
    patterns = [0x7F800001, 0x7FC12345, -1, -(2**31), 1, 0x7F800000]  # NaNs, -0, a denormal, inf
    words = torch.tensor(patterns, dtype=torch.int32)
    rows = [[0, 0, 0, 0, 0, 0, 0, 3], [6, 0, 0, 0, 0, 0, 0, 0]]
    fields = build(words, torch.tensor(rows, dtype=torch.int32), torch.zeros(1), 6, impl)
    assert_same_bits(fields.rollout_logprobs.view(torch.int32), words)
    assert_same_bits(fields.input_ids, words.long())


def test_implementations_agree_on_thousands_of_runs(impl: str) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.choice([0, 1, 2, 5], 1000).tolist()
    inputs = random_build_inputs(rng, lengths, 100)
    assert_same_fields(build(*inputs, impl), by_loop(*inputs))


WIDTH = tl.constexpr(RUN_WIDTH)


@triton.jit(do_not_specialize=["num_runs"])
def find_kernel(runs, tokens, found, num_runs):
    place = tl.program_id(0)
    tl.store(found + place, find_segment(runs, num_runs, tl.load(tokens + place), WIDTH))


@pytest.mark.parametrize("num_runs", [1, 2, 63, 64, 65, 128, 4095, 4096, 4097, 300_000])
@pytest.mark.parametrize("num_empty", ["none", "some", "most"])
def test_the_search_finds_the_run_of_a_token(num_runs: int, num_empty: str) -> None:
    rng = np.random.default_rng(num_runs)
    lengths = rng.integers(1, 9, num_runs)
    lengths[rng.random(num_runs) < {"none": 0.0, "some": 0.3, "most": 0.97}[num_empty]] = 0
    lengths[rng.integers(num_runs)] += 1
    runs = torch.zeros((num_runs + 1, RUN_WIDTH), dtype=torch.int32)
    runs[:, Run.START] = boundaries(lengths.tolist())
    starts, total = runs[:, Run.START].numpy(), int(lengths.sum())
    nearby = rng.choice(starts, 15)[:, None] + [-1, 0, 1]
    tokens = np.unique(np.clip([*nearby.flat, 0, total - 1], 0, total - 1)).astype(np.int32)
    found = torch.full(tokens.shape, -1, dtype=torch.int32)
    find_kernel[(len(tokens),)](runs, torch.from_numpy(tokens), found, num_runs)
    expected = np.searchsorted(starts[:-1], tokens, side="right") - 1
    assert found.tolist() == expected.tolist()


def test_fields_are_fresh_and_end_with_the_batch(impl: str) -> None:
    words, runs, returns, num_tokens = random_build_inputs(np.random.default_rng(0), [BLOCK, 5])
    kept = [tensor.clone() for tensor in (words, runs, returns)]
    fields = build(words, runs, returns, num_tokens, impl)
    assert {name: field.dtype for name, field in fields._asdict().items()} == FIELD_DTYPES
    for field in fields:
        assert (field.shape, field.stride()) == ((num_tokens,), (1,))
        field.zero_()
    for number, field in enumerate(fields):  # a write reaches neither inputs nor other fields
        field.fill_(1)
        assert [bool(other.all()) for other in fields] == [at <= number for at in range(9)]
        assert field._version == 2, "nor does autograd take it for a write to another field"
    for tensor, copy in zip((words, runs, returns), kept, strict=True):
        assert_same_bits(tensor, copy)
    assert len({field.untyped_storage().data_ptr() for field in fields}) == 1


@pytest.mark.parametrize("lengths", [[], [BLOCK], [3, 0, BLOCK - 3]])
def test_the_operator_is_registered_right(impl: str, lengths: list[int]) -> None:
    """Lengths fill whole tiles, because opcheck compares the unused memory too."""
    words, *rest = random_build_inputs(np.random.default_rng(0), lengths)
    finite = words & 0x3FFFFFFF  # opcheck takes no NaN for equal
    torch.library.opcheck(OP, (finite, *rest, impl))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def fields(
        words: torch.Tensor, runs: torch.Tensor, returns: torch.Tensor, num_tokens: int
    ) -> TokenFields:
        built = build(words, runs, returns * 2, num_tokens)
        return TokenFields(built.input_ids, built.position_ids + 1, *built[2:])

    compiled = torch.compile(fields, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([3, 4], [1, 0, 8]):
        inputs = random_build_inputs(np.random.default_rng(0), lengths)
        assert_same_fields(compiled(*inputs), fields(*inputs))


W, R, T, N = random_build_inputs(np.random.default_rng(0), [3, 4])


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "^build: words must be a tensor, got list", ([1], R, T, N)),
        (TypeError, "words must be int32, got int64", (W.long(), R, T, N)),
        (ValueError, "words must have 1 dimension", (W[None], R, T, N)),
        (TypeError, "runs must be int32, got int64", (W, R.long(), T, N)),
        (ValueError, r"runs must have 2 dimension\(s\), got shape \[8\]", (W, R[0], T, N)),
        (ValueError, r"runs must have shape \[runs \+ 1, 8\], got \[3, 7\]", (W, R[:, 1:], T, N)),
        (ValueError, r"runs must have shape .* got \[0, 8\]", (W, R[:0], T, 0)),
        (TypeError, "turn_returns must be float32, got float64", (W, R, T.double(), N)),
        (ValueError, "turn_returns must have 1 dimension", (W, R, T[None], N)),
        (ValueError, "runs is on meta but the other inputs are on cpu", (W, R.to("meta"), T, N)),
        (ValueError, "turn_returns is on meta but", (W, R, T.to("meta"), N)),
        (ValueError, r"num_tokens must be in \[0, 2147482624\], got -1", (W, R, T, -1)),
        (ValueError, r"runs must go from 0 to num_tokens 9 and never back", (W, R, T, 9)),
        (ValueError, "impl must be 'auto', 'torch' or 'triton', got 'fast'", (W, R, T, N, "fast")),
    ],
)
def test_wrong_input_is_named(error: type[Exception], match: str, arguments: tuple) -> None:
    with pytest.raises(error, match=match):
        build(*arguments)

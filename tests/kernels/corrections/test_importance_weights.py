"""`importance_weights` against a loop over tokens and segments, and the rules for ratios."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.slow import slow_after
from trajpack.kernels.corrections import importance_weights_triton
from trajpack.kernels.corrections.importance_weights import (
    IMPORTANCE_METRICS,
    Correction,
    Rejection,
    importance_weights,
    weigh_tokens,
)
from trajpack.kernels.corrections.importance_weights_triton import CHUNK, TILE
from trajpack.kernels.corrections.slots import Places
from trajpack.testing import assert_same_bits, boundaries

LENGTHS = [5, 0, 1, 30, 7, 2, 64, 3]
RULES = [
    Correction(),
    Correction.tis(1.2),
    Correction(low=0.8, high=1.25),
    Correction.icepop(0.7, 1.4),
    Correction.tis(1.5, level="segment"),
    Correction.mis(0.2, 1.5),
    Correction.mis(0.9, 1.1, level="geometric"),
    Correction(level="geometric", outside="keep"),
    Correction(level="segment", outside="keep", normalize=True),
    Correction(outside="mask", low=0.8, high=1.3, normalize=True),
    Correction(level="none", normalize=True, rejection=Rejection(0.9, 1.1)),
    Correction(high=1.3, rejection=Rejection(0.7, 1.6, level="token")),
    Correction(level="segment", high=2.0, normalize=True, rejection=Rejection(0.95, 1.05)),
    Correction.tis(1.1, level="geometric"),
    Correction(high=1.2, rejection=Rejection(0.5, 2.0, level="segment")),
]


class Case:
    """Random log-probabilities of two policies that differ a little, and segments."""

    def __init__(self, lengths: list[int] = LENGTHS, seed: int = 0, spread: float = 0.2) -> None:
        random = np.random.default_rng(seed)
        num = sum(lengths)
        rollout = -random.exponential(1.0, num)
        self.rollout_logprobs = torch.from_numpy(rollout).float()
        self.logprobs = torch.from_numpy(rollout + random.normal(0, spread, num)).float()
        self.loss_mask = torch.from_numpy(random.random(num) < 0.7)
        self.cu_seqlens = boundaries(lengths)
        ends = np.cumsum(lengths)
        self.spans = [
            (int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)
        ]

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.logprobs, self.rollout_logprobs, self.loss_mask


def bound(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


class Loop:
    """What the weights and metrics are, one token after another."""

    def __init__(self, case: Case, rule: Correction) -> None:
        self.case, self.rule = case, rule
        self.x = (case.logprobs.double() - case.rollout_logprobs.double()).tolist()
        mask = case.loss_mask.tolist()
        self.segments = [[t for t in range(*span) if mask[t]] for span in case.spans]
        self.generated = [t for t, is_generated in enumerate(mask) if is_generated]
        if rule.needs_segments:
            self.generated = sorted(t for tokens in self.segments for t in tokens)
        self.ratios = self.of_level(rule.level)
        self.weights = self.weigh()

    def of_level(self, level: str) -> dict[int, float]:
        if level in ("token", "none"):
            return {t: bound(self.x[t]) for t in self.generated}
        ratios = {}
        for tokens in self.segments:
            logs = [self.x[t] for t in tokens]
            divisor = len(logs) if level == "geometric" else 1
            ratios.update({t: bound(math.fsum(logs) / divisor) for t in tokens})
        return ratios

    def stays(self, token: int, rejection: Rejection) -> bool:
        """Whether a token's logarithm, or what those of its segment sum up to, is in the window."""
        own = next((tokens for tokens in self.segments if token in tokens), [token])
        logs = [min(max(self.x[t], -20.0), 20.0) for t in own]
        looked_at = {
            "token": min(max(self.x[token], -20.0), 20.0),
            "segment": math.fsum(logs),
            "geometric": math.fsum(logs) / len(logs),
        }[rejection.level]
        low = math.log(rejection.low) if rejection.low else -math.inf
        return low <= looked_at <= math.log(rejection.high)

    def weigh(self) -> dict[int, float]:
        rule, weights = self.rule, {}
        for t, ratio in self.ratios.items():
            inside = rule.low <= ratio <= rule.high
            if rule.level == "none":
                weights[t] = 1.0
            elif rule.outside == "truncate":
                weights[t] = min(max(ratio, rule.low), rule.high)
            else:
                weights[t] = ratio if inside or rule.outside == "keep" else 0.0
        if rule.normalize:
            of_segments = rule.level in ("segment", "geometric")
            units = [tokens[0] for tokens in self.segments if tokens]
            units = units if of_segments else self.generated
            mean = math.fsum(weights[t] for t in units) / len(units)
            weights = {t: weight / mean for t, weight in weights.items()}
        self.rejected = set()
        if rule.rejection:
            self.rejected = {t for t in self.generated if not self.stays(t, rule.rejection)}
        return {t: 0.0 if t in self.rejected else weight for t, weight in weights.items()}

    def expected(self) -> list[float]:
        return [self.weights.get(t, 0.0) for t in range(len(self.x))]

    def metrics(self) -> list[float]:
        num, ratios, weights = len(self.generated), self.ratios.values(), self.weights.values()
        k3 = [bound(self.x[t]) - 1 - self.x[t] for t in self.generated]
        return [
            float(num),
            math.fsum(ratios) / num,
            min(ratios),
            max(ratios),
            sum(ratio < self.rule.low for ratio in ratios) / num,
            sum(ratio > self.rule.high for ratio in ratios) / num,
            len(self.rejected) / num,
            math.fsum(weights) / num,
            max(weights),
            math.fsum(weights) ** 2 / (num * math.fsum(w * w for w in weights)),
            -math.fsum(self.x[t] for t in self.generated) / num,
            math.fsum(k3) / num,
        ]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_and_metrics_are_those_of_the_loop(rule: Correction) -> None:
    case = Case()
    loop = Loop(case, rule)
    expected = torch.tensor(loop.expected())
    weights, metrics = importance_weights(*case.tokens(), rule, segments=case.cu_seqlens)
    assert (weights.dtype, metrics.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        dict(zip(IMPORTANCE_METRICS, metrics.tolist(), strict=True)),
        dict(zip(IMPORTANCE_METRICS, loop.metrics(), strict=True)),
        rtol=1e-6,
        atol=1e-9,
    )
    assert 0 < (expected != 0).sum() < len(expected)


@pytest.mark.parametrize("level", ["token", "segment", "geometric"])
@pytest.mark.parametrize("window", [(0.5, 2.0), (0.0, 3.0), (1e-3, math.inf), (1e-12, 1e12)])
def test_rejection_clamps_logarithms_of_tokens_to_20(level: Any, window: Any) -> None:
    """Also where policies are far apart, and where bounds are: 300 batches of each level."""
    rejection = Rejection(*window, level)
    rejected = 0
    for seed in range(75):
        case = Case([4, 1, 7, 3], seed, spread=(0.3, 3.0, 30.0)[seed % 3])
        rule = Correction(level="none", rejection=rejection)
        loop = Loop(case, rule)
        weights, _ = importance_weights(*case.tokens(), rule, segments=case.cu_seqlens)
        assert weights.tolist() == loop.expected()
        rejected += len(loop.rejected)
    assert (rejected > 50) == (level == "segment" or window[1] != 1e12)


@pytest.mark.parametrize(
    ("logarithms", "expected"),
    [
        ([2000.0, -2000.0], 1.0),
        ([5000.0, -1023.0], math.e),  # 1024 - 1023
        ([-5000.0, 1023.0], 1 / math.e),
        ([math.inf, -5000.0], math.exp(20)),
        ([-math.inf, 5000.0], math.exp(-20)),
        ([math.inf, -math.inf], math.nan),
    ],
)
def test_finite_logarithms_beyond_1024_count_as_1024(
    impl: Any, logarithms: list[float], expected: float
) -> None:
    logprobs, mask = torch.tensor(logarithms), torch.ones(2, dtype=torch.bool)
    rule, ends = Correction(level="segment", outside="keep"), boundaries([2])
    weights, _ = importance_weights(logprobs, torch.zeros(2), mask, rule, segments=ends, impl=impl)
    wanted = torch.full((2,), expected)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("given", [True, False], ids=["ids", "no ids"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.needs_segments], ids=str)
def test_spans_in_any_order_may_leave_tokens_out(rule: Correction, given: bool) -> None:
    case = Case()
    case.spans = [case.spans[i] for i in (6, 3, 1, 0, 2)]
    ids = torch.full_like(case.loss_mask, -1, dtype=torch.int32)
    for i, (begin, end) in enumerate(case.spans):
        ids[begin:end] = i
    weights, metrics = importance_weights(
        *case.tokens(),
        rule,
        segments=torch.tensor(case.spans, dtype=torch.int32),
        segment_ids=ids if given else None,
    )
    loop = Loop(case, rule)
    torch.testing.assert_close(weights, torch.tensor(loop.expected()), rtol=1e-6, atol=0)
    assert not weights[ids < 0].any()
    torch.testing.assert_close(metrics.tolist(), loop.metrics(), rtol=1e-6, atol=1e-9)


def assert_kernels_agree(case: Case, rule: Correction, places: Places | None = None) -> None:
    """Weights within two roundings of float32, metrics within those of its exponentials."""
    expected = weigh_tokens(*case.tokens(), rule, places, impl="torch")
    found = weigh_tokens(*case.tokens(), rule, places, impl="triton")
    torch.testing.assert_close(found[0], expected[0], rtol=3e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9, equal_nan=True)
    counted = [0, 4, 5, 6]  # tokens, and shares beyond windows
    assert_same_bits(found[1][counted], expected[1][counted])


@pytest.mark.parametrize("rule", slow_after(6, RULES[::-1]), ids=str)
def test_kernels_agree_with_the_reference(rule: Correction) -> None:
    """By boundaries and by ids, with and without owners; in more than one chunk."""
    case = Case()
    bounds, num = case.cu_seqlens, len(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(num), bounds.diff())
    ids[::9] = -1
    owners = torch.tensor([0, 2, 2, 1, 1, -1, 1, 7])
    by_bounds = Places(bounds, None, None, num, num)
    assert_kernels_agree(case, rule, by_bounds)
    assert_kernels_agree(case, rule, Places(None, ids, None, num, num))
    assert_kernels_agree(case, rule, Places(None, ids.int(), owners.int(), num, 3))
    assert_kernels_agree(case, rule, Places(bounds[1:], None, owners[1:], num - 1, 3))
    case.logprobs[3], case.rollout_logprobs[40], case.loss_mask[[3, 40]] = math.nan, -99.0, True
    assert_kernels_agree(case, rule, Places(bounds, None, owners, num, 3))
    case.logprobs[3], case.rollout_logprobs[60], case.loss_mask[60] = -math.inf, -math.inf, True
    assert_kernels_agree(case, rule, by_bounds)
    case.rollout_logprobs[61], case.loss_mask[61], case.logprobs[62] = 2000.0, True, -math.inf
    assert_kernels_agree(case, rule, by_bounds)
    case.loss_mask[:] = False
    assert_kernels_agree(case, rule, by_bounds)


@pytest.mark.parametrize(
    "rule", slow_after(3, [rule for rule in RULES if rule.needs_segments]), ids=str
)
def test_kernels_agree_where_a_tile_has_many_segments(rule: Correction) -> None:
    """More than are added at once, some with logarithms that are no number or infinite."""
    case = Case([1, 2, 3, 1, 10] * 65)
    bounds, num = case.cu_seqlens, 325
    case.loss_mask[::2] = True
    case.logprobs[[10, 70, 500]] = torch.tensor([math.nan, math.inf, -math.inf])
    ids = torch.repeat_interleave(torch.arange(num), bounds.diff())
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))]
    assert_kernels_agree(case, rule, Places(bounds, None, None, num, num))
    assert_kernels_agree(case, rule, Places(None, ids, None, num, num))
    assert_kernels_agree(case, rule, Places(None, mixed.int(), None, num, num))


@pytest.mark.parametrize("num", [0, 1, TILE, CHUNK, CHUNK + 5])
def test_kernels_agree_at_the_edges_of_tiles_and_chunks(num: int) -> None:
    case = Case([num])
    for rule in (Correction(normalize=True), Correction.mis(level="geometric")):
        assert_kernels_agree(case, rule, Places(case.cu_seqlens, None, None, 1, 1))
    case.logprobs, case.loss_mask = case.logprobs.double(), torch.ones(num + 1).bool()[1:]
    assert_kernels_agree(case, Correction())


@pytest.mark.parametrize(
    ("impl", "rule"),
    [
        *(("torch", rule) for rule in RULES if not rule.normalize),
        *slow_after(1, [("triton", RULES[at]) for at in (14, 0, 5)]),
    ],
    ids=str,
)
def test_a_segment_is_weighed_alike_in_any_company_and_run(impl: Any, rule: Correction) -> None:
    case = Case()

    def weigh(begin: int, end: int, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (one[begin:end] for one in case.tokens())
        return importance_weights(*tokens, rule, segments=bounds, impl=impl)

    together, metrics = weigh(0, sum(LENGTHS), case.cu_seqlens)
    for begin, end in case.spans:
        assert_same_bits(weigh(begin, end, boundaries([end - begin]))[0], together[begin:end])
    for _ in range(20):
        again = weigh(0, sum(LENGTHS), case.cu_seqlens)
        assert_same_bits(again[0], together)
        assert_same_bits(again[1], metrics)


@pytest.mark.parametrize("rule", [RULES[0], RULES[12]], ids=str)
def test_the_op_is_registered_as_torch_wants_it(rule: Correction) -> None:
    case = Case([5, 3])
    names = [rule.level, rule.outside, rule.rejection.level if rule.rejection else ""]
    tables = [case.cu_seqlens, None, None]
    inputs = ([*case.tokens()], tables, [2, 2], names, [0.5, 2.0, 0.9, 1.1], rule.normalize)
    for measures in (True, False):
        op = torch.ops.trajpack.importance_weights
        torch.library.opcheck(op, (*inputs, measures, "torch"))


@pytest.mark.parametrize("normalize", [False, True])
def test_without_metrics_weights_are_the_same(impl: Any, normalize: bool, executor: Any) -> None:
    case, rule = Case([3000, 5]), Correction(high=1.2, normalize=normalize)
    expected, _ = importance_weights(*case.tokens(), rule, impl=impl)
    executor.launched.clear()
    weights, metrics = importance_weights(*case.tokens(), rule, metrics=False, impl=impl)
    assert_same_bits(weights, expected)
    assert metrics.shape == (0,)
    merges = ["merge_kernel"] * normalize
    assert executor.launched == (["weigh_kernel", *merges] if impl == "triton" else [])


@pytest.mark.parametrize("name", ["MERGED", "MOST_PROGRAMS"])
def test_more_chunks_and_tiles_than_a_program_has_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance_weights_triton, name, 2)
    assert_kernels_agree(Case([4 * CHUNK + 5]), Correction(high=1.2, normalize=True))


@pytest.mark.parametrize("arch", slow_after(1, [90, 80]))
def test_a_token_is_read_once_and_written_once(arch: int) -> None:
    """9 bytes of each are read and 4 written, in whole sectors; and what launches there are."""
    from tests.ptx.executor import on_executor

    case = Case([3000] * 6)
    num = len(case.loss_mask)
    ids = torch.arange(6, dtype=torch.int32).repeat_interleave(3000)
    owners = torch.tensor([0, 0, 1, 1, 1, 1])
    of_tokens, of_segments = ["weigh", "merge"], ["sum_slots", "weigh", "merge"]
    for rule, places, launched in (
        (Correction.tis(), None, of_tokens),
        (Correction(normalize=True), None, of_tokens),
        (Correction.mis(), Places(None, ids, None, 6, 6), of_segments),
        (Correction.tis(level="geometric"), Places(None, ids, owners, 6, 2), of_segments),
        (
            Correction(level="segment", normalize=True, rejection=Rejection(0.5, 2.0)),
            Places(case.cu_seqlens, None, None, 6, 6),
            of_segments,
        ),
    ):
        with on_executor(arch, counts=True) as executor:
            weigh_tokens(*case.tokens(), rule, places, impl="triton")
        reports = executor.reports
        assert list(reports) == [f"{name}_kernel" for name in launched]
        assert [report.launches for report in reports.values()] == [1] * len(launched)
        read = 13 if places is not None and places.ids is not None else 9
        for name in launched[:-1]:
            assert 0 <= reports[f"{name}_kernel"].touched["load"] / num - read < 0.05
        assert 0 <= reports["weigh_kernel"].touched["store"] / num - 4 < 0.2  # whole tiles


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
def test_logprobs_of_other_tokens_do_not_count(rule: Correction, filler: float) -> None:
    case = Case()
    expected = importance_weights(*case.tokens(), rule, segments=case.cu_seqlens)
    case.logprobs[~case.loss_mask] = filler
    found = importance_weights(*case.tokens(), rule, segments=case.cu_seqlens)
    case.rollout_logprobs[~case.loss_mask] = filler
    again = importance_weights(*case.tokens(), rule, segments=case.cu_seqlens)
    for one in (found, again):
        assert_same_bits(one[0], expected[0])
        assert_same_bits(one[1], expected[1])


def test_logarithms_are_clamped_to_20() -> None:
    logprobs, rollout_logprobs = (
        torch.tensor([-1.0, -90.0, -math.inf]),
        torch.tensor([-90.0, -1, -1]),
    )
    mask = torch.ones(3, dtype=torch.bool)
    weights, metrics = importance_weights(logprobs, rollout_logprobs, mask, Correction())
    expected = torch.tensor([math.exp(20), math.exp(-20), math.exp(-20)])
    torch.testing.assert_close(weights, expected)
    assert metrics.isfinite().all()


def test_nan_stays_unless_a_window_drops_it() -> None:
    logprobs = torch.tensor([math.nan, -1.0, -1.0])
    inputs = logprobs, torch.tensor([-1.0, -1.0, -1.0]), torch.ones(3, dtype=torch.bool)
    cu_seqlens = boundaries([2, 1])

    def weights(rule: Correction) -> torch.Tensor:
        return importance_weights(*inputs, rule, segments=cu_seqlens)[0]

    assert weights(Correction.tis()).isnan().tolist() == [True, False, False]
    assert weights(Correction.tis(level="segment")).isnan().tolist() == [True, True, False]
    assert weights(Correction.icepop()).tolist() == [0.0, 1.0, 1.0]
    assert weights(Correction.mis()).tolist() == [0.0, 0.0, 1.0]
    assert weights(Correction(rejection=Rejection(0.9, 1.1))).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num", [0, 3])
def test_without_generated_tokens_weights_and_metrics_are_0(rule: Correction, num: int) -> None:
    tokens, mask = torch.full((num,), math.nan), torch.zeros(num, dtype=torch.bool)
    for segments in (boundaries([num]), torch.zeros(0, 2, dtype=torch.int32)):
        weights, metrics = importance_weights(tokens, tokens, mask, rule, segments=segments)
        assert_same_bits(weights, torch.zeros(num))
        assert_same_bits(metrics, torch.zeros(len(IMPORTANCE_METRICS), dtype=torch.float64))


def test_no_gradient_flows() -> None:
    case = Case()
    case.logprobs.requires_grad_()
    weights, metrics = importance_weights(*case.tokens(), Correction.tis())
    assert not weights.requires_grad
    assert not metrics.requires_grad


"""What `importance_weights` and its rules refuse, and what the named rules are."""

X, M, CU = torch.zeros(3), torch.ones(3, dtype=torch.bool), boundaries([2, 1])
TIS, MIS = Correction.tis(), Correction.mis()
WEIGH, RULE, REJECT, INVERSE = importance_weights, Correction, Rejection, Rejection.of_inverse


@pytest.mark.parametrize(
    ("call", "error", "words", "arguments", "options"),
    [
        (WEIGH, TypeError, "^importance_weights: logprobs must be a t", ([0.0], X, M, TIS), {}),
        (WEIGH, TypeError, "logprobs must be float32 or .*, got int64", (X.long(), X, M, TIS), {}),
        (WEIGH, TypeError, "rollout_logprobs must be float32 or", (X, X.half(), M, TIS), {}),
        (WEIGH, ValueError, r"each of 3 token\(s\), got shape \[2\]", (X, X[:2], M, TIS), {}),
        (WEIGH, ValueError, "rollout_logprobs is on meta", (X, X.to("meta"), M, TIS), {}),
        (WEIGH, TypeError, "loss_mask must be bool, got float32", (X, X, X, TIS), {}),
        (WEIGH, ValueError, r"loss_mask must have one entry .*\[2\]", (X, X, M[:2], TIS), {}),
        (WEIGH, TypeError, "correction must be a Correction, got 'tis'", (X, X, M, "tis"), {}),
        (WEIGH, ValueError, "a level of segments needs segments, got Corr", (X, X, M, MIS), {}),
        (WEIGH, TypeError, "segments must be int32", (X, X, M, MIS), {"segments": CU.long()}),
        (WEIGH, TypeError, "segments must be a tensor", (X, X, M, MIS), {"segments": [0, 3]}),
        (WEIGH, ValueError, "boundaries, got none", (X, X, M, MIS), {"segments": CU[:0]}),
        (WEIGH, ValueError, r"or spans .*\[1, 3\]", (X, X, M, MIS), {"segments": CU[None]}),
        (WEIGH, ValueError, "must have 1 dim", (X, X, M, MIS), {"segments": CU[None, None]}),
        (WEIGH, ValueError, "segments is on meta", (X, X, M, MIS), {"segments": CU.to("meta")}),
        (WEIGH, TypeError, "segment_ids must be int32 or .*, got float32", (X, X, M, MIS),
         {"segments": CU, "segment_ids": X}),
        (WEIGH, ValueError, "segment_ids must have one entry", (X, X, M, MIS),
         {"segments": CU, "segment_ids": CU[:2]}),
        (RULE, ValueError, "^Correction: level must be .*, got 'turn'", ("turn",), {}),
        (RULE, ValueError, "outside must be .*, got 'drop'", (), {"outside": "drop"}),
        (RULE, ValueError, "low <= high, got low=2.0 and high=1.0", (), {"low": 2.0, "high": 1.0}),
        (RULE, ValueError, "0 <= low <= high, got low=-1 ", (), {"low": -1}),
        (RULE, ValueError, "high must be a number that is not NaN", (), {"high": math.nan}),
        (RULE, ValueError, "0 <= low <= high, got .* high=0", (), {"high": 0}),
        (RULE, TypeError, "high must be a number, got '2'", (), {"high": "2"}),
        (RULE, TypeError, "low must be a number, got True", (), {"low": True}),
        (RULE, TypeError, "normalize must be a bool, got 1", (), {"normalize": 1}),
        (RULE, TypeError, "rejection must be a Rejection or None", (), {"rejection": 2.0}),
        (REJECT, ValueError, "^Rejection: level must be .*, got 'none'", (), {"level": "none"}),
        (INVERSE, ValueError, "0 <= low <= high, got low=2.0 and high=1.0", (2.0, 1.0), {}),
        (INVERSE, TypeError, "low must be a number, got '1'", ("1",), {}),
        (INVERSE, ValueError, "^Rejection: level must be .*, got 'none'", (0.5, 2.0, "none"), {}),
    ],
)  # fmt: skip
def test_wrong_input_is_named(
    call: Any, error: type[Exception], words: str, arguments: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=words):
        call(*arguments, **options)


def test_named_rules_have_their_fields() -> None:
    assert Correction.tis(3.0, "segment") == Correction("segment", "truncate", 0.0, 3.0)
    assert Correction.icepop() == Correction("token", "mask", 0.5, 5.0)
    assert Correction.mis(0.5, 2.0, "geometric") == Correction("geometric", "mask", 0.5, 2.0)
    assert len({Correction.tis(), Correction.tis(), Correction.mis()}) == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.5, 4.0), (0.25, 2.0)),
        ((), (0.0, math.inf)),
        ((0.0, 2.0), (0.5, math.inf)),
        ((0.5,), (0.0, 2.0)),
        ((1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_a_window_of_the_inverse_ratio_is_one_of_the_ratio(given: Any, expected: Any) -> None:
    for level in ("token", "segment", "geometric"):
        found = Rejection.of_inverse(*given, level=level)  # type: ignore[arg-type]
        assert found == Rejection(*expected, level=level)  # type: ignore[arg-type]

"""`token_logprobs` and `topk_kl` against dense log-probabilities, over all that a head may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trajpack.kernels import token_logprobs, topk_kl
from trajpack.kernels.logprobs import logit_statistics
from trajpack.testing import assert_same_bits


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some rows and tokens need several tiles."""
    monkeypatch.setattr(logit_statistics, "MOST_ROWS", {"cpu": 4})
    monkeypatch.setattr(logit_statistics, "MOST_COLUMNS", {"cpu": 16})


class Case:
    """A head, and rows of hidden states; some occur more than once."""

    def __init__(
        self, num_rows: int = 9, vocabulary: int = 50, dtype: torch.dtype = torch.float64, seed=0
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.hidden, self.weight, self.bias = (
            self.normal(*shape).to(dtype).requires_grad_()
            for shape in ((7, 6), (vocabulary, 6), (vocabulary,))
        )
        self.rows = torch.randint(0, 7, (num_rows,), generator=self.random)
        self.targets = torch.randint(0, vocabulary, (num_rows,), generator=self.random)
        self.temperature = torch.rand(num_rows, generator=self.random) + 0.5
        lengths = torch.randint(0, 5, (num_rows,), generator=self.random)
        self.lengths = lengths.clamp(max=vocabulary).tolist()
        self.allowed = [
            torch.randperm(vocabulary, generator=self.random)[:length] for length in self.lengths
        ]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.weight, self.bias

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.weight, self.rows, self.targets

    @property
    def support(self) -> tuple[torch.Tensor, torch.Tensor]:
        ends = torch.tensor([0, *self.lengths]).cumsum(0).int()
        return ends, torch.cat([*self.allowed, torch.empty(0, dtype=torch.int64)])

    def dense(self, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies from all logits at once."""
        logits = self.hidden[self.rows] @ self.weight.T
        if options.get("bias") is not None:
            logits = logits + options["bias"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if options.get("softcap"):
            logits = (logits / options["softcap"]).tanh() * options["softcap"]
        logits = logits / torch.as_tensor(options.get("temperature", 1.0))[..., None]
        if "support" in options:
            for row, tokens in enumerate(self.allowed):
                if len(tokens):
                    outside = torch.ones(logits.shape[1], dtype=torch.bool)
                    outside[tokens] = False
                    logits = logits.masked_fill(
                        outside & (torch.arange(len(logits)) == row)[:, None], -torch.inf
                    )
        logprobs = logits.log_softmax(1)
        terms = torch.where(logprobs == -torch.inf, 0.0, logprobs)
        entropies = -(terms.exp() * terms).masked_fill(logprobs == -torch.inf, 0.0).sum(1)
        return logprobs.gather(1, self.targets[:, None])[:, 0], entropies


def options_of(case: Case, name: str) -> dict[str, Any]:
    return {
        "plain": {},
        "bias": {"bias": case.bias},
        "temperature": {"temperature": 0.7},
        "temperatures": {"temperature": case.temperature},
        "cap": {"softcap": 1.5},
        "support": {"support": case.support},
        "all": {
            "bias": case.bias, "temperature": case.temperature, "softcap": 1.5,
            "support": case.support,
        },
    }[name]  # fmt: skip


NAMES = ("plain", "bias", "temperature", "temperatures", "cap", "support", "all")


def gradients(found: tuple[torch.Tensor, ...], case: Case) -> tuple[torch.Tensor, ...]:
    """Return gradients of a random sum, over what is finite."""
    random = torch.Generator().manual_seed(5)
    total = sum(
        torch.where(one.isfinite(), one, 0.0)
        @ torch.randn(len(one), generator=random, dtype=torch.float64).to(one.dtype)
        for one in found
    )
    return torch.autograd.grad(total, case.leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(9, 50), (1, 17), (13, 16), (5, 1)])
def test_results_equal_dense_ones(num_rows: int, vocabulary: int, name: str) -> None:
    case = Case(num_rows, vocabulary)
    options = options_of(case, name)
    found = token_logprobs(*case.inputs, entropy=True, **options)
    expected = case.dense(options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradients(found, case), gradients(expected, case), rtol=1e-11, atol=1e-11
    )


def test_a_target_that_was_not_allowed_is_impossible() -> None:
    case = Case(3)
    ends, tokens = torch.tensor([0, 1, 1, 3], dtype=torch.int32), torch.tensor([4, 5, 6])
    targets = torch.tensor([3, 3, 6])
    found = token_logprobs(case.hidden, case.weight, case.rows, targets, support=(ends, tokens))
    assert found[0] == -torch.inf
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_differences(name: str) -> None:
    case = Case(5, 20)
    for row, tokens in enumerate(case.allowed):
        if len(tokens):
            case.targets[row] = tokens[0]
    options = options_of(case, name)

    def call(hidden, weight, bias):
        used = options | ({"bias": bias} if "bias" in options else {})
        return token_logprobs(
            hidden, weight, case.rows, case.targets, entropy=True, impl="torch", **used
        )

    assert torch.autograd.gradcheck(call, case.leaves)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_divergence_from_a_teacher(direction: Any) -> None:
    case = Case(6, 20)
    tokens = torch.stack([torch.randperm(20, generator=case.random)[:4] for _ in range(6)])
    teacher = case.normal(6, 20).log_softmax(1).gather(1, tokens)
    teacher[2, 2:] = -torch.inf
    tokens[2, 2:] = -1
    inputs = case.rows, tokens, teacher
    found = topk_kl(*case.inputs[:2], *inputs, direction=direction, bias=case.bias)
    logprobs = (case.hidden[case.rows] @ case.weight.T + case.bias).log_softmax(1)
    for row in range(6):
        known = teacher[row] > -torch.inf
        here = logprobs[row, tokens[row, known]].exp()
        p, q = (
            torch.cat((x, 1 - x.sum(0, keepdim=True))) for x in (teacher[row, known].exp(), here)
        )
        p, q = (p, q) if direction == "forward" else (q, p)
        torch.testing.assert_close(found[row], (p * (p / q).log()).sum())

    def call(hidden, weight):
        return topk_kl(hidden, weight, *inputs, direction=direction)

    assert torch.autograd.gradcheck(call, case.leaves[:2])


def test_a_teacher_that_is_certain_leaves_a_rest() -> None:
    case = Case(1, 5)
    teacher = torch.zeros(1, 1)
    for direction in ("forward", "reverse"):
        found = topk_kl(
            *case.inputs[:2], case.rows, torch.tensor([[2]]), teacher, direction=direction
        )
        assert found.isfinite().all()
        assert found > 0


def test_no_row_has_no_results_and_zero_gradients() -> None:
    case = Case(0)
    found = token_logprobs(*case.inputs, entropy=True, bias=case.bias)
    assert [len(one) for one in found] == [0, 0]
    assert all(not grad.any() for grad in gradients(found, case))


def test_values_that_are_no_numbers_are_carried_as_by_torch() -> None:
    case = Case(4, 40)
    case.rows = torch.arange(4)
    with torch.no_grad():
        case.hidden[0, 0], case.hidden[1, 0], case.bias[3:30] = torch.nan, torch.inf, -torch.inf
    case.targets[2:] = torch.tensor([5, 35])
    found, expected = token_logprobs(*case.inputs, bias=case.bias), case.dense({"bias": case.bias})
    torch.testing.assert_close(found, expected[0], equal_nan=True)
    assert found[2] == -torch.inf
    with torch.no_grad():
        case.bias.fill_(-torch.inf)
    assert token_logprobs(*case.inputs, bias=case.bias).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_err_no_more_than_dense_halves(dtype: torch.dtype) -> None:
    half, exact = Case(40, 300, dtype, seed=3), Case(40, 300, seed=3)
    with torch.no_grad():
        for one, other in zip(exact.leaves, half.leaves, strict=True):
            one.copy_(other)
    case_results = {}
    for name, case in (("ours", half), ("dense", half), ("exact", exact)):
        found = case.dense({})[0] if name != "ours" else token_logprobs(*case.inputs)
        case_results[name] = [found.double(), *(g.double() for g in gradients((found,), case))]
    for ours, dense, right in zip(*case_results.values(), strict=True):
        error, limit = (ours - right).norm(), (dense - right).norm()
        assert error <= 1.05 * limit + 1e-6, (error, limit)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, torch.Tensor) and one.numel():
                storage = one.untyped_storage().nbytes() // one.element_size()
                self.elements = max(self.elements, storage)
        return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_logits_are_never_in_memory(device: str) -> None:
    num_rows, vocabulary, width = 24, 300, 4
    hidden, weight = (torch.zeros(n, width, device=device) for n in (num_rows, vocabulary))
    rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
    every = torch.arange(num_rows, device=device)
    logits = logit_statistics.Logits(hidden, weight, None, rows, None, 0.0)
    pairs = logit_statistics.Pairs(every, rows, 1)
    with Largest() as largest:
        found = logit_statistics.statistics(logits, pairs, with_mean=True, impl="torch")
        rates = torch.stack((*found[:2], *found[:2]))
        logit_statistics.gradients(
            logits, pairs, rates, found[2], found[2],
            needs=[True, True, False], with_mean=True, impl="torch",
        )  # fmt: skip
    assert largest.elements == vocabulary * width  # the gradient of the weight


def test_repeats_have_the_same_bits() -> None:
    case = Case(30, 100, torch.float32)
    found = token_logprobs(*case.inputs, entropy=True, bias=case.bias)
    first = [*found, *gradients(found, case)]
    for _ in range(20):
        found = token_logprobs(*case.inputs, entropy=True, bias=case.bias)
        for one, other in zip(first, [*found, *gradients(found, case)], strict=True):
            assert_same_bits(one, other)


def test_the_op_keeps_the_contract_of_torch() -> None:
    case = Case(3, 20)
    row = torch.arange(3)
    for temperature, bias in ((None, None), (case.temperature, case.bias)):
        head = case.hidden, case.weight, bias, case.rows, temperature
        torch.library.opcheck(
            torch.ops.trajpack.logit_statistics,
            (*head, row, case.targets, 1, 0.0, True, "torch"),
        )


def test_a_caller_is_compiled() -> None:
    case = Case(6, 20, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def loss(hidden, weight, rows, targets):
        logprobs, entropies = token_logprobs(
            hidden, weight, rows, targets, entropy=True, impl="torch"
        )
        return (logprobs + entropies).sum()

    expected = sum(one.sum() for one in token_logprobs(*case.inputs, entropy=True))
    found = loss(*case.inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, case.leaves[:2]), torch.autograd.grad(expected, case.leaves[:2])
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "hidden of 3 dimensions": ({"hidden": torch.zeros(1, 7, 6)}, "hidden must have 2 dim"),
    "integers": ({"hidden": torch.zeros(7, 6, dtype=torch.int32)}, "hidden must be float16"),
    "another dtype": ({"weight": torch.zeros(50, 6)}, "weight must be float64, got float32"),
    "another width": ({"weight": torch.zeros(50, 5).double()}, "weight must have shape"),
    "no vocabulary": ({"weight": torch.zeros(0, 6).double()}, "at least one token"),
    "no tensor": ({"weight": 3}, "weight must be a tensor, got int"),
    "float rows": ({"rows": torch.zeros(9)}, "rows must be int32 or int64"),
    "a row outside": ({"rows": torch.full((9,), 7)}, r"rows must be in \[0, 7\)"),
    "too few targets": ({"targets": torch.zeros(8).long()}, "targets must have one entry"),
    "a target outside": ({"targets": torch.full((9,), 50)}, r"targets must be in \[0, 50\)"),
    "a bias of another size": ({"bias": torch.zeros(49).double()}, "bias must have one entry"),
    "temperature 0": ({"temperature": 0.0}, "temperature must be finite and above 0"),
    "temperatures of another size": ({"temperature": torch.ones(3)}, "temperature must have one"),
    "a negative cap": ({"softcap": -1.0}, "softcap must be finite and above 0"),
    "boundaries that end early": (
        {"support": (torch.tensor([0] * 9 + [1]).int(), torch.tensor([1, 2]))},
        "support must go from 0 to its tokens 2",
    ),
    "too few boundaries": (
        {"support": (torch.zeros(9).int(), torch.tensor([1, 2]))}, "boundaries of support must"
    ),
    "a token twice": (
        {"support": (torch.tensor([0, 1, 3, 3, 3, 3, 3, 3, 3, 3]).int(), torch.tensor([1, 1, 1]))},
        "must be distinct, row 1 has 1 twice",
    ),
    "another impl": ({"impl": "cuda"}, "impl must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    case = Case()
    change, message = WRONG[name]
    given = dict(zip(("hidden", "weight", "rows", "targets"), case.inputs, strict=True)) | change
    with pytest.raises((TypeError, ValueError), match=message):
        token_logprobs(**given)

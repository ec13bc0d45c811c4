"""`token_logprobs` and `topk_kl` against dense log-probabilities, over all that a head may have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.slow import slow
from trajpack.kernels import token_logprobs, topk_kl
from trajpack.kernels.logprobs import logit_statistics, token_logprobs as module
from trajpack.testing import assert_same_bits


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some rows and tokens need several tiles."""
    monkeypatch.setattr(logit_statistics, "MOST_ROWS", {"cpu": 4})
    monkeypatch.setattr(logit_statistics, "TILE_BYTES", {"cpu": 256})


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
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(9, 50), (1, 17), (13, 16), (5, 1), (0, 50)])
def test_results_equal_dense_ones(num_rows: int, vocabulary: int, name: str) -> None:
    case = Case(num_rows, vocabulary)
    options = options_of(case, name)
    found = token_logprobs(*case.inputs, entropy=True, **options)
    expected = case.dense(options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradients(found, case), gradients(expected, case), rtol=1e-11, atol=1e-11
    )


def test_entropies_of_large_logits_are_precise(impl: Any) -> None:
    """Logits are integers around 1,000, which float32 holds exactly."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-2, 3, (n, 7), generator=random).float() for n in (9, 50))
    hidden[:, 0], weight[:, 0] = 40.0, 25.0
    rows, targets = torch.arange(9), torch.arange(9)
    logprobs = (hidden.double() @ weight.double().T).log_softmax(1)
    exact = -(logprobs.exp() * logprobs).sum(1), logprobs[rows, targets]
    found = token_logprobs(hidden, weight, rows, targets, entropy=True, impl=impl)
    for actual, expected in zip(found[::-1], exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


def test_where_every_row_is_supported_no_other_weight_is_read() -> None:
    case = Case(9, 4000)
    case.lengths = [1 + length for length in case.lengths]
    case.allowed = [torch.randperm(4000, generator=case.random)[:n] for n in case.lengths]
    for row in (0, 3, 8):
        case.targets[row] = case.allowed[row][-1]
    used = torch.zeros(4000, dtype=torch.bool)
    used[torch.cat(case.allowed)] = True
    expected, results = case.dense(options := options_of(case, "all")), []
    wanted = gradients(expected, case)
    for known in (False, True):
        found = token_logprobs(*case.inputs, entropy=True, every_row_supported=known, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(found, case), wanted, rtol=1e-11, atol=1e-11)
        results.append(found)
    with torch.no_grad():
        case.weight[~used] = torch.nan
    found = token_logprobs(*case.inputs, entropy=True, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_same_bits(results[0][0].detach(), results[1][0].detach())


@pytest.mark.parametrize("name", ["plain", "bias", "temperatures", "cap"])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(9, 50), (1, 17), (13, 16)])
def test_several_tokens_of_a_row_and_all_others(num_rows: int, vocabulary: int, name: str) -> None:
    case = Case(num_rows, vocabulary)
    options = options_of(case, name)
    found = token_logprobs(*case.inputs[:3], case.support, **options)
    every = []
    for token in range(vocabulary):
        case.targets = torch.full((num_rows,), token)
        every.append(case.dense(options)[0])
    dense, others = torch.stack(every, 1), torch.ones(num_rows, vocabulary, dtype=torch.bool)
    picked = []
    for row, tokens in enumerate(case.allowed):
        picked.append(dense[row, tokens])
        others[row, tokens] = False
    expected = torch.cat(picked), dense.masked_fill(~others, -torch.inf).logsumexp(1)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        gradients(found, case), gradients(expected, case), rtol=1e-10, atol=1e-10
    )


def test_the_tail_of_a_certain_model_is_exact_and_has_a_gradient() -> None:
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[40.0, 0], [0, 0], [0, 0]], dtype=torch.float64)
    support = torch.tensor([0, 1]).int(), torch.tensor([0])
    logprobs, rest = token_logprobs(hidden, weight, torch.tensor([0]), support)
    assert rest.item() == pytest.approx(math.log(2) - 40)
    teacher = torch.tensor([0.5]).double().log()
    found = topk_kl(logprobs, rest, teacher, boundaries=support[0])
    assert found.item() == pytest.approx(math.log(0.5) + 0.5 * (40 - math.log(2)))
    assert torch.autograd.grad(found.sum(), hidden)[0][0, 0].item() == pytest.approx(20)


@pytest.mark.parametrize("direction", ["forward", slow("reverse")])
def test_divergence_from_a_teacher(direction: Any) -> None:
    case = Case(9, 20)
    boundaries, tokens = case.support
    whole = case.normal(9, 20).log_softmax(1)
    owners = torch.arange(9).repeat_interleave(boundaries.diff())
    teacher = whole[owners, tokens]
    teacher[1] = -torch.inf  # counted with the others

    def call(hidden, weight, bias):
        found = token_logprobs(hidden, weight, case.rows, (boundaries, tokens), bias=bias)
        return topk_kl(*found, teacher, boundaries=boundaries, direction=direction)

    found = call(*case.leaves)
    logprobs = (case.hidden[case.rows] @ case.weight.T + case.bias).log_softmax(1)
    for row in range(9):
        own = (owners == row) & (teacher > -torch.inf)
        here = logprobs[row, tokens[own]].exp()
        p, q = (torch.cat((x, 1 - x.sum(0, keepdim=True))) for x in (teacher[own].exp(), here))
        p, q = (p, q) if direction == "forward" else (q, p)
        torch.testing.assert_close(found[row], (p * (p / q).log()).sum())
    assert torch.autograd.gradcheck(call, case.leaves)


@pytest.mark.parametrize(
    ("values", "message"),
    [([math.nan, -1.0], "at most 0, got nan"), ([-1.0, 3.0], "at most 0, got 3")],
)
def test_a_teacher_whose_numbers_are_wrong_is_refused(values: Any, message: str) -> None:
    own, boundaries = torch.tensor([-1.0, -2.0]), torch.tensor([0, 2]).int()
    with pytest.raises(ValueError, match=message):
        topk_kl(own, torch.tensor([-1.0]), torch.tensor(values), boundaries=boundaries)


def test_a_teacher_whose_numbers_cannot_be_read_is_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "values_to_check", lambda _: None)
    own, boundaries = torch.tensor([-1.0, -2.0]), torch.tensor([0, 2]).int()
    teacher = torch.tensor([math.nan, -1.0])
    assert topk_kl(own, torch.tensor([-1.0]), teacher, boundaries=boundaries).isnan().all()


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


KEPT: dict[str, dict[str, Any]] = {
    "tokens": {"entropy": True},
    "all that a head has": {"entropy": True, "every": "all"},
    "every row supported": {"every": "support"},
    "sets of tokens": {"sets": True},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KEPT)
def test_kept_logits_change_no_bit(name: str, dtype: torch.dtype) -> None:
    case, options = Case(9, 50, dtype), dict(KEPT[name])
    options |= options_of(case, options.pop("every", "bias"))
    targets = case.support if options.pop("sets", False) else case.targets
    tile = 64 * dtype.itemsize  # 3 rows of at most 21 logits
    leaves = case.leaves[: 3 if "bias" in options else 2]
    every = []
    for keep in (0, tile, 5 * tile, None, 10**6):
        found = token_logprobs(*case.inputs[:3], targets, keep_logits=keep, **options)
        found = found if isinstance(found, tuple) else (found,)
        total = sum(torch.where(one.isfinite(), one, 0.0).sum() for one in found)
        for _ in range(2):  # the second time nothing is kept any more
            grads = torch.autograd.grad(total, leaves, retain_graph=True)
            every.append([*(one.detach() for one in found), *grads])
    for results in every[1:]:
        for one, other in zip(results, every[0], strict=True):
            assert_same_bits(one, other)


def test_kept_logits_are_whole_tiles_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    case, products = Case(9, 50, torch.float32), []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **out: products.append(1) or mm(*args, **out))
    cut = logit_statistics.Cut.of(case.hidden, 9, 50, 1)
    sizes = [4 * cut.entries(3)] * 9
    for number, end in enumerate(torch.tensor([0, *sizes]).cumsum(0).tolist()):
        for keep in (end, end + 4):
            assert 4 * cut.kept(9, 50, keep // 4) == end
            total = token_logprobs(*case.inputs, keep_logits=keep).sum()
            products.clear()
            torch.autograd.grad(total, case.leaves[:2])
            assert len(products) == 9 - number


def test_kept_logits_go_past_hooks_and_end_with_the_first_backward_pass() -> None:
    """A checkpoint compares sizes of what is saved, and by default free memory says what is."""
    case, budgets = Case(), iter((10**6, 0))

    def total() -> torch.Tensor:
        return token_logprobs(*case.inputs, keep_logits=next(budgets)).sum()

    found = checkpoint(total, use_reentrant=False)
    grads = torch.autograd.grad(found, case.leaves[:2], retain_graph=True)
    node = found.grad_fn
    while not hasattr(node, "kept"):
        node = node.next_functions[0][0]
    assert node.kept is None
    expected = torch.autograd.grad(token_logprobs(*case.inputs).sum(), case.leaves[:2])
    for one, other in zip(grads, expected, strict=True):
        assert_same_bits(one, other)


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
    boundaries = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    logits = logit_statistics.Logits(hidden, weight, None, rows, None, 0.0)
    pairs = logit_statistics.Pairs(boundaries, rows)
    with Largest() as largest:
        found = logit_statistics.statistics(logits, pairs, with_mean=True, impl="torch")
        rates = torch.stack((*found[:2], *found[:2]))
        logit_statistics.gradients(
            logits, pairs, rates, found[2],
            needs=[True, True, False], with_mean=True, impl="torch",
        )  # fmt: skip
    assert largest.elements == vocabulary * width  # the gradient of the weight


@pytest.mark.slow
def test_a_call_and_its_gradients_allocate_nothing_larger_than_the_head() -> None:
    case = Case(64, 1200, torch.float32)
    case.targets = torch.stack([one[0] if len(one) else one.new_tensor(3) for one in case.allowed])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        found = token_logprobs(
            *case.inputs,
            entropy=True,
            bias=case.bias,
            softcap=9.0,
            support=case.support,
            temperature=case.temperature,
            keep_logits=0,
        )
        gradients(found, case)
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    assert len(events) > 1000
    assert max(one.nbytes() for one in events) == case.weight.nbytes < 64 * 1200


@pytest.mark.parametrize(("whole", "keep"), [(True, 0), (True, 10**6), (False, 10**6)])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_the_ops_keep_the_contract_of_torch(
    options: str, whole: bool, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_statistics, "TILE_BYTES", {"cpu": 3 * 21 * 8})
    case = Case(3, 42)  # 3 x 21 logits and an entry for pairs: kept tiles have no gaps
    temperature, bias, softcap = (None, None, 0.0)
    if options == "all":
        temperature, bias, softcap = case.temperature, case.bias, 1.5
    boundaries, tokens = case.support
    turned = case.weight.detach().T.contiguous().T.requires_grad_()  # as of an embedding [H, V]
    head = case.hidden, turned, bias, case.rows, temperature
    arguments = (*head, boundaries, tokens, softcap, whole, True, "torch")
    torch.library.opcheck(torch.ops.trajpack.logit_statistics, (*arguments, keep))
    found = torch.ops.trajpack.logit_statistics(*arguments, keep)
    rates = torch.stack((*found[:2], *found[:2])).detach()
    needs = [True, True, bias is not None]
    constants = [one.detach() if isinstance(one, torch.Tensor) else one for one in arguments]
    torch.library.opcheck(
        torch.ops.trajpack.logit_gradients, (*constants, rates, found[2].detach(), found[3], needs)
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_other_kinds_of_gradients_are_refused() -> None:
    case = Case()
    rest, given = case.inputs[1:], case.hidden.detach()

    def call(hidden: torch.Tensor) -> torch.Tensor:
        return token_logprobs(hidden, *rest).sum()

    with pytest.raises(RuntimeError, match="token_logprobs: has gradients in reverse mode"):
        torch.func.jvp(call, (given,), (given,))
    with pytest.raises(RuntimeError, match="functorch"):  # torch's own words
        torch.func.grad(call)(given)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="not in forward mode"):
        call(forward_ad.make_dual(given, given))
    (grad,) = torch.autograd.grad(call(case.hidden), case.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("keep", [None, 500, 10**6])
def test_a_caller_is_compiled(keep: int | None) -> None:
    case = Case(6, 20, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def loss(hidden, weight, rows, targets):
        logprobs, entropies = token_logprobs(
            hidden, weight, rows, targets, entropy=True, keep_logits=keep, impl="torch"
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
    "another dtype": ({"weight": torch.zeros(50, 6)}, "float64 as hidden, got float32; conv"),
    "another width": ({"weight": torch.zeros(50, 5).double()}, "weight must have shape"),
    "no vocabulary": ({"weight": torch.zeros(0, 6).double()}, "at least one token"),
    "no tensor": ({"weight": 3}, "weight must be a tensor, got int"),
    "float rows": ({"rows": torch.zeros(9)}, "rows must be int32 or int64"),
    "a row outside": ({"rows": torch.full((9,), 7)}, r"rows must be in \[0, 7\)"),
    "too few targets": ({"targets": torch.zeros(8).long()}, "targets must have one entry"),
    "a target outside": ({"targets": torch.full((9,), 50)}, r"targets must be in \[0, 50\)"),
    "a bias of another size": ({"bias": torch.zeros(49).double()}, "bias must have one entry"),
    "temperature 0": ({"temperature": 0.0}, r"temperature must be above 1\.17549e-38"),
    "a temperature that float32 has not": ({"temperature": 1e-46}, "got 1e-46"),
    "a temperature 0 of a row": (
        {"temperature": torch.tensor([1.0] * 4 + [0.0] + [1.0] * 4)}, "above 1.* row 4 has 0"
    ),
    "negative temperatures": ({"temperature": -torch.ones(9)}, "above 1.* row 0 has -1"),
    "a temperature of no dimension": ({"temperature": torch.tensor(1.0)}, "temperature must have"),
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
        "distinct in support, row 1 has 1 twice",
    ),
    "targets in a list": ({"targets": [1, 2, 3]}, "targets must be boundaries and tokens, got l"),
    "a support that is no pair": ({"support": 3}, "support must be boundaries and tokens, got int"),
    "a group that is none": ({"group": 2}, "group must be a torch.*ProcessGroup, got int"),
    "negative bytes": ({"keep_logits": -1}, "keep_logits must not be negative, got -1"),
    "another impl": ({"impl": "cuda"}, "impl must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    case = Case()
    change, message = WRONG[name]
    given = dict(zip(("hidden", "weight", "rows", "targets"), case.inputs, strict=True)) | change
    with pytest.raises((TypeError, ValueError), match=message):
        token_logprobs(**given)

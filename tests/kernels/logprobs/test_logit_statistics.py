"""`logit_statistics`: tiles against all logits at once, and the kernels against their reference."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from trajpack.kernels.logprobs import logit_statistics as module
from trajpack.kernels.logprobs.logit_statistics import gradients, statistics
from trajpack.kernels.logprobs.pair_logits import Logits, Pairs, pair_gradients, pair_logits


class Case(NamedTuple):
    """Rows of logits and pairs of them, of any dtype."""

    logits: Logits
    pairs: Pairs

    def run(self, impl: str = "torch", *, with_mean: bool = True) -> list[torch.Tensor]:
        """Return statistics, and gradients of a random sum of them."""
        found = statistics(*self, with_mean=with_mean, impl=impl)
        random = torch.Generator().manual_seed(1)
        rates = [torch.randn(one.shape, generator=random, dtype=one.dtype) for one in found]
        if not with_mean:
            rates[1].zero_()
        needs = [True, True, self.logits.bias is not None]
        grads = gradients(
            *self, torch.stack((*rates[:2], *found[:2])), rates[2],
            needs=needs, with_mean=with_mean, impl=impl,
        )  # fmt: skip
        return [*found, *(grad for grad in grads if grad is not None)]


def case(
    num_rows: int = 9, vocabulary: int = 50, *, dtype: torch.dtype = torch.float32, seed: int = 0,
    width: int = 8, softcap: float = 0.0, temperature: bool = False, bias: bool = False,
) -> Case:  # fmt: skip
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    temperatures = torch.rand(num_rows, generator=random) + 0.5 if temperature else None
    logits = Logits(
        normal(11, width), normal(vocabulary, width), normal(vocabulary) if bias else None,
        torch.randint(0, 11, (num_rows,), generator=random), temperatures, softcap,
    )  # fmt: skip
    lengths = torch.arange(num_rows) % 4  # none, one and several
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    several = [torch.randperm(vocabulary, generator=random)[:length] for length in lengths]
    tokens = torch.cat(several)
    tokens[::5] = torch.tensor([-3, vocabulary])[torch.arange(len(tokens[::5])) % 2]  # elsewhere
    return Case(logits, Pairs(boundaries, tokens))


OPTIONS: list[dict[str, Any]] = [{}, {"bias": True, "temperature": True}, {"softcap": 2.0}]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", {"cpu": 4})
    monkeypatch.setattr(module, "TILE_BYTES", {"cpu": 256})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_equal_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    one = case(5, 1100, dtype=dtype, **options)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float64: 1e-12}[dtype]
    if options.get("softcap"):
        tolerance *= 3
    for found, expected in zip(one.run("triton"), one.run("torch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocabulary", [50, 64, 200, 256, 1000])
def test_rows_of_tiles_begin_and_end_on_a_multiple(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE_BYTES", {"cpu": 5 * 128 * 4})
    logits = case(5, vocabulary).logits
    tiles = module.tiles_of(logits, logits.hidden.index_select(0, logits.rows), 32)
    columns = [tile.columns for tile in tiles]
    assert [one.start for one in columns[1:]] == [one.stop for one in columns[:-1]]
    assert (columns[0].start, columns[-1].stop) == (0, vocabulary)
    assert all((one.stop - one.start) % 32 == 0 for one in columns[:-1])
    assert all(one.stop - one.start <= 128 for one in columns)


def test_fewer_rows_have_more_columns_and_parts_are_even() -> None:
    hidden = torch.empty(0, 6)
    cuts = [module.Cut.of(hidden, rows, 152_000, 1) for rows in (0, 1, 16, 512, 513, 1400)]
    assert [one[:2] for one in cuts] == [
        (1, 152_000), (1, 152_000), (16, 76_000), (512, 4_000), (257, 8_000), (467, 4_471),
    ]  # fmt: skip


def test_kernels_take_more_pairs_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_BYTES", {"cpu": 3 * 1024 * 4})  # a row has some in each tile
    one = case(3, 2000)
    tokens = torch.randperm(2000, generator=torch.Generator().manual_seed(2))[:450]
    one = one._replace(pairs=Pairs(torch.tensor([0, 300, 301, 450]).int(), tokens))
    for found, expected in zip(one.run("triton"), one.run("torch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_pairs_alone_have_the_logits_and_gradients_of_tiles(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajpack.kernels.logprobs.pair_logits.CHUNK_BYTES", {"cpu": 5 * 4 * 8})
    monkeypatch.setattr("trajpack.kernels.logprobs.pair_logits.TOTAL_BYTES", 3 * 4 * 50)
    one = case(13, 50, dtype=dtype, bias=bias)
    picked = statistics(*one, with_mean=False, impl="torch")[2]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(pair_logits(*one), picked, rtol=tolerance, atol=tolerance)
    of_picked, needs = torch.randn(picked.shape, dtype=picked.dtype), [True, True, bias]
    rates = torch.zeros(4, 13, dtype=torch.float64)
    expected = gradients(*one, rates, of_picked, needs=needs, with_mean=False, impl="torch")
    for found, wanted in zip(pair_gradients(*one, of_picked, needs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_a_pair_at_the_first_column_of_the_next_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_BYTES", {"cpu": 3 * 1024 * 4})
    pairs = Pairs(torch.tensor([0, 2, 4, 5]).int(), torch.tensor([1024, 0, 1023, 1024, 2047]))
    one = case(3, 2048)._replace(pairs=pairs)
    for found, expected in zip(one.run("triton"), one.run("torch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_logits_of_minus_infinity_have_no_gradient() -> None:
    one = case(5, 1100, bias=True)
    assert one.logits.bias is not None
    one.logits.bias[3:30] = -math.inf
    for found, expected in zip(one.run("triton"), one.run("torch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)

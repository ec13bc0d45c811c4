"""`call_op`: the dispatcher takes part where it has something to do, and in no other call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trajpack.kernels import dispatch
from trajpack.kernels.dispatch import call_op
from trajpack.testing import boundaries

ENDS = boundaries([2, 3])


class Subclass(torch.Tensor):
    """A tensor that others may treat in their own way."""


class Mode(TorchDispatchMode):
    """Sees each operation."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return function(*arguments, **(options or {}))


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that went through torch's dispatcher."""
    names: list[str] = []

    class Namespace:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            names.append(name)
            op: Callable[..., Any] = getattr(torch.ops.trajpack, name)
            return op

    class Torch:
        class ops:
            trajpack = Namespace()

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(dispatch, "torch", Torch())
    return names


def reduce(x: torch.Tensor) -> Any:
    return call_op("segment_reduce", x, ENDS, None, "sum", "torch", None)


def test_a_plain_call_goes_to_the_implementation(dispatched: list[str]) -> None:
    plain = torch.arange(5.0)
    kept = torch.nn.Parameter(plain.clone())
    assert reduce(plain).tolist() == [1.0, 9.0]
    assert reduce(kept.detach()).tolist() == [1.0, 9.0]
    with torch.no_grad():
        assert reduce(kept).tolist() == [1.0, 9.0]
    with torch.inference_mode():
        assert reduce(plain).tolist() == [1.0, 9.0]
    assert not dispatched


def with_gradient() -> Any:
    return reduce(torch.arange(5.0).requires_grad_())


def on_meta() -> Any:
    return reduce(torch.zeros(5, device="meta"))


def of_a_subclass() -> Any:
    return reduce(torch.arange(5.0).as_subclass(Subclass))


def of_a_negated_view() -> Any:
    imaginary = torch.complex(torch.zeros(5), -torch.arange(5.0)).conj().imag
    assert imaginary.is_neg()
    found = reduce(imaginary)
    assert found.tolist() == [1.0, 9.0]
    return found


def in_a_list() -> Any:
    given = [torch.zeros(5, device="meta")]
    table = torch.zeros(3, 3, dtype=torch.int32, device="meta")
    units = [4, 1, 0, 0]
    assert dispatch._concern_dispatcher((given, table, units))
    return reduce(given[0])


def in_a_mode() -> Any:
    with Mode():
        return reduce(torch.arange(5.0))


def faked() -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return reduce(mode.from_tensor(torch.arange(5.0)))


def with_a_tangent() -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        return reduce(torch.arange(5.0))


def profiled() -> Any:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        result = reduce(torch.arange(5.0))
    assert any(event.name == "trajpack::segment_reduce" for event in found.events())
    return result


def by_default_device() -> Any:
    with torch.device("cpu"):  # a mode over torch's functions
        return reduce(torch.arange(5.0))


@pytest.mark.parametrize(
    "call",
    [
        with_gradient, on_meta, of_a_subclass, of_a_negated_view, in_a_list, in_a_mode, faked,
        with_a_tangent, profiled, by_default_device,
    ],
)  # fmt: skip
def test_where_torch_takes_part_it_does(call: Callable[[], Any], dispatched: list[str]) -> None:
    assert call().shape == (2,)
    assert dispatched == ["segment_reduce"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tracer_sees_an_op() -> None:
    traced = torch.jit.trace(reduce, torch.arange(5.0))
    assert "trajpack::segment_reduce" in str(traced.graph)


def test_under_transforms_no_gradient_is_lost(dispatched: list[str]) -> None:
    """Torch refuses them for ops with gradients of their own; a direct call would give zeros."""
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: reduce(x)[1])(torch.arange(5.0))
    assert dispatched == ["segment_reduce"]


def test_a_compiler_sees_an_op() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    found = torch.compile(reduce, backend=backend, fullgraph=True)(torch.arange(5.0))
    assert found.tolist() == [1.0, 9.0]
    assert any("segment_reduce" in name for name in seen), seen


def test_under_vmap_torch_takes_part(dispatched: list[str]) -> None:
    """No argument says so: a tensor that is mapped is a plain one."""
    found = torch.func.vmap(reduce)(torch.arange(10.0).view(2, 5))
    assert found.tolist() == [[1.0, 9.0], [11.0, 24.0]]
    assert dispatched[0] == "segment_reduce"


@pytest.mark.parametrize("odd", [
    torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2).to_sparse(),
    torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta"),
])  # fmt: skip
def test_odd_tensors_are_noticed_in_lists_too(odd: torch.Tensor) -> None:
    plain = torch.zeros(2)
    assert not dispatch._concern_dispatcher((plain, [plain, plain], 1, None))
    for arguments in ((plain, odd), ([plain, odd], plain, 1), ((odd,), None)):
        assert dispatch._concern_dispatcher(arguments)

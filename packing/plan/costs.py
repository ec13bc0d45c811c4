"""Cost of a sequence for a model: floating-point operations by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trajpack.packing.plan.request import read_lengths
from trajpack.packing.plan.units import Floats


@dataclass(frozen=True)
class TransformerCost:
    """Floating-point operations of a forward pass over n tokens: ``linear * n + quadratic * n**2``.

    A training step is about three forward passes for every sequence alike, so plans do not change
    with it.

    Args:
        linear: Operations of a token at any position: two for each weight that it meets.
        quadratic: Operations of attention, over n²: ``2 * layers * heads * head_dim`` where each
            token attends to all earlier ones.

    Example:
        >>> TransformerCost(linear=100.0, quadratic=1.0)([10, 100])
        array([ 1100., 20000.])
    """

    linear: float
    quadratic: float

    def __call__(self, lengths: Any) -> Floats:
        """Return the cost of each length, float64."""
        count = read_lengths("TransformerCost", lengths).astype(float)
        return self.linear * count + self.quadratic * count**2

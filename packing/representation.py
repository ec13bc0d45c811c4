"""What classes of large values say of themselves: ``repr``, ``dir``, and of a name they lack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_NUMBERS, _OTHERS, _CHARS = 6, 2, 60
"""Numbers, other entries and characters that are shown at most."""
INTERNAL = frozenset(("chains", "host_lengths", "host_values", "moved", "tables", "value_counts"))
"""Attributes without an underscore that are read by this library alone."""
CALLED = {
    "attention_mask": "model_inputs(), which has what keeps sequences apart",
    "response_mask": "loss_mask",
    "completion_mask": "loss_mask",
    "narrow": "with_loss_mask",
    "rewards": "turn_rewards",
    "old_log_probs": "rollout_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "old_per_token_logps": "rollout_logprobs",
}
"""Names of other libraries and of earlier versions, and what their values are called here."""


def brief_repr(self: Any) -> str:
    """Return the class and the fields that differ from their defaults, long values cut short.

    It serves as ``__repr__`` of a dataclass or a named tuple: ``__repr__ = brief_repr``. Of an
    object in a field only the first field is shown. Values on a device are not read.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> Turn([*range(5000)], [7], [-0.5], reward=1.0)
        Turn(prompt_ids=[0, 1, 2, 3, 4, 5, ... (5,000)], completion_ids=[7], \
completion_logprobs=[-0.5], reward=1.0)
        >>> Trajectory("a", [Turn([1], [7], [-0.5])] * 9)
        Trajectory(id='a', turns=(Turn(prompt_ids=[1], ...), Turn(prompt_ids=[1], ...), ... (9)))
    """
    shown = [f"{name}={_brief(value)}" for name, value in _told(self)]
    return f"{type(self).__name__}({', '.join(shown)})"


def public_names(self: Any) -> list[str]:
    """Return the names that users need; it serves as ``__dir__``, which completion reads.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory("a", [Turn([1], [2], [-0.5])])])
        >>> [name for name in dir(batch) if name.startswith(("_", "h", "ta", "va"))]
        ['task_ids']
    """
    return [name for name in object.__dir__(self) if name[0] != "_" and name not in INTERNAL]


def missing_attribute(self: Any, name: str) -> None:
    """Raise for a name that the object lacks, and say how it is called here.

    It serves as ``__getattr__``, which is called only where there is no such attribute.

    Raises:
        AttributeError: Always.
    """
    words = f"{type(self).__name__!r} object has no attribute {name!r}"
    ours, hint = CALLED.get(name, ""), ""
    if ours:
        is_here = hasattr(self, ours.partition("(")[0])
        hint = f"; it is called {ours}{'' if is_here else ' and is in the packed batch'}"
    raise AttributeError(words + hint, name=name, obj=self)


def _told(owner: Any) -> list[tuple[str, Any]]:
    """Return the fields that a repr shows: those without a default, and those that differ."""
    if dataclasses.is_dataclass(owner):
        named = [(one.name, one.default) for one in dataclasses.fields(owner) if one.repr]
    else:
        defaults = owner._field_defaults
        named = [(name, defaults.get(name, dataclasses.MISSING)) for name in owner._fields]
    values = [(name, getattr(owner, name), default) for name, default in named]
    return [(name, value) for name, value, default in values if not _is_same(value, default)]


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _brief(value: Any) -> str:
    if dataclasses.is_dataclass(value) or hasattr(value, "_field_defaults"):
        told = _told(value)
        first = [f"{name}={_brief(one)}" for name, one in told[:1]]
        return f"{type(value).__name__}({', '.join([*first, *['...'] * (len(told) > 1)])})"
    if isinstance(value, np.ndarray | torch.Tensor):
        return _brief_array(value)
    if isinstance(value, Mapping):
        items = [f"{_brief(key)}: {_brief(one)}" for key, one in list(value.items())[:_OTHERS]]
        return f"{{{_joined(items, len(value))}}}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        are_numbers = all(isinstance(one, int | float) for one in value[:_OTHERS])
        shown = [_brief(one) for one in value[: _NUMBERS if are_numbers else _OTHERS]]
        return ("({})" if isinstance(value, tuple) else "[{}]").format(_joined(shown, len(value)))
    if isinstance(value, str | bytes) and len(value) > _CHARS:
        return f"{value[:_CHARS]!r}... ({len(value):,})"
    text = repr(value)
    return text if len(text) <= 2 * _CHARS else f"<{type(value).__name__}>"


def _brief_array(value: Any) -> str:
    kind, is_host = type(value).__name__.lower(), str(getattr(value, "device", "cpu")) == "cpu"
    if value.ndim != 1 or not is_host:
        return f"<{kind} {list(value.shape)}{'' if is_host else f' on {value.device}'}>"
    shown = [str(one) for one in value[:_NUMBERS].tolist()]
    return f"{kind}([{_joined(shown, len(value))}])"


def _joined(shown: list[str], total: int) -> str:
    return ", ".join([*shown, *[f"... ({total:,})"] * (total > len(shown))])

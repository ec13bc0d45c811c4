from __future__ import annotations

import pytest

from trajpack.agent.protocols import SamplingParams


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_new_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_sampling_out_of_range_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be .*, got {value}"):
        SamplingParams(**{option: value})  # type: ignore[arg-type]

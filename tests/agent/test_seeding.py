from typing import Any

import numpy as np
import pytest

from trajpack.agent.seeding import derive_seed


def test_seeds_are_the_same_everywhere_and_for_ever() -> None:
    assert derive_seed(0) == 900637085
    assert derive_seed(0, "q@0", 1) == 288392768
    assert derive_seed(7, "gsm8k-7@2", 1) == derive_seed(np.int64(7), "gsm8k-7@2", np.int32(1))


def test_other_names_have_other_seeds() -> None:
    names = [("a", "bc"), ("ab", "c"), ("abc",), ("1",), (1,), (11,), (1, 1), ("é",), ("\ud800",)]
    seeds = [derive_seed(seed, *rest) for seed in (0, 1, -1, 2**70) for rest in names]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("part", [1.0, None, b"a"])
def test_a_name_that_is_none_is_refused(part: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        derive_seed(0, part)

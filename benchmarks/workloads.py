"""Named, seeded workloads."""

import numpy as np

from trajpack.testing import random_trajectory


def multi_turn(num_trajectories=256, num_turns=5, seed=0):
    """Conversations of chat length; 256 of 5 turns are about 4.3 M tokens as turns."""
    generator = np.random.default_rng(seed)
    return [
        random_trajectory(
            generator,
            str(index),
            num_turns=num_turns,
            prompt=(100, 1200),
            completion=(200, 1000),
        )
        for index in range(num_trajectories)
    ]

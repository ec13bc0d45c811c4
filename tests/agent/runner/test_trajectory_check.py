import asyncio

from trajpack.agent.runner.trajectory_check import check_trajectories
from trajpack.packing.types import Trajectory, Turn


def test_many_short_turns_are_checked_beside_the_event_loop() -> None:
    turns = [Turn([1, 2, 3], [4, 5], [-1.0, -1.0]) for _ in range(5000)]

    async def body() -> int:
        checking = asyncio.create_task(check_trajectories([Trajectory("long", turns)]))
        rounds = 0
        while not checking.done():
            await asyncio.sleep(0)
            rounds += 1
        await checking
        return rounds

    assert asyncio.run(body()) > 3

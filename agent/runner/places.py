"""Where the episodes of a run are: how many are attempted, and how many are kept in mind."""

from __future__ import annotations

import asyncio

from trajpack.agent.runner.ticket import Ticket


class Places:
    """Slots for attempts, and a room twice as large.

    An episode holds a slot during an attempt, and a place in the room from its beginning until its
    result is taken. So failed episodes that wait for their next attempt, and results that nobody
    takes, stop new ones.

    Args:
        concurrency: Attempts at the same time.
    """

    def __init__(self, concurrency: int) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        """One for each attempt; to be waited for, and taken by `take_slot`."""
        self.room = asyncio.Semaphore(2 * concurrency)
        """One place for each episode; taken by `take_place`."""

    async def take_place(self, ticket: Ticket) -> None:
        """Wait for a place in the room, unless the ticket has one."""
        if not ticket.has_place:
            await self.room.acquire()
            ticket.has_place = True

    async def take_slot(self, ticket: Ticket) -> None:
        """Wait for a slot, unless the ticket has one."""
        if not ticket.has_slot:
            await self.slots.acquire()
            ticket.has_slot = True

    def leave_place(self, ticket: Ticket) -> None:
        """Give the place in the room back, if the ticket has one."""
        if ticket.has_place:
            ticket.has_place = False
            self.room.release()

    def leave_slot(self, ticket: Ticket) -> None:
        """Give the slot back, if the ticket has one."""
        if ticket.has_slot:
            ticket.has_slot = False
            self.slots.release()

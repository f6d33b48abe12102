"""Owned queues: what a rebalance has to do, and revocation."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from skylark.client.assignment import LOCK_VALID_MS, Assignment, Assignments
from skylark.wire.bodies import MessageQueue


def queue(number: int, topic: str = "t") -> MessageQueue:
    return MessageQueue("broker-a", number, topic)


@given(st.lists(st.sets(st.integers(0, 6)), max_size=8))
def test_whatever_is_wanted_in_turn_is_owned_in_the_end(rounds: list[set[int]]) -> None:
    async def main() -> None:
        assignments = Assignments()
        other = Assignment(queue(0, "other"), 0)
        assignments.add(other)
        for wanted in rounds:
            lost, gained = assignments.plan("t", [queue(number) for number in wanted])
            for assignment in lost:
                assert assignments.begin_leaving(assignment)
                assert not assignments.begin_leaving(assignment)
                assert assignment.revoked
                assert not assignment.ended
                assignments.finish_leaving(assignment)
                assert assignment.ended
            for each in gained:
                assignments.add(Assignment(each, 0))
            assert assignments.of_topic("t") == {queue(number) for number in wanted}
            assert assignments.get(queue(0, "other")) is other

    asyncio.run(main())


def test_a_queue_on_its_way_out_is_not_taken_again_before_it_is_gone() -> None:
    async def main() -> None:
        assignments = Assignments()
        assignments.add(Assignment(queue(1), 0))
        [leaving], _ = assignments.plan("t", [])
        assignments.begin_leaving(leaving)
        assert assignments.plan("t", [queue(1)]) == ([], [])
        assignments.finish_leaving(leaving)
        assert assignments.plan("t", [queue(1)]) == ([], [queue(1)])

    asyncio.run(main())


def test_revocation_lets_a_running_listener_finish() -> None:
    async def main() -> None:
        assignment = Assignment(queue(1), 0)
        begun, go_on, steps = asyncio.Event(), asyncio.Event(), []

        async def work() -> None:
            with assignment.working():
                begun.set()
                await go_on.wait()
                steps.append("finished")

        assignment.start_consuming(asyncio.create_task(work()))
        await begun.wait()
        assignment.revoke()
        assert not await assignment.wait_idle(0)
        go_on.set()
        assert await assignment.wait_idle(10)
        assert steps == ["finished"]

    asyncio.run(main())


def test_cancelling_stops_a_running_listener_too() -> None:
    async def main() -> None:
        assignment = Assignment(queue(1), 0)
        begun = asyncio.Event()

        async def work() -> None:
            with assignment.working():
                begun.set()
                await asyncio.Event().wait()

        assignment.start_consuming(asyncio.create_task(work()))
        await begun.wait()
        await assignment.cancel()
        assert assignment.ended
        assert await assignment.wait_idle(10)

    asyncio.run(main())


def test_a_lock_is_relied_on_for_half_a_minute() -> None:
    async def main() -> None:
        assignment = Assignment(queue(1), 0)
        assert not assignment.is_locked(0)
        assignment.locked_at_ms = 1_000
        assert assignment.is_locked(1_000 + LOCK_VALID_MS)
        assert not assignment.is_locked(1_001 + LOCK_VALID_MS)

    asyncio.run(main())

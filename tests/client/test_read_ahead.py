"""What was read ahead, against a plain model of it: order, counts, and what may be committed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.client.message import Message, MessageQueue
from skylark.client.pulling import Limits
from skylark.client.read_ahead import Hand, Owned, ReadAhead
from skylark.client.subscriptions import build_subscription

QUEUES = [MessageQueue("broker-a", number, "orders") for number in range(3)]
WANTED = build_subscription("orders", version=1)


def messages(queue: MessageQueue, start: int, count: int) -> list[Message]:
    return [
        Message(topic="orders", body=b"x", queue_id=queue.queue_id, queue_offset=offset)
        for offset in range(start, start + count)
    ]


@pytest.fixture
def ahead() -> ReadAhead:
    ahead = ReadAhead(Limits(messages=10), 15)
    for queue in QUEUES:
        owned = Owned(queue, WANTED)
        owned.begin_at(0)
        ahead.add(owned)
    return ahead


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("skip"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("take"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("settle"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pause"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("resume"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("seek"), st.integers(0, 2), st.integers(0, 50)),
    ),
    max_size=60,
)


@given(steps)
def test_messages_come_once_and_in_order_and_only_what_is_done_is_told(script: list[tuple[str, int, int]]) -> None:
    ahead = ReadAhead(Limits(), 1000)
    expected: dict[int, list[int]] = {}
    hands: list[Hand] = []
    for queue in QUEUES:
        owned = Owned(queue, WANTED)
        owned.begin_at(0)
        ahead.add(owned)
        expected[queue.queue_id] = []
    for step, first, second in script:
        owned = ahead.owned[QUEUES[first % 3]]
        assert owned.next_pull is not None
        if step == "put":
            found = messages(owned.queue, owned.next_pull, second)
            expected[owned.queue.queue_id] += [message.queue_offset for message in found]
            ahead.put(owned, found, owned.next_pull + second)
        elif step == "skip":
            ahead.put(owned, [], owned.next_pull + second)
        elif step == "take":
            hand = ahead.take(first)
            if hand is not None:
                hands.append(hand)
                assert not hand.owned.is_paused
                for message in hand.messages:
                    assert expected[message.queue_id].pop(0) == message.queue_offset
        elif step in ("settle", "fail") and hands:
            hand = hands.pop(first % len(hands))
            if step == "fail":
                left = hand.unsettled()
                ahead.put_back(hand.owned, left)
                if not hand.owned.is_dropped:
                    known = expected[hand.owned.queue.queue_id]
                    known[:] = sorted(known + [message.queue_offset for message in left])
            hand.owned.hands.discard(hand)
        elif step == "pause":
            ahead.pause(owned)
        elif step == "resume":
            ahead.resume(owned)
        elif step == "seek":
            ahead.drop(owned)
            ahead.add(Owned(owned.queue, WANTED, second, owned.is_paused))
            expected[owned.queue.queue_id] = []
        for each in ahead.owned.values():
            assert each.done is not None
            assert each.position is not None
            assert each.next_pull is not None
            assert each.done <= each.position <= each.next_pull
            assert each.waiting_bytes == len(each.waiting)
            in_hand = [message.queue_offset for hand in each.hands for message in hand.messages]
            assert each.done <= min([*in_hand, *(message.queue_offset for message in each.waiting), each.next_pull])
        assert ahead._count == sum(len(each.waiting) for each in ahead.owned.values() if not each.is_paused)
    assert ahead.is_ready == any(each.waiting and not each.is_paused for each in ahead.owned.values())


def test_a_full_queue_waits_until_something_is_taken(ahead: ReadAhead) -> None:
    async def main() -> None:
        owned = ahead.owned[QUEUES[0]]
        await ahead.wait_for_room(owned)
        ahead.put(owned, messages(owned.queue, 0, 10), 10)
        waiting = asyncio.create_task(ahead.wait_for_room(owned))
        await asyncio.sleep(0)
        assert not waiting.done()
        ahead.take(1)
        await waiting

    asyncio.run(main())


def test_all_queues_wait_while_too_much_is_there(ahead: ReadAhead) -> None:
    async def main() -> None:
        first, second, third = ahead.owned.values()
        ahead.put(first, messages(first.queue, 0, 8), 8)
        ahead.put(second, messages(second.queue, 0, 8), 8)
        waiting = asyncio.create_task(ahead.wait_for_room(third))
        await asyncio.sleep(0)
        assert not waiting.done()
        ahead.drop(first)
        await waiting

    asyncio.run(main())


def test_a_paused_queue_is_not_read(ahead: ReadAhead) -> None:
    async def main() -> None:
        owned = ahead.owned[QUEUES[0]]
        ahead.pause(owned)
        waiting = asyncio.create_task(ahead.wait_for_room(owned))
        await asyncio.sleep(0)
        assert not waiting.done()
        ahead.resume(owned)
        await waiting

    asyncio.run(main())


def test_what_waits_in_paused_queues_does_not_stop_the_others(ahead: ReadAhead) -> None:
    async def main() -> None:
        first, second, third = ahead.owned.values()
        ahead.put(first, messages(first.queue, 0, 8), 8)
        ahead.put(second, messages(second.queue, 0, 8), 8)
        waiting = asyncio.create_task(ahead.wait_for_room(third))
        await asyncio.sleep(0)
        assert not waiting.done()
        ahead.pause(first)
        ahead.pause(second)
        await waiting
        ahead.resume(first)
        ahead.resume(second)
        assert [hand.owned for _ in range(2) if (hand := ahead.take(9))] == [first, second]

    asyncio.run(main())


def test_what_a_thread_has_not_looked_at_is_taken_back_once(ahead: ReadAhead) -> None:
    owned = ahead.owned[QUEUES[0]]
    ahead.put(owned, messages(owned.queue, 0, 6), 6)
    hand = ahead.take(6)
    assert hand is not None
    hand.deal()
    assert (owned.done, owned.next_offset) == (0, 0)
    for _ in range(2):
        hand.current = hand.rest.popleft()
    assert (owned.done, owned.next_offset) == (1, 2)
    ahead.pause(owned)
    assert not hand.rest
    assert (owned.done, owned.position, len(owned.waiting)) == (1, 2, 4)
    ahead.resume(owned)
    again = ahead.take(6)
    assert again is not None
    assert [message.queue_offset for message in again.messages] == [2, 3, 4, 5]
    assert owned.done == 1


def test_another_filter_begins_where_nobody_has_looked(ahead: ReadAhead) -> None:
    owned = ahead.owned[QUEUES[0]]
    ahead.put(owned, messages(owned.queue, 0, 6), 6)
    hand = ahead.take(4)
    assert hand is not None
    hand.deal()
    hand.current = hand.rest.popleft()
    heir = ahead.succeed(owned, WANTED)
    assert (heir.position, heir.done, hand.owned) == (1, 0, heir)
    assert not hand.rest
    assert ahead._count == 0
    heir.hands.discard(hand)
    assert heir.done == 1


def test_queues_take_turns(ahead: ReadAhead) -> None:
    for owned in ahead.owned.values():
        ahead.put(owned, messages(owned.queue, 0, 2), 2)
    assert [hand.owned.queue.queue_id for _ in range(6) if (hand := ahead.take(1))] == [0, 1, 2, 0, 1, 2]
    assert ahead.take(1) is None


def test_a_message_that_comes_back_with_another_body_waits_again(ahead: ReadAhead) -> None:
    owned = ahead.owned[QUEUES[0]]
    ahead.put(owned, messages(QUEUES[0], 0, 2), 2)
    hand = ahead.take(1)
    assert hand is not None
    hand.messages[0].body = 5  # type: ignore[assignment]
    ahead.put_back(owned, hand.unsettled())
    again = ahead.take(2)
    assert again is not None
    assert [message.queue_offset for message in again.messages] == [0, 1]
    assert owned.waiting_bytes == 0

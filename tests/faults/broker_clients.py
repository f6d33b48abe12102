"""Clients of a broker whose power fails: each knows what it was told, and what the broker then must have."""

from __future__ import annotations

from collections import Counter
from typing import cast

import msgspec

from broker.pop_broker import HOST, Popped, popped
from faults.broker_life import LATER, LEVELS_MS, QUEUES, READERS, TOPIC, TRANSACTED, BrokerLife, Unanswered
from skylark.broker.halves import become_half
from skylark.net.connection import Connection
from skylark.wire import pop
from skylark.wire.bodies import Heartbeat, ProducerData
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CheckTransactionState, EndTransaction, UpdateConsumerOffset
from skylark.wire.message import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK, Message
from skylark.wire.records import decode_record
from skylark.wire.typed import decode_header

PRODUCERS = "producers"


class Sender:
    """Sends: each message is in its topic once."""

    def __init__(self, life: BrokerLife) -> None:
        self._life = life
        self._sent: Unanswered[bytes] = Unanswered()
        self.safe: set[bytes] = set()

    def use(self) -> None:
        life = self._life
        body = life.body()
        message = Message(TOPIC, life.chance.randrange(QUEUES), body, {"KEYS": body.decode()}, born_host=HOST)
        self._sent.add(life.put(message).log_end_offset, body)

    def answered(self, flushed: int) -> None:
        self.safe.update(self._sent.take(flushed))

    def cut(self) -> None:
        self._sent.forget()

    def opened(self) -> None:
        found = Counter(message.body for message in self._life.messages_of(TOPIC))
        assert self.safe <= found.keys(), f"lost: {self.safe - found.keys()}"
        assert not found or max(found.values()) == 1

    def look_for_all(self) -> None:
        pass


class Scheduler:
    """Sends what is to come later: it comes, and never early."""

    def __init__(self, life: BrokerLife) -> None:
        self._life = life
        self._sent: Unanswered[bytes] = Unanswered()
        self._safe: set[bytes] = set()
        self._due_ms: dict[bytes, int] = {}

    def use(self) -> None:
        life, chance = self._life, self._life.chance
        body = life.body()
        if chance.random() < 0.4:
            level = chance.randrange(len(LEVELS_MS))
            wait_ms, properties = LEVELS_MS[level], {"DELAY": str(level + 1)}
        else:
            wait_ms = chance.choice((1, 900, 2_000, 2_000, 15_000, 90_000, 250_000))
            properties = {"TIMER_DELIVER_MS": str(life.now_ms + wait_ms)}
        message = Message(LATER, chance.randrange(QUEUES), body, properties, born_host=HOST)
        self._due_ms[body] = life.now_ms + wait_ms
        self._sent.add(life.put(message).log_end_offset, body)

    def answered(self, flushed: int) -> None:
        self._safe.update(self._sent.take(flushed))

    def cut(self) -> None:
        self._sent.forget()

    def opened(self) -> None:
        self._come()

    def _come(self) -> set[bytes]:
        for message in self._life.messages_of(LATER):
            assert message.store_timestamp_ms >= self._due_ms[message.body], f"{message.body!r} came early"
        return {message.body for message in self._life.messages_of(LATER)}

    def look_for_all(self) -> None:
        life = self._life
        while life.now_ms < max(self._due_ms.values(), default=0):
            life.passes(30_000)
        life.passes(2_000)
        life.passes(1_000)
        missing = self._safe - self._come()
        assert not missing, f"never came: {missing}"


class Workers:
    """A group that pops: what it did not acknowledge comes back."""

    def __init__(self, life: BrokerLife, sender: Sender, group: str, *, order: bool) -> None:
        self._life = life
        self._sender = sender
        self._group = group
        self._order = order
        self._asked: Unanswered[list[Popped]] = Unanswered()
        self._hand: list[Popped] = []
        self._done: set[bytes] = set()

    def use(self) -> None:
        chance = self._life.chance
        what = chance.random()
        if not self._hand or what < 0.4:
            self._pop(chance.choice((1, 3, 8)), chance.choice((5_000, 20_000)))
        elif what < 0.9:
            self._acknowledge(self._hand.pop(chance.randrange(len(self._hand))))
        else:
            self._extend(self._hand.pop(chance.randrange(len(self._hand))), chance.choice((5_000, 20_000)))

    def _pop(self, most: int, invisible_ms: int) -> None:
        header = pop.PopMessage(self._group, TOPIC, -1, most, invisible_ms, 0, 0, pop.FROM_MIN, order=self._order)
        taken = popped(self._life.ask(RequestCode.POP_MESSAGE, header))
        if taken:
            self._asked.add(self._life.store.log_max_offset, taken)

    def _acknowledge(self, taken: Popped) -> None:
        if self._life.ask(RequestCode.ACK_MESSAGE, pop.AckMessage(*self._place(taken))).code == 0:
            self._done.add(taken.message.body)

    def _extend(self, taken: Popped, invisible_ms: int) -> None:
        header = pop.ChangeInvisibleTime(*self._place(taken), invisible_ms)
        answer = self._life.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        if answer.code == 0:
            renewed = msgspec.convert(answer.fields, pop.ChangeInvisibleTimeResponse, strict=False)
            again = Popped(taken.message, pop.renewed(taken.handle, renewed))
            self._asked.add(self._life.store.log_max_offset, [again])

    def _place(self, taken: Popped) -> tuple[str, str, int, str, int]:
        handle = taken.handle
        topic = pop.real_topic(TOPIC, self._group, handle.kind)
        return self._group, topic, handle.queue_id, handle.encode(), handle.offset

    def answered(self, flushed: int) -> None:
        for taken in self._asked.take(flushed):
            self._hand.extend(taken)

    def cut(self) -> None:
        self._asked.forget()
        if self._life.chance.random() < 0.5:
            self._hand.clear()

    def opened(self) -> None:
        """The queues are checked by their sender; here it is the offset."""
        broker = self._life.broker
        assert broker is not None
        for queue_id in range(QUEUES):
            offset = broker._offsets.query(self._group, TOPIC, queue_id)
            assert offset <= self._life.store.max_offset(TOPIC, queue_id)

    def look_for_all(self) -> None:
        life = self._life
        for _ in range(60):
            self._pop(32, 5_000)
            life.store.flush()
            self.answered(life.store.flushed_offset)
            while self._hand:
                self._acknowledge(self._hand.pop(0))
            if self._sender.safe <= self._done:
                return
            life.passes(3_000)
        raise AssertionError(f"{self._group} never got {self._sender.safe - self._done}")


class Reader:
    """A group that pulls: its offset stands behind what it read, and nothing else."""

    def __init__(self, life: BrokerLife) -> None:
        self._life = life
        self._read: dict[tuple[int, int], bytes] = {}

    def use(self) -> None:
        life = self._life
        queue_id = life.chance.randrange(QUEUES)
        offset = self._offset(queue_id)
        result = life.store.read(TOPIC, queue_id, offset, life.chance.randrange(1, 9))
        for message in map(decode_record, result.records):
            self._read[queue_id, message.queue_offset] = message.body
        if result.records:
            header = UpdateConsumerOffset(READERS, TOPIC, queue_id, result.next_offset)
            assert life.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header).code == 0

    def _offset(self, queue_id: int) -> int:
        assert self._life.broker is not None
        return max(0, self._life.broker._offsets.query(READERS, TOPIC, queue_id))

    def answered(self, flushed: int) -> None:
        pass

    def cut(self) -> None:
        pass

    def opened(self) -> None:
        for queue_id in range(QUEUES):
            offset = self._offset(queue_id)
            assert offset <= self._life.store.max_offset(TOPIC, queue_id)
            for message in self._life.messages(TOPIC, queue_id):
                read = self._read.get((queue_id, message.queue_offset))
                is_read = message.queue_offset >= offset or read == message.body
                assert is_read, f"the offset {offset} is ahead of what was read: {message.body!r}"

    def look_for_all(self) -> None:
        pass


class Half(msgspec.Struct):
    body: bytes
    is_to_commit: bool
    queue_offset: int
    log_offset: int


class Producer:
    """Prepares and ends transactions: each comes once, or never if it was rolled back or nobody ended it."""

    is_writable = True
    peer = ("127.0.0.1", 50_000)

    def __init__(self, life: BrokerLife) -> None:
        self._life = life
        self._prepared: Unanswered[Half] = Unanswered()
        self._ended: Unanswered[Half] = Unanswered()
        self._known: dict[bytes, Half] = {}
        self._open: dict[bytes, Half] = {}
        self._safe: dict[bytes, Half] = {}
        self._to_commit: dict[bytes, bool] = {}
        self._tried: set[bytes] = set()
        self._questions: list[tuple[CheckTransactionState, bytes]] = []

    def use(self) -> None:
        chance = self._life.chance
        if self._open and chance.random() < 0.5:
            self._end(self._open.pop(chance.choice(sorted(self._open))))
        else:
            self._prepare()

    def _prepare(self) -> None:
        life = self._life
        body = life.body()
        properties = {"UNIQ_KEY": body.decode(), "TRAN_MSG": "true", "PGROUP": PRODUCERS}
        message = Message(TRANSACTED, 0, body, properties, born_timestamp_ms=life.now_ms, born_host=HOST)
        become_half(message)
        stored = life.put(message)
        self._to_commit[body] = life.chance.random() < 0.6
        half = Half(body, self._to_commit[body], stored.queue_offset, stored.log_offset)
        self._prepared.add(stored.log_end_offset, half)

    def _end(self, half: Half, *, asked: bool = False) -> None:
        self._tried.add(half.body)
        what = SYS_TRANSACTION_COMMIT if half.is_to_commit else SYS_TRANSACTION_ROLLBACK
        key = half.body.decode()
        header = EndTransaction(PRODUCERS, half.queue_offset, half.log_offset, what, key, from_transaction_check=asked)
        answer = self._life.ask(RequestCode.END_TRANSACTION, header)
        assert answer.code == 0, answer.remark
        self._ended.add(self._life.store.log_max_offset, half)

    def notify(self, request: Frame, after_s: float = 0.0) -> None:
        """As the connection: the broker asks for the end of a transaction."""
        if request.code == RequestCode.CHECK_TRANSACTION_STATE:
            header = decode_header(CheckTransactionState, request)
            self._questions.append((header, decode_record(request.body).body))

    def answered(self, flushed: int) -> None:
        prepared = {half.body: half for half in self._prepared.take(flushed)}
        self._known.update(prepared)
        self._open.update(prepared)
        for half in self._ended.take(flushed):
            self._open.pop(half.body, None)
            self._safe[half.body] = half

    def cut(self) -> None:
        self._prepared.forget()
        self._questions.clear()
        for half in self._ended.forget():
            if half.body in self._known and half.body not in self._safe:
                self._open[half.body] = self._known[half.body]  # its end is to be told again

    def opened(self) -> None:
        broker = self._life.broker
        assert broker is not None
        beat = Heartbeat(client_id="c", producer_data_set=[ProducerData(group_name=PRODUCERS)])
        broker._clients.heartbeat(beat, cast(Connection, self), "JAVA", 500, self._life.now_ms)
        self._check()

    def _check(self) -> Counter[bytes]:
        found = Counter(message.body for message in self._life.messages_of(TRANSACTED))
        for body, count in found.items():
            assert count == 1, f"the transaction {body!r} came {count} times"
            assert body in self._tried, f"nobody ended {body!r}"
            assert self._to_commit[body], f"{body!r} was rolled back"
        for half in self._safe.values():
            assert found[half.body] == half.is_to_commit, f"{half} ended, and is there {found[half.body]} times"
        return found

    def look_for_all(self) -> None:
        life = self._life
        untold = {body for body in self._open if body not in self._tried}
        for _ in range(8):
            life.passes(31_000)
            for header, body in self._questions:
                untold.discard(body)
                half = Half(body, self._to_commit[body], header.tran_state_table_offset, header.commit_log_offset)
                self._end(half, asked=True)
            self._questions.clear()
        assert not untold, f"the broker never asked for {untold}"
        found = self._check()
        for half in self._open.values():
            assert found[half.body] == half.is_to_commit, f"{half} is there {found[half.body]} times"

"""Queue locks: never two holders at a time, whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.test_clients import FakeConnection
from skylark.broker.locks import MAX_LIVE_MS, Locks, handlers
from skylark.wire.bodies import LockedQueues, LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame

GROUPS = st.sampled_from(["g", "h"])
CLIENTS = st.sampled_from(["a", "b", "c"])
QUEUES = st.lists(st.sampled_from([MessageQueue("broker", i, "T") for i in range(4)]), unique=True)


class LockMachine(RuleBasedStateMachine):
    """The locks beside a list of who was told to hold what until when."""

    def __init__(self) -> None:
        super().__init__()
        self.locks = Locks()
        self.now_ms = 1_000
        self.holders: dict[tuple[str, MessageQueue], tuple[str, int]] = {}

    def holder(self, group: str, queue: MessageQueue) -> str | None:
        client, until_ms = self.holders.get((group, queue), (None, -1))
        return client if self.now_ms <= until_ms else None

    @rule(group=GROUPS, client=CLIENTS, queues=QUEUES)
    def lock(self, group: str, client: str, queues: list[MessageQueue]) -> None:
        expected = {queue for queue in queues if self.holder(group, queue) in (None, client)}
        assert self.locks.lock_batch(group, client, queues, self.now_ms) == expected
        for queue in expected:
            self.holders[group, queue] = client, self.now_ms + MAX_LIVE_MS

    @rule(group=GROUPS, client=CLIENTS, queues=QUEUES)
    def unlock(self, group: str, client: str, queues: list[MessageQueue]) -> None:
        self.locks.unlock_batch(group, client, queues)
        for queue in queues:
            if self.holders.get((group, queue), ("", 0))[0] == client:
                del self.holders[group, queue]

    @rule(passed_ms=st.integers(0, MAX_LIVE_MS + 1))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @invariant()
    def expiry_agrees(self) -> None:
        for group in ("g", "h"):
            is_held = any(self.holder(*key) for key in self.holders if key[0] == group)
            assert self.locks.all_expired(group, self.now_ms) == (not is_held)


TestLockMachine = LockMachine.TestCase


def queue(number: int) -> MessageQueue:
    return MessageQueue("broker", number, "T")


def test_a_full_table_makes_room_by_what_expired() -> None:
    locks = Locks(max_size_bytes=600)
    assert len(locks.lock_batch("g", "a", [queue(0), queue(1), queue(2)], now_ms=0)) == 2
    assert locks.lock_batch("h", "b", [queue(2)], now_ms=2_000) == set()
    assert locks.lock_batch("h", "b", [queue(2)], now_ms=MAX_LIVE_MS + 1) == {queue(2)}
    assert locks.lock_batch("h", "b", [queue(3), queue(4)], now_ms=MAX_LIVE_MS + 2) == {queue(3)}


def test_unlocking_leaves_nothing_behind() -> None:
    locks = Locks()
    locks.lock_batch("g", "a", [queue(0)], now_ms=0)
    locks.unlock_batch("g", "a", [queue(0)])
    assert locks.__dict__["_locks"] == {}


def test_requests() -> None:
    serve = handlers(Locks(), lambda: 5)
    peer = FakeConnection("c").as_connection

    def ask(code: RequestCode, client: str) -> Frame:
        body = encode_body(LockRequest(client_id=client, consumer_group="g", mq_set=[queue(0)]))
        answer = serve[code](Frame(code, body=body), peer)
        assert isinstance(answer, Frame)
        assert answer.code == 0
        return answer

    assert decode_body(LockedQueues, ask(RequestCode.LOCK_BATCH_MQ, "a").body).lock_ok_mq_set == [queue(0)]
    assert ask(RequestCode.LOCK_BATCH_MQ, "b").body == b'{"lockOKMQSet":[]}'
    assert ask(RequestCode.UNLOCK_BATCH_MQ, "a").body == b""
    assert decode_body(LockedQueues, ask(RequestCode.LOCK_BATCH_MQ, "b").body).lock_ok_mq_set == [queue(0)]


def test_who_leaves_its_group_gives_back_what_it_holds_there() -> None:
    locks = Locks()
    queues = [MessageQueue("broker", i, "T") for i in range(3)]
    locks.lock_batch("g", "a", queues[:2], 0)
    locks.lock_batch("g", "b", queues[2:], 0)
    locks.lock_batch("h", "a", queues[:1], 0)
    locks.release("g", "a")
    assert locks.lock_batch("g", "c", queues, 1) == set(queues[:2])
    assert locks.lock_batch("h", "c", queues[:1], 1) == set()

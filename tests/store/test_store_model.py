"""A store against plain lists: any order of appending, reading, flushing, cleaning, stopping and crashing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skylark.store import Store
from skylark.wire.message import Message
from skylark.wire.records import BatchPart, decode_record, encode_properties
from store.small_store import START_MS, finish_deleting, small_config

queues = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1))


class StoreMachine(RuleBasedStateMachine):
    """`self.queues` is what each queue must hold: the bodies by queue offset, None where retention took them."""

    @initialize()
    def begin(self) -> None:
        self.directory = Path(mkdtemp())
        self.generation = 0
        self.usage = 0.1
        self.now_ms = START_MS
        self.queues: dict[tuple[str, int], list[bytes | None]] = {}
        self.open(self.directory / "0")

    def open(self, root: Path) -> None:
        config = small_config(root, disk_usage=lambda path: self.usage, delete_batch_max=1, max_mapped_queue_files=3)
        self.store = Store.open(config)

    @rule(queue=queues, sizes=st.lists(st.integers(0, 600), min_size=1, max_size=4), half=st.booleans())
    def append(self, queue: tuple[str, int], sizes: list[int], half: bool) -> None:
        self.now_ms += 1
        topic, queue_id = queue
        expected = self.queues.setdefault(queue, [])
        bodies = [os.urandom(min(size, 350 if len(sizes) > 1 else size)) for size in sizes]
        batch = [BatchPart(0, body, encode_properties({"KEYS": body[:4].hex() or "none"})) for body in bodies]
        if half:
            self.store.append(Message(topic, queue_id, b"half", {}, sys_flag=4), self.now_ms)
        stored = self.store.append_batch(Message(topic, queue_id, b"", {}), batch, self.now_ms)
        assert stored.queue_offset == len(expected)
        expected += bodies

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def stop_and_start(self) -> None:
        root = self.store.config.root
        self.store.close()
        self.open(root)

    @rule()
    def crash(self) -> None:
        self.generation += 1
        root = self.directory / str(self.generation)
        finish_deleting(self.store)  # what is copied must not go meanwhile
        shutil.copytree(self.store.config.root, root)
        old = self.store
        self.open(root)
        old.close()
        shutil.rmtree(old.config.root)

    @rule()
    def lose_the_queues(self) -> None:
        root = self.store.config.root
        self.store.close()
        shutil.rmtree(root / "consumequeue")
        self.open(root)
        # A queue without messages in the log begins anew.
        for queue, bodies in self.queues.items():
            if bodies and all(body is None for body in bodies):
                bodies.clear()
            assert self.store.max_offset(*queue) == len(bodies)

    @precondition(lambda self: self.queues)
    @rule()
    def clean(self) -> None:
        self.store.flush()
        self.usage = 0.87
        self.store.clean(self.now_ms)
        self.usage = 0.1
        for queue, bodies in self.queues.items():
            gone = self.store.min_offset(*queue)
            bodies[:gone] = [None] * gone

    @rule(queue=queues, again=st.booleans())
    def delete_topic(self, queue: tuple[str, int], again: bool) -> None:
        self.store.delete_topic(queue[0])
        for key in [key for key in self.queues if key[0] == queue[0]]:
            del self.queues[key]
        for queue_id in (0, 1) if again else ():  # made again at once: its offsets begin at 0
            self.store.append(Message(queue[0], queue_id, b"new", {}), self.now_ms)
            self.queues[queue[0], queue_id] = [b"new"]

    @invariant()
    def queues_hold_what_they_must(self) -> None:
        if hasattr(self, "store"):
            assert {queue for queue in self.store.queues() if self.store.max_offset(*queue)} <= self.queues.keys()
        for (topic, queue_id), bodies in getattr(self, "queues", {}).items():
            low, high = self.store.min_offset(topic, queue_id), self.store.max_offset(topic, queue_id)
            assert high == len(bodies)
            assert low == sum(body is None for body in bodies)
            offset = low
            while offset < high:
                result = self.store.read(topic, queue_id, offset, 32)
                for record in result.records:
                    message = decode_record(record)
                    assert message.queue_offset == offset
                    assert message.body == bodies[offset]
                    offset += 1
                assert result.next_offset == offset

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.directory)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=25)

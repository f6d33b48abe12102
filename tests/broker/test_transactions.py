"""Transactions at a running broker: half messages, their end, and the broker's questions about those without one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from broker.followers import START_MS, Undecided
from broker.live import DEADLINE_S, Live, live_broker, messages_of
from broker.pop_broker import HOST
from skylark.broker.app import wall_clock_ms
from skylark.broker.halves import GROUP
from skylark.broker.topics import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_CHECK_TOPIC
from skylark.net.connection import Connection
from skylark.net.pool import Pool
from skylark.store import recovery
from skylark.wire.bodies import Heartbeat, ProducerData, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import LOG_OFFSET_POSITION, Message, StoredMessage
from skylark.wire.records import RECORD_HEADERS, decode_record, parse_message_id

COMMIT, ROLL_BACK, UNKNOWN = 8, 12, 0
OWNER = "owners"
QUICKLY = {"transactionTimeOut": 1, "transactionCheckInterval": 20}
"""Every undecided half is asked for, soon; those of the tests are a minute old."""
HALF = {"TRAN_MSG": "true", "PGROUP": OWNER, "TAGS": "a", "KEYS": "k"}


async def prepare(broker: Live, body: bytes = b"hello", **more: str) -> Frame:
    answer = await broker.send(
        "orders", body, HALF | more, queueId=2, sysFlag=4, flag=7, bornTimestamp=wall_clock_ms() - 60_000
    )
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer


async def end(broker: Live, half: Frame, decision: int, **more: object) -> Frame:
    return await broker.ask(RequestCode.END_TRANSACTION, **(end_fields(half, decision) | more))


def end_fields(half: Frame, decision: int) -> dict[str, object]:
    return {
        "producerGroup": OWNER,
        "tranStateTableOffset": half.fields["queueOffset"],
        "commitLogOffset": parse_message_id(half.fields["msgId"])[1],
        "commitOrRollback": decision,
        "msgId": half.fields["transactionId"],
        "topic": "orders",
    }


async def delivered(broker: Live, topic: str = "orders", queue_id: int = 2) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    while True:
        answer = await broker.pull(topic, len(found), queueId=queue_id)
        if answer.code != ResponseCode.SUCCESS:
            return found
        found += messages_of(answer)


async def bodies(broker: Live) -> list[bytes]:
    return [message.body for message in await delivered(broker)]


Questions = asyncio.Queue[tuple[Frame, StoredMessage]]


@asynccontextmanager
async def producer(broker: Live, group: str = OWNER) -> AsyncIterator[Questions]:
    """A connected member of the group, and what the broker asks it."""
    questions: Questions = asyncio.Queue()

    def asked(request: Frame, _: Connection) -> None:
        questions.put_nowait((request, decode_record(request.body)))

    pool = Pool({RequestCode.CHECK_TRANSACTION_STATE: asked})
    beat = Heartbeat(client_id=f"{group}@1", producer_data_set=[ProducerData(group_name=group)])
    await pool.request(broker.address, Frame(RequestCode.HEART_BEAT, {}, encode_body(beat)), DEADLINE_S)
    try:
        yield questions
    finally:
        pool.close()


def answer_to(question: Frame) -> dict[str, object]:
    fields = question.fields
    return {
        "tranStateTableOffset": fields["tranStateTableOffset"],
        "commitLogOffset": fields["commitLogOffset"],
        "fromTransactionCheck": True,
    }


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_commit_delivers_the_message_and_a_roll_back_does_not(tmp_path: Path, flush: str) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, flushDiskType=flush) as broker:
            first, second = await prepare(broker, b"yes", mine="kept"), await prepare(broker, b"no")
            assert (first.fields["queueId"], first.fields["queueOffset"]) == ("2", "0")
            assert second.fields["queueOffset"] == "1"
            assert await bodies(broker) == []
            assert (await end(broker, second, ROLL_BACK)).code == ResponseCode.SUCCESS
            assert (await end(broker, first, COMMIT)).code == ResponseCode.SUCCESS
            (message,) = await delivered(broker)
            _, half_offset = parse_message_id(first.fields["msgId"])
            assert (message.body, message.flag, message.sys_flag) == (b"yes", 7, COMMIT)
            assert message.prepared_transaction_offset == half_offset
            assert message.properties == {
                **HALF, "mine": "kept", "UNIQ_KEY": first.fields["transactionId"], "TRACE_ON": "true",
                "__transactionId__": first.fields["transactionId"], "MSG_REGION": "DefaultRegion",
                "CLUSTER": "DefaultCluster",
            }  # fmt: skip

    asyncio.run(run())


def test_halves_and_ops_lie_in_the_store_as_apache_writes_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionOpBatchInterval=10) as broker:
            halves = [await prepare(broker) for _ in range(3)]
            (half, _, _) = await delivered(broker, HALF_TOPIC, 0)
            assert (half.sys_flag, half.properties["REAL_TOPIC"], half.properties["REAL_QID"]) == (0, "orders", "2")
            for transaction in halves[:2]:
                await end(broker, transaction, COMMIT)
            await end(broker, halves[2], ROLL_BACK)
            await broker.until_found(OP_HALF_TOPIC)
            ops = await delivered(broker, OP_HALF_TOPIC, 0)
            assert b"".join(op.body for op in ops) == b"0,1,2,"
            assert all(op.properties == {"TAGS": "d", "WAIT": "true"} for op in ops)
            assert all(op.born_host == op.store_host for op in ops)

    asyncio.run(run())


def test_ops_of_commits_are_batched_and_bounded(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionOpBatchInterval=600_000, transactionOpMsgMaxSize=8) as broker:
            halves = [await prepare(broker) for _ in range(10)]
            for half in halves:
                await end(broker, half, COMMIT)
            assert [op.body for op in await delivered(broker, OP_HALF_TOPIC, 0)] == [b"0,1,2,3,", b"4,5,6,7,"]

    asyncio.run(run())


@pytest.mark.parametrize("restart", [False, True])
def test_ending_twice_has_the_effect_of_once(tmp_path: Path, restart: bool) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionOpBatchInterval=600_000) as broker:
            good, bad = await prepare(broker, b"good"), await prepare(broker, b"bad")
            await end(broker, good, COMMIT)
            await end(broker, bad, ROLL_BACK)
            if not restart:
                await end_again(broker, good, bad)
        if restart:
            async with live_broker(tmp_path) as broker:
                await end_again(broker, good, bad)

    async def end_again(broker: Live, good: Frame, bad: Frame) -> None:
        assert (await end(broker, good, COMMIT)).code == ResponseCode.SUCCESS
        assert (await end(broker, bad, ROLL_BACK)).code == ResponseCode.SUCCESS
        otherwise = await end(broker, good, ROLL_BACK)
        assert otherwise.code == ResponseCode.ILLEGAL_OPERATION
        assert "was committed already" in (otherwise.remark or "")
        otherwise = await end(broker, bad, COMMIT)
        assert otherwise.code == ResponseCode.ILLEGAL_OPERATION
        assert "was rolled back already" in (otherwise.remark or "")
        assert await bodies(broker) == [b"good"]

    asyncio.run(run())


def test_bad_ends_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            half, other = await prepare(broker), await prepare(broker, b"other")
            plain = await broker.send("orders", b"plain", queueId=2)
            _, offset = parse_message_id(half.fields["msgId"])
            wrong: dict[str, dict[str, object]] = {
                "The producer group wrong": {"producerGroup": "strangers"},
                "The transaction state table offset wrong": {"tranStateTableOffset": other.fields["queueOffset"]},
                "Find prepared transaction message failed": {"commitLogOffset": offset + 1},
                "no half message is at log offset": {
                    "commitLogOffset": parse_message_id(plain.fields["msgId"])[1],
                    "tranStateTableOffset": plain.fields["queueOffset"],
                },
                "at log offset -1": {"commitLogOffset": -1},
                "at log offset 9223372036854775807": {"commitLogOffset": 2**63 - 1},
                "commitOrRollback field wrong": {"commitOrRollback": 4},
                "is not number -1": {"tranStateTableOffset": -1},
                "is not number 99": {"tranStateTableOffset": 99},
                "bad header": {"commitLogOffset": "soon"},
            }
            for remark, fields in wrong.items():
                answer = await end(broker, half, COMMIT, **fields)
                assert answer.code == ResponseCode.SYSTEM_ERROR, remark
                assert remark in (answer.remark or "")
            assert await bodies(broker) == [b"plain"]
            assert (await end(broker, half, COMMIT)).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"plain", b"hello"]
            committed = (await delivered(broker))[1]
            again = {"commitLogOffset": committed.log_offset, "tranStateTableOffset": committed.queue_offset}
            assert (await end(broker, half, COMMIT, **again)).code == ResponseCode.SYSTEM_ERROR

    asyncio.run(run())


def test_a_forged_half_within_a_body_is_no_half(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            half = await prepare(broker)
            answer = await broker.pull(HALF_TOPIC, 0, queueId=0)
            (stored,) = messages_of(answer)
            forged = bytearray(answer.body)
            at = stored.log_offset + stored.size_bytes + RECORD_HEADERS[0].size
            forged[LOG_OFFSET_POSITION : LOG_OFFSET_POSITION + 8] = at.to_bytes(8, "big")
            await broker.send("orders", bytes(forged), queueId=1)
            refused = await end(broker, half, COMMIT, commitLogOffset=at)
            assert refused.code == ResponseCode.SYSTEM_ERROR
            assert "is not number 0" in (refused.remark or ""), "it looks like a half, but no queue has it"

    asyncio.run(run())


def test_half_messages_can_be_forbidden(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, rejectTransactionMessage=True) as broker:
            answer = await broker.send("orders", b"x", HALF)
            assert answer.code == ResponseCode.NO_PERMISSION
            assert "sending transaction message is forbidden" in (answer.remark or "")

    asyncio.run(run())


def test_an_undecided_transaction_is_asked_for_until_its_producer_knows(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, **QUICKLY) as broker, producer(broker) as questions:
            half = await prepare(broker, b"perhaps", mine="kept")
            question, message = await questions.get()
            assert (message.topic, message.queue_id, message.body) == ("orders", 2, b"perhaps")
            assert message.properties["TRANSACTION_CHECK_TIMES"] == "1"
            assert message.properties["mine"] == "kept"
            key = half.fields["transactionId"]
            assert (question.fields["msgId"], question.fields["transactionId"]) == (key, key)
            assert question.fields["bname"] == "broker-a"
            question, message = await questions.get()
            assert message.properties["TRANSACTION_CHECK_TIMES"] == "2"
            assert (await end(broker, half, COMMIT, **answer_to(question))).code == ResponseCode.SUCCESS
            (stored,) = await delivered(broker)
            assert (stored.body, stored.flag) == (b"perhaps", 7)

    asyncio.run(run())


@pytest.mark.parametrize("decision", [COMMIT, ROLL_BACK])
def test_the_producer_and_its_checker_end_one_transaction_once(tmp_path: Path, decision: int) -> None:
    """The producer was slow: the broker has asked already, so there are copies of the half."""

    async def run() -> None:
        async with live_broker(tmp_path, **QUICKLY) as broker, producer(broker) as questions:
            half = await prepare(broker)
            first, _ = await questions.get()
            second, _ = await questions.get()
            for answer in ({}, answer_to(first), answer_to(second), {}):
                assert (await end(broker, half, decision, **answer)).code == ResponseCode.SUCCESS
            settled = await prepare(broker, b"next")
            asked = await until_asked(questions, b"next")
            assert await bodies(broker) == ([b"hello"] if decision == COMMIT else [])
            await end(broker, settled, ROLL_BACK, **answer_to(asked))

    asyncio.run(run())


async def until_asked(questions: Questions, body: bytes) -> Frame:
    while True:
        question, message = await questions.get()
        if message.body == body:
            return question


def test_who_never_knows_is_asked_so_often_and_can_still_commit(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionCheckMax=2, **QUICKLY) as broker, producer(broker) as questions:
            half = await prepare(broker)
            for times in ("1", "2"):
                _, message = await questions.get()
                assert message.properties["TRANSACTION_CHECK_TIMES"] == times
            (given_up,) = await broker.until_found(TRANSACTION_CHECK_TOPIC)
            assert (given_up.body, given_up.properties["REAL_TOPIC"]) == (b"hello", "orders")
            for _ in range(2):
                assert (await end(broker, half, COMMIT)).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"hello"]
            assert questions.empty()

    asyncio.run(run())


def test_an_operator_gives_a_discarded_transaction_another_chance(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionCheckMax=1, **QUICKLY) as broker, producer(broker) as questions:
            half = await prepare(broker)
            await questions.get()
            (given_up,) = await broker.until_found(TRANSACTION_CHECK_TOPIC)
            resumed = await resume(broker, given_up)
            assert resumed.code == ResponseCode.SUCCESS
            question, message = await questions.get()
            assert message.properties["TRANSACTION_CHECK_TIMES"] == "1"
            await end(broker, half, COMMIT, **answer_to(question))
            await resume(broker, given_up)
            question, _ = await questions.get()
            assert (await end(broker, half, COMMIT, **answer_to(question))).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"hello"]
            for wrong in ("nonsense", (await delivered(broker))[0]):
                assert (await resume(broker, wrong)).code == ResponseCode.SYSTEM_ERROR

    async def resume(broker: Live, message: StoredMessage | str) -> Frame:
        text = message
        if isinstance(message, StoredMessage):
            text = (message.store_host + message.log_offset.to_bytes(8, "big")).hex().upper()
        return await broker.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, msgId=text)

    asyncio.run(run())


def test_an_immune_transaction_is_not_asked_for_before_its_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionCheckMax=1, **QUICKLY) as broker, producer(broker) as questions:
            immune = await prepare(broker, b"immune", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
            for number in range(3):
                body = b"plain %d" % number
                half = await prepare(broker, body)
                question = await until_asked(questions, body)
                await end(broker, half, ROLL_BACK, **answer_to(question))
            copies = [half for half in await delivered(broker, HALF_TOPIC, 0) if half.body == b"immune"]
            assert len(copies) > 1
            assert {half.properties.get("TRAN_PREPARED_QUEUE_OFFSET", "0") for half in copies} == {"0"}
            assert (await end(broker, immune, COMMIT)).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"immune"]
            late = await prepare(broker, b"late", CHECK_IMMUNITY_TIME_IN_SECONDS="1")
            assert (await end(broker, late, COMMIT)).code == ResponseCode.ILLEGAL_OPERATION
            question = await until_asked(questions, b"late")
            assert (await end(broker, late, COMMIT, **answer_to(question))).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"immune", b"late"]

    asyncio.run(run())


def test_after_a_restart_only_what_is_undecided_is_asked_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, transactionCheckInterval=600_000) as broker:
            halves = {body: await prepare(broker, body) for body in (b"a", b"b", b"c", b"d")}
            await end(broker, halves[b"a"], COMMIT)
            await end(broker, halves[b"c"], ROLL_BACK)
        async with (
            live_broker(tmp_path, transactionTimeOut=1, transactionCheckInterval=100) as broker,
            producer(broker) as questions,
        ):
            asked = {}
            while len(asked) < 2:
                question, message = await questions.get()
                asked[message.body] = question
            assert asked.keys() == {b"b", b"d"}
            await end(broker, halves[b"b"], COMMIT, **answer_to(asked[b"b"]))
            await end(broker, halves[b"d"], ROLL_BACK)
            assert await bodies(broker) == [b"a", b"b"]
        async with live_broker(tmp_path) as broker:
            for body, decision in ((b"a", COMMIT), (b"b", COMMIT), (b"c", ROLL_BACK), (b"d", ROLL_BACK)):
                assert (await end(broker, halves[body], decision)).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"a", b"b"]

    asyncio.run(run())


def test_after_a_kill_nothing_that_ended_comes_back_and_copies_are_one_transaction(tmp_path: Path) -> None:
    """A copy of the directory, made while the broker runs, is what a kill leaves: no op message, no saved offset."""
    unsaved = {"transactionOpBatchInterval": 600_000, "flushConsumerOffsetInterval": 600_000}

    async def run() -> None:
        async with live_broker(tmp_path / "first", **QUICKLY, **unsaved) as broker, producer(broker) as questions:
            halves = {body: await prepare(broker, body) for body in (b"good", b"bad", b"open", b"slow")}
            await end(broker, halves[b"good"], COMMIT)
            await end(broker, halves[b"bad"], ROLL_BACK)
            for _ in range(2):
                asked = await until_asked(questions, b"open")
                await until_asked(questions, b"slow")
            shutil.copytree(tmp_path / "first", tmp_path / "killed")
        async with live_broker(tmp_path / "killed", **QUICKLY) as broker, producer(broker) as questions:
            for body, decision in ((b"good", COMMIT), (b"bad", ROLL_BACK), (b"slow", COMMIT)):
                assert (await end(broker, halves[body], decision)).code == ResponseCode.SUCCESS
            await end(broker, halves[b"open"], COMMIT, **answer_to(asked))
            await prepare(broker, b"last")
            await until_asked(questions, b"last")
            seen = []
            for _ in range(3):
                _, message = await questions.get()
                seen.append(message.body)
            assert set(seen) == {b"last"}
            assert sorted(await bodies(broker)) == [b"good", b"open", b"slow"]

    asyncio.run(run())


def test_progress_is_saved_as_the_offsets_of_the_system_group(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, **QUICKLY) as broker:
            halves = [await prepare(broker) for _ in range(4)]
            for half in halves:
                await end(broker, half, ROLL_BACK)
        async with live_broker(tmp_path, **QUICKLY) as broker, producer(broker) as questions:
            half = await prepare(broker, b"last")
            question = await until_asked(questions, b"last")
            await end(broker, half, ROLL_BACK, **answer_to(question))
        async with live_broker(tmp_path) as broker:
            for topic, least in ((HALF_TOPIC, 5), (OP_HALF_TOPIC, 4)):
                answer = await broker.ask(
                    RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup=GROUP, topic=topic, queueId=0
                )
                assert int(answer.fields["offset"]) >= least, topic

    asyncio.run(run())


def test_an_unknown_end_is_not_answered(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            half = await prepare(broker)
            unanswered = asyncio.create_task(end(broker, half, UNKNOWN))
            assert (await end(broker, half, COMMIT)).code == ResponseCode.SUCCESS
            assert not unanswered.done()
            unanswered.cancel()

    asyncio.run(run())


def test_without_an_index_ops_are_stored_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, messageIndexEnable=False, transactionOpBatchInterval=600_000) as broker:
            half = await prepare(broker)
            await end(broker, half, COMMIT)
            assert [op.body for op in await delivered(broker, OP_HALF_TOPIC, 0)] == [b"0,"]
        async with live_broker(tmp_path, messageIndexEnable=False) as broker:
            assert (await end(broker, half, COMMIT)).code == ResponseCode.SUCCESS
            assert await bodies(broker) == [b"hello"]

    asyncio.run(run())


def test_groups_without_a_producer_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = Undecided(tmp_path)
    at_ms = START_MS

    def passed() -> list[str]:
        """What a pass says."""
        nonlocal at_ms
        at_ms += 10_000
        caplog.clear()
        while follower.check_back.run(at_ms) == 0:
            pass
        return caplog.messages

    for number in range(3):
        follower.send(b"gone-%d" % number, PGROUP="gone")
    assert passed() == ["no producer is there to end transactions of gone (3)"]
    assert passed() == []
    follower.send(b"lost", PGROUP="lost")
    assert passed() == ["no producer is there to end transactions of lost (1)"]
    assert passed() == []
    producer = cast(Connection, follower)
    beat = Heartbeat(client_id="c", producer_data_set=[ProducerData(group_name="gone")])
    follower.check_back._clients.heartbeat(beat, producer, "JAVA", 500, START_MS)
    assert passed() == []
    assert sorted(follower.asked) == [b"gone-0", b"gone-1", b"gone-2"]
    follower.check_back._clients.unregister(producer, None, "gone")
    assert passed() == ["no producer is there to end transactions of gone (3)"]


def test_many_groups_without_a_producer_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = Undecided(tmp_path)
    for number in range(12):
        follower.send(b"half-%d" % number, PGROUP=f"g{number:02d}")
    follower.handled()
    (line,) = caplog.messages
    assert line.startswith("no producer is there to end transactions of g00 (1), g01 (1), ")
    assert line.endswith(", g09 (1) and of 2 more groups")


def test_the_end_of_a_half_that_was_passed_is_not_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its op message may come later than the table that passed it, and lie behind a gap after a power cut."""
    before = Undecided(tmp_path / "running")
    for body in (b"ended", b"open", b"last"):
        before.send(body)
    before.offsets.put(GROUP, HALF_TOPIC, 0, 1)
    before.offsets.save()
    before.put.one(Message("orders", 0, b"safe", {}), START_MS)
    before.store.flush()
    lost = before.put.one(Message("orders", 0, b"lost", {}), START_MS)
    before.put.one(Message(OP_HALF_TOPIC, 0, b"0,", {"TAGS": "d"}, born_host=HOST), START_MS)
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    before.store.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(lost.log_offset)
        file.write(bytes(lost.size_bytes))
    # Its keys are not found: the index was lost, and the log is too long to file all of it again.
    shutil.rmtree(tmp_path / "cut" / "index")
    monkeypatch.setattr(recovery, "INDEX_REBUILD_MAX_BYTES", 0)
    after = Undecided(tmp_path / "cut")
    assert after.halves.end_offset == 3, "it is not stored again"
    assert after.handled() == [b"open", b"last"]
    after.store.close()

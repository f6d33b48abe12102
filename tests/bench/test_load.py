"""The load generator against a server that decodes what it sends with Skylark's own codec, and against Skylark."""

import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from bench.suite import load
from bench.suite.load import Job, Queue
from bench.suite.running import ROOT
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.records import decode_batch, decode_properties

GO = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
pytestmark = pytest.mark.skipif(GO is None, reason="Go is not installed")
both_encodings = pytest.mark.parametrize("encoding", list(Encoding), ids=lambda encoding: encoding.name.lower())


@pytest.fixture(scope="session", autouse=True)
def generator() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "interop_setup.py"), "load"], check=True, capture_output=True)


def test_durations_are_counted_right() -> None:
    assert GO is not None
    done = subprocess.run(
        [GO, "test", "./..."], cwd=ROOT / "bench" / "load", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Recorder:
    """Answers every request on one connection and keeps it."""

    def __init__(self, answer: Callable[[Frame], Frame]) -> None:
        self.requests: list[Frame] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        decoder = FrameDecoder()
        with connection:
            while data := connection.recv(1 << 16):
                for request in decoder.feed(data):
                    self.requests.append(request)
                    if not request.is_oneway:
                        connection.sendall(encode_frame(self._answer(request)))

    def close(self) -> None:
        self._listener.close()
        self._thread.join()


def acknowledged(request: Frame) -> Frame:
    return request.reply(0, fields={"msgId": "7F000001000000000000000000000000", "queueOffset": "0", "queueId": "0"})


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    server = Recorder(acknowledged)
    yield server
    server.close()


def job(server: Recorder, encoding: Encoding, **more: object) -> Job:
    options: dict[str, object] = {
        "kind": "send",
        "address": server.address,
        "encoding": encoding.name.lower(),
        "topic": "T",
        "queues": [Queue(0), Queue(1), Queue(2)],
        "body_bytes": 10,
        "in_flight": 4,
        "messages": 50,
        "seconds": 60,
    }
    return Job(**(options | more))  # type: ignore[arg-type]


@both_encodings
def test_frames_are_read_by_our_codec(recorder: Recorder, encoding: Encoding) -> None:
    result = load.run(job(recorder, encoding, properties=[("TAGS", "a")]))
    requests = recorder.requests
    assert result.messages == len(requests) >= 50
    assert {each.code for each in requests} == {RequestCode.SEND_MESSAGE_V2}
    assert {each.encoding for each in requests} == {encoding}
    assert {each.body for each in requests} == {b"x" * 10}
    assert len({each.opaque for each in requests}) == len(requests)
    properties = [decode_properties(each.fields["i"]) for each in requests]
    assert {each["TAGS"] for each in properties} == {"a"}
    assert len({each["UNIQ_KEY"] for each in properties}) == len(requests)
    assert {len(each["UNIQ_KEY"]) for each in properties} == {32}
    assert {each.fields["e"] for each in requests} == {"0", "1", "2"}
    assert result.latency_ms is not None


def test_connections_are_shared_out_among_addresses(recorder: Recorder) -> None:
    other = Recorder(acknowledged)
    try:
        result = load.run(job(recorder, Encoding.JSON, address=f"{recorder.address};{other.address}", connections=2))
    finally:
        other.close()
    assert min(len(recorder.requests), len(other.requests)) >= 50
    assert result.messages == len(recorder.requests) + len(other.requests)


@both_encodings
def test_batches_are_read_by_our_codec(recorder: Recorder, encoding: Encoding) -> None:
    load.run(job(recorder, encoding, batch=3, messages=30))
    keys = []
    for request in recorder.requests:
        assert request.code == RequestCode.SEND_BATCH_MESSAGE
        assert request.fields["m"] == "true"
        for _, body, properties in decode_batch(request.body):
            assert body == b"x" * 10
            keys.append(properties["UNIQ_KEY"])
    assert len(keys) == len(set(keys)) == 3 * len(recorder.requests)


@both_encodings
def test_one_way_requests_go_before_one_that_is_answered(recorder: Recorder, encoding: Encoding) -> None:
    result = load.run(job(recorder, encoding, one_way=4, in_flight=1))
    assert [each.is_oneway for each in recorder.requests] == [True, True, True, True, False] * (result.messages // 5)


@both_encodings
def test_what_is_refused_does_not_count(encoding: Encoding) -> None:
    server = Recorder(lambda request: request.reply(2 if int(request.fields["e"]) else 0, "too busy"))
    try:
        result = load.run(job(server, encoding))
    finally:
        server.close()
    assert result.messages == sum(each.fields["e"] == "0" for each in server.requests)
    assert result.errors == {"2": len(server.requests) - result.messages}
    assert result.remark == "too busy"


@both_encodings
def test_a_transaction_is_a_half_message_and_its_commit(encoding: Encoding) -> None:
    def answer(request: Frame) -> Frame:
        reply = acknowledged(request)
        reply.fields |= {"msgId": f"{'7F000001' * 2}{0x1234:016X}", "queueOffset": "7", "transactionId": "K"}
        return reply

    server = Recorder(answer)
    try:
        load.run(job(server, encoding, kind="transactions", in_flight=1, seconds=0.05))
    finally:
        server.close()
    half, commit = server.requests[:2]
    assert half.fields["f"] == "4"
    assert decode_properties(half.fields["i"])["TRAN_MSG"] == "true"
    assert commit.code == RequestCode.END_TRANSACTION
    assert (commit.fields["commitLogOffset"], commit.fields["tranStateTableOffset"]) == (str(0x1234), "7")
    assert (commit.fields["transactionId"], commit.fields["commitOrRollback"]) == ("K", "8")


@both_encodings
def test_a_rate_is_kept_and_every_message_is_timed(recorder: Recorder, encoding: Encoding) -> None:
    result = load.run(job(recorder, encoding, rate=1000, seconds=0.1))
    assert result.messages == len(recorder.requests) == 100


def test_a_server_that_talks_nonsense_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(struct.pack(">I", 1 << 30) + b"nonsense")
                connection.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(load.LoadFailed, match="frame of"):
            load.run(Job(kind="send", address=address, topic="T", queues=[Queue(0)], seconds=1))
        thread.join()


@both_encodings
def test_skylark_takes_and_gives_what_was_sent(encoding: Encoding) -> None:
    name = encoding.name.lower()
    with LocalCluster() as cluster:
        broker = cluster.brokers[0].address
        sent = load.run(
            Job(kind="send", address=broker, encoding=name, topic="T", queues=[Queue(0)], body_bytes=10, messages=200,
                in_flight=8, seconds=60)
        )  # fmt: skip
        assert not sent.errors
        pulled = load.run(
            Job(kind="pull", address=broker, encoding=name, topic="T", queues=[Queue(0, 0, sent.messages)], once=True,
                group="G", seconds=60)
        )  # fmt: skip
        assert pulled.messages == pulled.looked_at == sent.messages
        pushed = load.run(
            Job(kind="push", address=broker, encoding=name, topic="T", queues=[Queue(0, sent.messages)], body_bytes=16,
                rate=1000, seconds=0.1, groups=2)
        )  # fmt: skip
        assert pushed.messages == 200
        waited = load.run(
            Job(kind="idle", address=broker, encoding=name, topic="T", queues=[Queue(0, sent.messages + 100)],
                connections=3, seconds=0.1)
        )  # fmt: skip
        assert waited.messages == 0

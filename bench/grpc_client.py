"""The official gRPC Python client at the same work as ours; run by `python_client.py` in an environment of its own.

python bench/grpc_client.py send|send_one|consume PROXY TOPIC COUNT IN_FLIGHT BODY_BYTES GROUP

Prints one line of JSON: the messages and the seconds that they took, from the first to the last.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from rocketmq import (  # type: ignore[import-not-found, unused-ignore]
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
)

CONSUME_DEADLINE_S = 300.0


def send(config: ClientConfiguration, topic: str, count: int, in_flight: int, body_bytes: int) -> dict[str, float]:
    """Many at once, with a bound on how many."""
    producer = Producer(config, (topic,))
    producer.startup()
    free = threading.Semaphore(in_flight)
    failures: list[BaseException] = []

    def done(future: object) -> None:
        error = future.exception()  # type: ignore[attr-defined]
        if error is not None:
            failures.append(error)
        free.release()

    def start() -> None:
        message = Message()
        message.topic = topic
        message.body = b"x" * body_bytes
        free.acquire()
        producer.send_async(message).add_done_callback(done)

    start()  # the first one makes connections
    begin = time.perf_counter()
    for _ in range(count):
        start()
    for _ in range(in_flight):
        free.acquire()
    took_s = time.perf_counter() - begin
    producer.shutdown()
    return {"messages": count - len(failures), "seconds": took_s, "failures": len(failures)}


def send_one(config: ClientConfiguration, topic: str, count: int, body_bytes: int) -> dict[str, float]:
    """One after the other."""
    producer = Producer(config, (topic,))
    producer.startup()
    begin = 0.0
    for index in range(count + 1):
        message = Message()
        message.topic = topic
        message.body = b"x" * body_bytes
        producer.send(message)
        if index == 0:
            begin = time.perf_counter()
    took_s = time.perf_counter() - begin
    producer.shutdown()
    return {"messages": count, "seconds": took_s, "failures": 0}


class Counting(MessageListener):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self.wanted = count
        self.seen = 0
        self.first_s = 0.0
        self.last_s = 0.0
        self.lock = threading.Lock()
        self.finished = threading.Event()

    def consume(self, message: Message) -> ConsumeResult:
        with self.lock:
            self.last_s = time.perf_counter()
            if self.seen == 0:
                self.first_s = self.last_s
            self.seen += 1
            if self.seen >= self.wanted:
                self.finished.set()
        return ConsumeResult.SUCCESS


def consume(config: ClientConfiguration, topic: str, count: int, group: str) -> dict[str, float]:
    listener = Counting(count)
    consumer = PushConsumer(config, group, listener, {topic: FilterExpression()})
    consumer.startup()
    listener.finished.wait(CONSUME_DEADLINE_S)
    took_s = listener.last_s - listener.first_s
    consumer.shutdown()
    return {"messages": listener.seen, "seconds": took_s, "failures": 0}


def main() -> None:
    work, proxy, topic = sys.argv[1:4]
    count, in_flight, body_bytes = map(int, sys.argv[4:7])
    config = ClientConfiguration(proxy, Credentials())
    if work == "send":
        result = send(config, topic, count, in_flight, body_bytes)
    elif work == "send_one":
        result = send_one(config, topic, count, body_bytes)
    else:
        result = consume(config, topic, count, sys.argv[7])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""The messages of a topic, for commands that start no Spark: all of them, up to where each queue ends now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.client.message import Message, MessageQueue
from skylark.client.sync import PullConsumer
from skylark.pipelines.errors import PipelineError

_PULLED: Final = 256

Read = tuple[Message, str | None]
"""A message, and why its body, which is as it was sent then, can't be inflated."""


def has_topic(consumer: PullConsumer, topic: str) -> bool:
    """Raises PipelineError if no name server answers."""
    return bool(_queues(consumer, topic))


def messages(consumer: PullConsumer, topic: str) -> Iterator[Read]:
    """Those of a topic, which may be missing. Raises PipelineError."""
    for queue in _queues(consumer, topic):
        yield from messages_of(consumer, queue)


def _queues(consumer: PullConsumer, topic: str) -> list[MessageQueue]:
    try:
        return consumer.queues(topic)
    except RouteNotFound:
        return []
    except RocketMQError as e:
        raise PipelineError(str(e)) from e


def messages_of(consumer: PullConsumer, queue: MessageQueue) -> Iterator[Read]:
    """Those of a queue, to its end. Raises PipelineError."""
    try:
        offset, end = consumer.min_offset(queue), consumer.max_offset(queue)
        while offset < end:
            pulled = consumer.pull(queue, offset, _PULLED)
            for message in pulled.messages:
                if message.queue_offset < end:
                    yield message, pulled.unreadable.get(message.queue_offset)
            if pulled.next_offset <= offset:
                raise PipelineError(
                    f"queue {queue.queue_id} of topic {queue.topic} at broker {queue.broker_name} ends at offset {end}"
                    f", and nothing comes from offset {offset} on: a slave that is behind answers, or messages are "
                    "damaged; try again when its master is there"
                )
            offset = pulled.next_offset
    except RocketMQError as e:
        raise PipelineError(str(e)) from e

"""Who may pop, peek and be notified: the checks that these requests share, with Apache's codes and remarks."""

from __future__ import annotations

from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Asker, Groups
from skylark.broker.topics import Topics, suggest
from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode
from skylark.wire.tables import PERM_READ, SubscriptionGroupConfig, TopicConfig


class Access:
    def __init__(self, config: BrokerConfig, topics: Topics, groups: Groups) -> None:
        self._config = config
        self._topics = topics
        self._groups = groups

    def check_broker(self, doing: str) -> None:
        if not self._config.broker_permission & PERM_READ:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION, f"the broker[{self._config.broker_ip1}] {doing} message is forbidden"
            )

    def topic(self, name: str) -> TopicConfig:
        topic = self._topics.get(name)
        if topic is None:
            raise RequestFailed(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please! {suggest()}"
            )
        return topic

    def readable_topic(self, name: str, queue_id: int, connection: Asker) -> TopicConfig:
        """The topic, which the queue is one of; queue -1 stands for any."""
        topic = self.topic(name)
        if not topic.perm & PERM_READ:
            raise RequestFailed(ResponseCode.NO_PERMISSION, f"the topic[{name}] peeking message is forbidden")
        if queue_id >= topic.read_queue_nums:
            raise self.illegal_queue(topic, queue_id, connection, ResponseCode.INVALID_PARAMETER)
        return topic

    def group(self, name: str, connection: Asker) -> SubscriptionGroupConfig:
        group = self._groups.get(name, connection)
        if group is None:
            raise RequestFailed(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] does not exist, {suggest()}"
            )
        if not group.consume_enable:
            raise RequestFailed(ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}")
        return group

    @staticmethod
    def illegal_queue(topic: TopicConfig, queue_id: int, connection: Asker, code: int) -> RequestFailed:
        return RequestFailed(
            code,
            f"queueId[{queue_id}] is illegal, topic:[{topic.topic_name}] topicConfig.readQueueNums:"
            f"[{topic.read_queue_nums}] consumer:[{connection!r}]",
        )

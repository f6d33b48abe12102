"""Topics that are at one broker alone, because what stands in them is a decision: ledgers and notes of what was done.

A second one would know nothing of the first, and what is done would be done again. So such a topic is made only if it
never was, and that can't be seen from a missing route: the name servers forget a broker that is away. Therefore every
other broker has the topic too, without queues that can be read or written (perm 0): the mark that it is elsewhere.

- A mark without its topic means that the broker of the topic is away. It is waited for, and never replaced.
- Whoever uses the topic marks all brokers that are there first, also those that came later. As long as one broker of
  those that were there together is there, nobody makes a second topic.
- A process that dies in between, or two at the same time, may leave two. Those without a message become marks.
- Not covered: a broker that hangs when it is to be marked, and marks itself minutes later, when it has become the one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from skylark.client.errors import BrokerError, NotReachable, RouteNotFound
from skylark.client.routes import DEFAULT_TOPIC, TopicRoute
from skylark.spark.cluster import Cluster
from skylark.spark.queues import Queue
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic, GetTopicConfig
from skylark.wire.routes import MASTER_ID
from skylark.wire.tables import PERM_READ, PERM_WRITE, TopicConfig
from skylark.wire.typed import encode_header

_OPEN: Final = PERM_READ | PERM_WRITE
_MARK: Final = 0
_BUSY: Final = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE))
_UNKNOWN_HERE: Final = frozenset((ResponseCode.TOPIC_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED))
"""Brokers before 4.9.4 can't be asked for a topic; they have told the name server of all that they have."""

Groups = Mapping[str, Mapping[int, str]]
Check = Callable[[str, str], None]


def find_sole(cluster: Cluster, topic: str) -> list[Queue]:
    """The queues of such a topic; none if every broker says that it never was.

    A broker that is away is waited for; raises NotReachable if it does not come back in time.
    """
    return cluster.retrying(lambda: _find(cluster, topic)[0])


def ensure_sole(cluster: Cluster, topic: str, check: Check = lambda broker, address: None) -> list[Queue]:
    """The same; if it never was, it is made, with one queue. Marks every broker that is there.

    `check` is asked about the broker where it is to be made, and may refuse it by an exception.
    """

    def ensure() -> list[Queue]:
        queues, unmarked = _find(cluster, topic)
        if not queues:
            broker = next(iter(unmarked))
            check(broker, unmarked[broker])
            _put(cluster, topic, unmarked.pop(broker), _OPEN)
            queues = [Queue(topic, broker, 0)]
        queues = _without_empty(cluster, topic, queues)
        for address in unmarked.values():
            _put(cluster, topic, address, _MARK)
        return queues

    return cluster.retrying(ensure)


def require_sole(cluster: Cluster, topic: str) -> list[Queue]:
    """The queues of one that was made before, without a look at every broker."""

    def require() -> list[Queue]:
        try:
            queues = _queues(cluster.route(topic, refresh=True))
        except RouteNotFound:
            queues = []
        if not queues:
            raise _away(topic)
        return queues

    return cluster.retrying(require)


def _find(cluster: Cluster, topic: str) -> tuple[list[Queue], dict[str, str]]:
    """The queues of the topic, and the masters of brokers that have neither the topic nor a mark."""
    groups = cluster.groups()
    if not groups:
        raise NotReachable(f"topic {topic!r} can't be looked for: no broker is registered with the name server")
    try:
        route: TopicRoute | None = cluster.route(topic, refresh=True)
    except RouteNotFound:
        route = None
    queues = _queues(route) if route is not None else []
    has_mark = route is not None
    unmarked = {}
    for broker in groups.keys() - (route.brokers.keys() if route is not None else ()):
        address = _master(groups, broker)
        config = _config(cluster, topic, address)
        if config is None:
            unmarked[broker] = address
        elif config.perm & _OPEN:  # the name server is yet to be told
            queues += [Queue(topic, broker, number) for number in range(config.read_queue_nums)]
        else:
            has_mark = True
    if has_mark and not queues:
        raise _away(topic)
    return sorted(queues), dict(sorted(unmarked.items()))


def _without_empty(cluster: Cluster, topic: str, queues: list[Queue]) -> list[Queue]:
    """The queues at one broker: that with messages, else the first. All of them, if several have messages."""
    brokers = sorted({queue.broker for queue in queues})
    if len(brokers) == 1:
        return queues
    used = _used(cluster, queues)
    groups = cluster.groups()
    for broker in brokers:
        if broker not in (used or brokers[:1]):
            _put(cluster, topic, _master(groups, broker), _MARK)
            if broker in _used(cluster, queues):  # just before it was closed
                _put(cluster, topic, _master(groups, broker), _OPEN)
                used.add(broker)
    return [queue for queue in queues if queue.broker in (used or brokers[:1])]


def _used(cluster: Cluster, queues: list[Queue]) -> set[str]:
    return {queue.broker for queue, end in cluster.max_offsets(queues).items() if end}


def _queues(route: TopicRoute) -> list[Queue]:
    return sorted(
        {Queue(each.topic, each.broker_name, each.queue_id) for each in (*route.write_queues, *route.read_queues)}
    )


def _master(groups: Groups, broker: str) -> str:
    address = groups[broker].get(MASTER_ID)
    if address is None:
        raise NotReachable(f"broker {broker} has no master now, which could say what topics it has")
    return address


def _config(cluster: Cluster, topic: str, address: str) -> TopicConfig | None:
    """What the broker there says; not the name server, which may not have been told yet."""
    request = Frame(RequestCode.GET_TOPIC_CONFIG, encode_header(GetTopicConfig(topic)))
    try:
        return decode_body(TopicConfig, _ask(cluster, address, request).body)
    except BrokerError as e:
        if e.code in _UNKNOWN_HERE:
            return None
        raise


def _put(cluster: Cluster, topic: str, address: str, perm: int) -> None:
    header = CreateTopic(topic, DEFAULT_TOPIC, 1, 1, perm, "SINGLE_TAG")
    _ask(cluster, address, Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header)))


def _ask(cluster: Cluster, address: str, request: Frame) -> Frame:
    """The answer; a broker that is just starting or stopping is waited for."""
    try:
        return cluster.ask_address(address, request)
    except BrokerError as e:
        if e.code in _BUSY:
            raise NotReachable(str(e)) from None
        raise


def _away(topic: str) -> NotReachable:
    return NotReachable(
        f"the broker that has topic {topic!r} is away: start it again. A second topic of this name is not made, since "
        "what was decided stands in the first; only if that is lost for good, delete the topic everywhere"
    )

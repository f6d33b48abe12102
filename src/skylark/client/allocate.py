"""Which queues of a topic a member of a group gets: Apache's six strategies, with exactly Apache's results.

Every member computes its own share from the same sorted list of queues and the same sorted list of members. Shares fit
together without overlap or hole only while all members use one strategy, whatever language they are written in; so a
strategy here gives what Apache's class of that name gives, queue by queue. All of them are pure.

    average                  runs of neighbouring queues, the first members get one more
    average_by_circle        dealt out like cards
    consistent_hash()        a ring of hashed members; few queues move when a member comes or goes
    by_config(queues)        the queues that the configuration names
    machine_room(rooms)      brokers named `room@name` of some rooms, shared by all members
    machine_room_nearby(...) the queues of a room to the members in that room, a room without members to all
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from hashlib import md5

from skylark.wire.bodies import MessageQueue

Strategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], list[MessageQueue]]
"""(this member's client id, the topic's queues, the group's client ids), both sorted as Java does -> its share."""


def java_order(text: str) -> bytes:
    """The key that sorts strings as Java does, by UTF-16 units and not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


def average(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """Runs of neighbouring queues; with eight queues and three members 3, 3 and 2. The default."""
    if member not in members:
        return []
    index = members.index(member)
    size, rest = divmod(len(queues), len(members))
    start = index * size + min(index, rest)
    return list(queues[start : start + size + (index < rest)])


def average_by_circle(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """Every n-th queue for each of n members."""
    if member not in members:
        return []
    return list(queues[members.index(member) :: len(members)])


def consistent_hash(virtual_nodes: int = 10, hash_key: Callable[[str], int] | None = None) -> Strategy:
    """A ring on which each member stands at `virtual_nodes` places; a queue goes to the next member on it."""
    if virtual_nodes < 0:
        raise ValueError(f"virtual_nodes is {virtual_nodes}; it must be 0 or more")
    hashed = hash_key or _md5_hash

    def allocate(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        if member not in members:
            return []
        ring = _ring(members, virtual_nodes, hashed)
        places = sorted(ring)
        if not places:
            return []
        return [queue for queue in queues if ring[_next(places, hashed(_java_text(queue)))] == member]

    return allocate


def by_config(queues: Iterable[MessageQueue]) -> Strategy:
    """Always these queues: whoever writes the configuration sees to it that every queue has an owner."""
    fixed = list(queues)

    def allocate(_member: str, _queues: Sequence[MessageQueue], _members: Sequence[str]) -> list[MessageQueue]:
        return list(fixed)

    return allocate


def machine_room(rooms: Iterable[str]) -> Strategy:
    """The queues of brokers named `room@name` whose room is one of `rooms`; what is left over goes to the first."""
    wanted = frozenset(rooms)

    def allocate(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        if member not in members:
            return []
        index = members.index(member)
        near = [queue for queue in queues if _room(queue.broker_name) in wanted]
        size, rest = divmod(len(near), len(members))
        share = near[size * index : size * (index + 1)]
        if index < rest:
            share.append(near[index + size * len(members)])
        return share

    return allocate


def machine_room_nearby(
    inner: Strategy, room_of_queue: Callable[[MessageQueue], str], room_of_member: Callable[[str], str]
) -> Strategy:
    """Each room's queues to the members in it by `inner`; the queues of a room that has none to all members."""

    def allocate(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        if member not in members:
            return []
        queues_in: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            queues_in.setdefault(_named(room_of_queue(queue), queue), []).append(queue)
        members_in: dict[str, list[str]] = {}
        for each in members:
            members_in.setdefault(_named(room_of_member(each), each), []).append(each)
        here = room_of_member(member)
        share = inner(member, queues_in[here], members_in[here]) if here in queues_in else []
        for room in sorted(queues_in, key=java_order):
            if room not in members_in:
                share += inner(member, queues_in[room], members)
        return share

    return allocate


def _ring(members: Sequence[str], virtual_nodes: int, hashed: Callable[[str], int]) -> dict[int, str]:
    ring: dict[int, str] = {}
    seen: set[str] = set()
    for member in members:
        # A client id that is listed twice goes on numbering its places where it stopped.
        first = sum(owner == member for owner in ring.values()) if member in seen else 0
        seen.add(member)
        for number in range(first, first + virtual_nodes):
            ring[hashed(f"{member}-{number}")] = member
    return ring


def _next(places: list[int], place: int) -> int:
    return places[bisect_left(places, place) % len(places)]


def _md5_hash(key: str) -> int:
    return int.from_bytes(md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest()[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _room(broker_name: str) -> str | None:
    # As Java splits: what is empty at the end does not count.
    parts = broker_name.rstrip("@").split("@")
    return parts[0] if len(parts) == 2 else None


def _named(room: str, of: object) -> str:
    if not room:
        raise ValueError(f"{of} has no machine room: the function that names rooms must know every broker and member")
    return room

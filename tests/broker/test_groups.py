"""The table of consumer groups and the requests that mqadmin sends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import pytest

from broker.test_clients import FakeConnection
from skylark.broker import groups as module
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups, handlers, validate_group
from skylark.broker.offsets import Offsets
from skylark.net.connection import RequestFailed
from skylark.wire import fastjson
from skylark.wire.bodies import GroupConfigs, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.tables import CustomizedRetryPolicy, GroupRetryPolicy, SubscriptionGroupConfig

PEER = FakeConnection("tool").as_connection
GROUP_JSON = (
    '{"attributes":{},"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,"consumeFromMinEnable":true,'
    '"consumeMessageOrderly":false,"consumeTimeoutMinute":15,"groupName":"g",'
    '"groupRetryPolicy":{"type":"CUSTOMIZED"},"groupSysFlag":0,"notifyConsumerIdsChangedEnable":true,'
    '"retryMaxTimes":16,"retryQueueNums":1,"whichBrokerWhenConsumeSlowly":1}'
)
ILLEGAL = "contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"


class Bench:
    """A group table with its requests."""

    def __init__(self, directory: Path, **changes: object) -> None:
        config = msgspec.structs.replace(BrokerConfig(broker_name="b"), **changes)
        self.groups = Groups(directory, config, lambda: 5)
        self.offsets = Offsets(directory)
        self.serve = handlers(self.groups, self.offsets)

    def ask(self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b"") -> Frame:
        answer = self.serve[code](Frame(code, fields or {}, body), PEER)
        if isinstance(answer, Coroutine):
            answer = asyncio.run(answer)
        assert isinstance(answer, Frame)
        return answer

    def refused(self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b"") -> tuple[int, str]:
        with pytest.raises(RequestFailed) as failure:
            self.ask(code, fields, body)
        return failure.value.code, failure.value.remark


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("g_1-a%|", None),
        ("a" * 120, None),
        ("", "The specified group is blank."),
        ("a b", f"The specified group: a b, {ILLEGAL}"),
        ("../x", f"The specified group: ../x, {ILLEGAL}"),
        ("a" * 121, f"The specified group: {'a' * 121}, is longer than group max length: 120"),
    ],
)
def test_names(name: str, remark: str | None) -> None:
    assert validate_group(name) == remark


def test_builtin_groups(bench: Bench) -> None:
    assert {group.group_name for group in bench.groups.all()} == {
        "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", "CID_RMQ_SYS_TRANS",
    }  # fmt: skip


class TestCreationByAsking:
    def test_is_on_by_default(self, bench: Bench, tmp_path: Path) -> None:
        assert "g" not in bench.groups
        assert bench.groups.get("g") == SubscriptionGroupConfig(group_name="g")
        assert "g" in Bench(tmp_path).groups

    def test_can_be_switched_off(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, auto_create_subscription_group=False)
        assert bench.groups.get("g") is None
        assert bench.groups.get("CID_RMQ_SYS_x") is not None

    def test_asks_for_a_good_name(self, bench: Bench) -> None:
        assert bench.groups.get("../x") is None

    def test_is_bounded(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_AUTO_CREATED_GROUPS", len(bench.groups) + 1)
        assert bench.groups.get("g") is not None
        assert bench.groups.get("h") is None


def test_the_file_is_apaches(bench: Bench, tmp_path: Path) -> None:
    for group in list(bench.groups.all()):
        bench.groups.delete(group.group_name)
    bench.groups.get("g")
    bench.groups.forbid("g", "T", True)
    written = fastjson.loads((tmp_path / "subscriptionGroup.json").read_bytes())
    assert fastjson.dumps(written).decode() == (
        '{"dataVersion":{"counter":10,"stateVersion":0,"timestamp":5},"forbiddenTable":{"g":{"T":4}},'
        f'"subscriptionGroupTable":{{"g":{GROUP_JSON}}}}}'
    )
    again = Bench(tmp_path).groups
    assert again.get("g") == bench.groups.get("g")
    assert again.is_forbidden("g", "T")
    assert again.data_version == bench.groups.data_version


def test_a_refusing_disk_is_tried_again(bench: Bench, tmp_path: Path) -> None:
    blocker = tmp_path / "subscriptionGroup.json.tmp"
    blocker.mkdir()
    assert bench.groups.get("g") is not None
    blocker.rmdir()
    bench.groups.save()
    assert "g" in Bench(tmp_path).groups


def test_update(bench: Bench) -> None:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    # What mqadmin updateSubGroup sends.
    body = GROUP_JSON.replace('"retryMaxTimes":16', '"retryMaxTimes":3').encode()
    assert bench.ask(code, body=body).code == 0
    group = bench.groups.get("g")
    assert group is not None
    assert group.retry_max_times == 3
    assert bench.ask(code).code == 0
    assert bench.refused(code, body=GROUP_JSON.replace('"g"', '"a b"').encode()) == (
        ResponseCode.INVALID_PARAMETER,
        f"The specified group: a b, {ILLEGAL}",
    )
    assert bench.refused(code, body=GROUP_JSON.replace("{}", '{"+nope":"1"}').encode()) == (
        ResponseCode.SYSTEM_ERROR,
        "unsupported key: nope",
    )


def test_attributes_add_up(bench: Bench) -> None:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    bench.ask(code, body=GROUP_JSON.replace("{}", '{"+priority.factor":"50"}').encode())
    bench.ask(code, body=GROUP_JSON.replace("{}", '{"+lite.sub.reset.offset.exclusive":"TRUE"}').encode())
    group = bench.groups.get("g")
    assert group is not None
    assert group.attributes == {"priority.factor": "50", "lite.sub.reset.offset.exclusive": "TRUE"}


def test_update_list_is_all_or_nothing(bench: Bench) -> None:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    good, bad = SubscriptionGroupConfig("g"), SubscriptionGroupConfig("")
    assert bench.refused(code, body=encode_body(GroupConfigs(group_config_list=[good, bad])))[0] == 29
    assert "g" not in bench.groups
    bench.ask(code, body=encode_body(GroupConfigs(group_config_list=[good, SubscriptionGroupConfig("h")])))
    assert "g" in bench.groups
    assert "h" in bench.groups


def test_get(bench: Bench, tmp_path: Path) -> None:
    assert bench.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"}).body.decode() == GROUP_JSON
    closed = Bench(tmp_path, auto_create_subscription_group=False)
    assert closed.refused(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "x"}) == (
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "No group in this broker",
    )


def test_get_all_and_pages(bench: Bench) -> None:
    code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    answer = bench.ask(code)
    table = fastjson.loads(answer.body)
    assert sorted(table) == ["dataVersion", "forbiddenTable", "subscriptionGroupTable"]
    assert answer.fields == {"totalGroupNum": "8"}
    version = fastjson.dumps(table["dataVersion"]).decode()
    page = bench.ask(code, {"groupSeq": "6", "maxGroupNum": "4", "dataVersion": version})
    assert list(fastjson.loads(page.body)["subscriptionGroupTable"]) == ["SELF_TEST_C_GROUP", "TOOLS_CONSUMER"]
    page = bench.ask(code, {"groupSeq": "6", "maxGroupNum": "2"})
    assert list(fastjson.loads(page.body)["subscriptionGroupTable"]) == ["CID_ONS-HTTP-PROXY", "CID_ONSAPI_OWNER"]


def test_delete(bench: Bench) -> None:
    for group in ("g", "h"):
        bench.groups.get(group)
        bench.groups.forbid(group, "T", True)
        bench.offsets.commit(group, "T", 0, 5, "peer")
    bench.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g", "cleanOffset": "false"})
    bench.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "h", "cleanOffset": "true"})
    assert "g" not in bench.groups
    assert not bench.groups.is_forbidden("g", "T")
    assert (bench.offsets.query("g", "T", 0), bench.offsets.query("h", "T", 0)) == (5, -1)


def test_forbid(bench: Bench) -> None:
    code = RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN

    def ask(topic: str, **fields: str) -> bytes:
        return bench.ask(code, {"group": "g", "topic": topic} | fields).body

    assert ask("T") == b'{"group":"g","readable":true,"topic":"T"}'
    assert ask("T", readable="false") == b'{"group":"g","readable":false,"topic":"T"}'
    assert ask("U", readable="false") == b'{"group":"g","readable":false,"topic":"U"}'
    assert ask("T", readable="true") == b'{"group":"g","readable":true,"topic":"T"}'
    assert bench.groups.is_forbidden("g", "U")


def with_delays(name: str, count: int) -> bytes:
    policy = CustomizedRetryPolicy(next=[1_000] * count)
    group = SubscriptionGroupConfig(
        group_name=name, group_retry_policy=GroupRetryPolicy(customized_retry_policy=policy)
    )
    return encode_body(group)


def test_what_groups_take_beyond_their_own_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIZE_BYTES", 4_096)
    bench, code = Bench(tmp_path), RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert bench.ask(code, body=with_delays("a", 100)).code == 0
    refused = bench.refused(code, body=with_delays("b", 100))
    assert refused == (
        ResponseCode.INVALID_PARAMETER,
        "b is too large: it takes 2976 bytes more than the 1024 that each has, and of those all take 2976 of 4096. "
        "Make it, or others, smaller",
    )
    assert "b" not in bench.groups
    again = Bench(tmp_path)
    assert again.refused(code, body=with_delays("b", 100)) == refused
    assert again.ask(code, body=with_delays("b", 20)).code == 0
    assert again.ask(code, body=with_delays("a", 10)).code == 0
    assert again.ask(code, body=with_delays("b", 100)).code == 0
    again.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "b"})
    assert again.ask(code, body=with_delays("c", 100)).code == 0

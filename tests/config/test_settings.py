"""The settings of broker and name server: Apache's keys, Apache's defaults, documented, and really used."""

import ast
import logging
import re
from pathlib import Path

import msgspec
import pytest

from skylark.broker import config as broker_config
from skylark.broker.config import BrokerConfig, BrokerRole, FlushDiskType
from skylark.config.apache_keys import BROKER_KEYS, NAMESRV_KEYS, PROXY_KEYS
from skylark.config.properties import ConfigError, allowed_values, parse, render
from skylark.filterserver.config import FiltersrvConfig
from skylark.nameserver import config as namesrv_config
from skylark.nameserver.config import NamesrvConfig

ROOT = Path(__file__).parents[2]

RECORDS: list[tuple[type[msgspec.Struct], frozenset[str], frozenset[str]]] = [
    (BrokerConfig, BROKER_KEYS | PROXY_KEYS, broker_config.UPDATABLE_KEYS),
    (NamesrvConfig, NAMESRV_KEYS, namesrv_config.UPDATABLE_KEYS),
    # Apache has no filter server any more: the keys are those that it had, and limits of our own.
    (FiltersrvConfig, frozenset(field.encode_name for field in msgspec.structs.fields(FiltersrvConfig)), frozenset()),
]
each_record = pytest.mark.parametrize(("record", "apache_keys", "updatable"), RECORDS)


def _keys(record: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(record)}


@each_record
def test_every_key_is_apaches(
    record: type[msgspec.Struct], apache_keys: frozenset[str], updatable: frozenset[str]
) -> None:
    assert _keys(record) <= apache_keys
    assert updatable <= _keys(record)


def test_addresses_paths_and_identity_cannot_be_updated() -> None:
    for key in broker_config.UPDATABLE_KEYS | namesrv_config.UPDATABLE_KEYS:
        assert not re.search(r"Path|Addr|Port|IP\d|brokerName|brokerId|brokerCluster", key)


@pytest.mark.parametrize(("load", "record"), [(broker_config.load, BrokerConfig), (namesrv_config.load, NamesrvConfig)])
def test_defaults_fit_their_own_rules(load, record, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "all.conf"
    path.write_text(render(record()))
    assert load(path) == record()
    assert not caplog.records


def test_a_usual_broker_conf(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(
        "brokerClusterName = DefaultCluster\nbrokerName = broker-a\nbrokerId = 0\ndeleteWhen = 04\n"
        "fileReservedTime = 48\nbrokerRole = ASYNC_MASTER\nflushDiskType = SYNC_FLUSH\nbrokerIP1=10.1.2.3\n"
        "enableControllerMode=false\n"
    )
    config = broker_config.load(path)
    assert config.broker_name == "broker-a"
    assert config.file_reserved_time == 48
    assert config.broker_role is BrokerRole.ASYNC_MASTER
    assert config.flush_disk_type is FlushDiskType.SYNC_FLUSH
    assert config.broker_ip1 == "10.1.2.3"
    assert not caplog.records


@pytest.mark.parametrize(
    "line",
    [
        "aclEnable=true",
        "authenticationEnabled=true",
        "authorizationEnabled = TRUE",
        "enableDLegerCommitLog=true",
        "inSyncReplicas=2",
        "brokerRole=SLAVE",
        "storeType=defaultRocksDB",
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match=r"b\.conf: \w+='\w+' is not supported yet: expected"):
        broker_config.from_mapping(parse(line), source="b.conf")


def test_a_promise_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "b.conf"
    path.write_text("brokerName=a\naclEnable=true\n")
    with pytest.raises(ConfigError, match=r"b\.conf line 2: aclEnable='true' is not supported yet: expected false"):
        broker_config.load(path)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "storePathCommitLog=/a/commitlog,/b/commitlog",
            "is several directories.* into one, and set storePathCommitLog",
        ),
        ("readOnlyCommitLogStorePaths=/old", "not supported yet: expected nothing; .* set storePathCommitLog to that"),
        ("messageStorePlugIn=org.apache.rocketmq.tieredstore.TieredMessageStore", "expected nothing; .*plug-in"),
        ("configManagerVersion=v2", "expected v1; .*skylark fetch-tables HOST:PORT --store DIR.* move the RocksDB"),
        ("storeType=defaultRocksDB", "expected default; .*skylark fetch-tables .* built again from the log"),
        ("transRocksDBEnable=true", "expected false; .* end all transactions"),
        ("enableLmq=true", "expected false"),
    ],
)
def test_where_apache_keeps_things_elsewhere_the_refusal_says_what_to_do(line: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as refused:
        broker_config.from_mapping(parse(line), source="b.conf")
    assert "\n" not in str(refused.value)


def test_apaches_defaults_for_other_ways_of_keeping_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    text = "messageStorePlugIn=\nreadOnlyCommitLogStorePaths=\nconfigManagerVersion=v1\nstoreType=default\n"
    broker_config.from_mapping(parse(text + "storePathCommitLog=/a/commitlog\n"), source="b.conf")
    assert not caplog.records


def test_a_key_that_is_served_in_another_way_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        broker_config.from_mapping({"enableConsumeQueueExt": "true"}, source="b.conf")
    assert "b.conf: enableConsumeQueueExt: the tags in consumequeue_ext are read" in caplog.text
    assert "ignores" not in caplog.text


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("deleteWhen=4", "4"),
        ("deleteWhen=4;16", "4;16"),
        ("deleteWhen=04;9;23;", "04;9;23;"),
        ("diskMaxUsedSpaceRatio=99", 99),
        ("diskMaxUsedSpaceRatio=120", 120),
        ("diskSpaceWarningLevelRatio=-1", -1),
        ("fileReservedTime=0", 0),
        ("brokerPermission=4", 4),
        ("brokerIP1=fe80::1", "fe80::1"),
    ],
)
def test_what_apache_takes_is_taken(line: str, value: object, caplog: pytest.LogCaptureFixture) -> None:
    config = broker_config.from_mapping(parse(line), source="b.conf")
    (name,) = [field.name for field in msgspec.structs.fields(config) if field.encode_name == line.split("=")[0]]
    assert getattr(config, name) == value
    assert not caplog.records


@pytest.mark.parametrize(
    "line", ["deleteWhen=24", "deleteWhen=;4", "deleteWhen=4,16", "brokerPermission=3", "brokerIP1=http://a"]
)
def test_what_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed: expected"):
        broker_config.from_mapping(parse(line), source="b.conf")


@pytest.mark.parametrize(("given", "taken"), [(500, 10_000), (9_999, 10_000), (45_000, 45_000), (120_000, 60_000)])
def test_the_period_of_registrations_is_bounded_as_apache_does(
    given: int, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = broker_config.from_mapping({"registerNameServerPeriod": str(given)}, source="b.conf")
    assert config.register_name_server_period == taken
    said = [f"b.conf: registerNameServerPeriod={given} is taken as {taken}, as Apache's broker does"]
    assert caplog.messages == (said if given != taken else [])


def test_a_promise_that_is_kept_by_half_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "b.conf"
    path.write_text("brokerRole=SYNC_MASTER\nmaxMessageSize=33554432\n")
    config = broker_config.load(path)
    assert (config.broker_role, config.max_message_size) == (BrokerRole.SYNC_MASTER, 32 << 20)
    assert "b.conf line 1: brokerRole=SYNC_MASTER promises a copy on a slave, and there is no replication yet" in (
        caplog.text
    )
    assert "b.conf line 2: maxMessageSize=33554432 is more than a request can carry" in caplog.text


def test_keys_of_articles_are_explained_and_no_others_proposed(caplog: pytest.LogCaptureFixture) -> None:
    text = (
        "storePathConsumeQueue=/x\nstorePathIndex=/x\nstoreCheckpoint=/x\nabortFile=/x\nmapedFileSizeCommitLog=1\n"
        "mapedFileSizeConsumeQueue=1\ncheckTransactionMessageEnable=false\nfilterServerNums=1\n"
    )
    broker_config.from_mapping(parse(text), source="b.conf")
    assert len(caplog.messages) == 8
    assert "b.conf: storePathConsumeQueue: Apache's broker does not read this key: consume queues are in" in caplog.text
    assert "did you mean" not in caplog.text
    caplog.clear()
    broker_config.from_mapping({"consumeQueueDir": "x", "brokerNam": "x"}, source="b.conf")
    assert caplog.messages == [
        "b.conf: unknown key consumeQueueDir",
        "b.conf: unknown key brokerNam (did you mean brokerName?)",
    ]


def test_there_is_no_address_for_slaves_yet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        broker_config.from_mapping({"haListenPort": "70000", "brokerIP2": "10.0.0.1"}, source="b.conf")
    for key in ("haListenPort", "brokerIP2"):
        assert f"b.conf: {key}: there is no replication yet" in caplog.text


@pytest.mark.parametrize("keys", [broker_config.NO_EFFECT_KEYS, namesrv_config.NO_EFFECT_KEYS])
def test_what_is_set_for_nothing_names_no_place_and_promises_nothing(keys: frozenset[str]) -> None:
    assert keys
    for key in keys:
        assert not re.search(r"Path|Addr|Port$|IP\d|brokerName|brokerId|brokerCluster|TLS", key)
    assert not keys & {"aclEnable", "authenticationEnabled", "enableDLegerCommitLog", "configStorePath", "rocketmqHome"}


def test_servers_keep_their_files_where_apaches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert BrokerConfig().store_path_root_dir == "/home/me/store"
    assert NamesrvConfig().kv_config_path == "/home/me/namesrv/kvConfig.json"


def test_a_masters_id_is_zero(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = broker_config.from_mapping({"brokerId": "3"}, source="b.conf")
    assert config.broker_id == 0
    assert "brokerId=3 is taken as 0" in caplog.text


@each_record
def test_the_documentation_lists_what_there_is(
    record: type[msgspec.Struct],
    apache_keys: frozenset[str],
    updatable: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Key, default, what is allowed and whether it can be updated, as `docs/configuration.md` says it."""
    monkeypatch.setenv("HOME", "$HOME")
    rows: dict[str, tuple[str, str, str]] = {}
    section = (ROOT / "docs" / "configuration.md").read_text().split(f"<!-- {record.__name__} -->")[1].split("\n## ")[0]
    for key, default, allowed, update in re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|", section, re.MULTILINE
    ):
        rows[key] = (default, allowed, update)
    defaults = parse(render(record(**({"broker_name": "the host name"} if record is BrokerConfig else {}))))
    expected = {
        field.encode_name: (
            f"`{defaults[field.encode_name]}`" if defaults[field.encode_name] else "",
            allowed_values(field),
            "yes" if field.encode_name in updatable else "",
        )
        for field in msgspec.structs.fields(record)
    }
    assert rows == expected


@each_record
def test_every_setting_is_read_somewhere(
    record: type[msgspec.Struct], apache_keys: frozenset[str], updatable: frozenset[str]
) -> None:
    """A key that is accepted and then has no effect would be a lie; Apache's keys without effect are warned about."""
    used: set[str] = set()
    for path in (ROOT / "src" / "skylark").rglob("*.py"):
        if path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(node.attr)
    # Without replication a broker's role makes no difference, and its one value that would is refused.
    unread = {field.name for field in msgspec.structs.fields(record)} - used - {"broker_role"}
    assert not unread


def test_the_name_servers_of_a_broker_are_kept_in_one_form(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("namesrvAddr=http://a:9876/, b:9876;")
    config = broker_config.load(path)
    assert config.namesrv_addr == "a:9876;b:9876"
    broker_config.set_name_servers(config, "c:1,http://d:2", source="-n")
    assert config.namesrv_addr == "c:1;d:2"
    for blank in ("", " "):
        with pytest.raises(ConfigError, match=r"^-n: no name server is given"):
            broker_config.set_name_servers(config, blank, source="-n")
    path.write_text("namesrvAddr= \n")
    assert broker_config.load(path).namesrv_addr == ""


@pytest.mark.parametrize("unusable", ["a..b:1", "a:99999", "nowhere", ";", "a:1;b:"])
def test_name_servers_that_cannot_be_are_refused_with_their_line(unusable: str, tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerName=x\nnamesrvAddr={unusable}")
    with pytest.raises(ConfigError, match=r"broker\.conf line 2: .*(host|port)"):
        broker_config.load(path)

"""The `.properties` reader against what Java made of the same texts, and binding to typed settings."""

import doctest
import enum
import json
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, field

from skylark.config import properties
from skylark.config.properties import ConfigError, bind, parse, read, render, update

# Each case is a text and what Java 17's Properties.load gave for it; null where it refused the text.
JAVA_CASES = json.loads((Path(__file__).parent / "java_properties.json").read_text())


class Colour(enum.StrEnum):
    RED = "RED"
    BLUE = "BLUE"


class Settings(msgspec.Struct, rename="camel", kw_only=True):
    listen_port: Annotated[int, Meta(ge=0, le=65535)] = 10911
    keep_alive: bool = True
    colour: Colour = Colour.RED
    ratio: Annotated[float, Meta(ge=0)] = 0.5
    broker_ip1: str = field(default="", name="brokerIP1")
    delete_when: Annotated[str, Meta(pattern=r"^\d\d$", description="an hour such as 04")] = "04"


@pytest.mark.parametrize(("text", "expected"), JAVA_CASES)
def test_reads_what_java_reads(text: str, expected: dict[str, str] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match=r"bad escape \\u"):
            parse(text)
    else:
        assert parse(text) == expected


def test_reads_an_apache_broker_conf() -> None:
    text = """
# Licensed to the ASF
brokerClusterName = DefaultCluster
brokerName=broker-a
namesrvAddr=10.0.0.1:9876;\\
            10.0.0.2:9876
storePathRootDir=${user.home}/store
deleteWhen: 04
"""
    assert parse(text) == {
        "brokerClusterName": "DefaultCluster",
        "brokerName": "broker-a",
        "namesrvAddr": "10.0.0.1:9876;10.0.0.2:9876",
        "storePathRootDir": "${user.home}/store",
        "deleteWhen": "04",
    }


def _escape(text: str) -> str:
    """Every character as the escape that Java's own writer would be free to use."""
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


@given(st.dictionaries(st.text(), st.text()))
def test_escapes_give_back_any_text(mapping: dict[str, str]) -> None:
    text = "\n".join(f"{_escape(key)}={_escape(value)}" for key, value in mapping.items() if key or value)
    assert parse(text) == {key: value for key, value in mapping.items() if key or value}


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        result = parse(text)
    except ConfigError:
        return
    for key, value in result.items():
        (key + value).encode()  # no half of a surrogate pair survives


def test_binds_every_kind_of_value() -> None:
    settings = bind(
        Settings,
        {"listenPort": " 0 ", "keepAlive": "FALSE", "colour": "BLUE", "ratio": "1.5", "brokerIP1": "10.0.0.7"},
        source="x.conf",
    )
    assert settings == Settings(listen_port=0, keep_alive=False, colour=Colour.BLUE, ratio=1.5, broker_ip1="10.0.0.7")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("listenPort", "70000", "a whole number from 0 to 65535"),
        ("listenPort", "-1", "a whole number from 0 to 65535"),
        ("listenPort", "8 0", "a whole number from 0 to 65535"),
        ("listenPort", "", "a whole number from 0 to 65535"),
        ("listenPort", "1e3x", "a whole number from 0 to 65535"),
        ("keepAlive", "yes", "true or false"),
        ("keepAlive", "1", "true or false"),
        ("colour", "GREEN", "RED or BLUE"),
        ("ratio", "-0.1", "a number, 0 or more"),
        ("deleteWhen", "4", "an hour such as 04"),
    ],
)
def test_a_bad_value_names_file_key_value_and_what_is_allowed(key: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(Settings, {key: value}, source="broker.conf")
    assert str(caught.value) == f"broker.conf: {key}={value!r} is not allowed: expected {allowed}"


def test_keys_without_effect_are_warned_about_by_name(caplog: pytest.LogCaptureFixture) -> None:
    mapping = {"listenport": "1", "timerWheelEnable": "true", "zzz": "1"}
    with caplog.at_level(logging.WARNING):
        assert bind(Settings, mapping, source="b.conf", ignored={"timerWheelEnable"}) == Settings()
    assert [record.getMessage() for record in caplog.records] == [
        "b.conf: unknown key listenport (did you mean listenPort?)",
        "b.conf: timerWheelEnable is an Apache RocketMQ setting that Skylark ignores",
        "b.conf: unknown key zzz",
    ]


def test_what_is_rendered_binds_to_the_same(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(keep_alive=False, colour=Colour.BLUE, broker_ip1="10.0.0.7")
    text = render(settings)
    assert "keepAlive=false\n" in text
    assert "brokerIP1=10.0.0.7\n" in text
    assert bind(Settings, parse(text), source="rendered") == settings
    assert not caplog.records


def test_update_changes_allowed_keys_and_tells_which() -> None:
    settings = Settings()
    changed = update(settings, {"listenPort": "1", "keepAlive": "true"}, allowed={"listenPort", "keepAlive"})
    assert changed == {"listenPort": "1"}
    assert settings.listen_port == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"listenPort": "1", "brokerIP1": "x"}, "brokerIP1 cannot be changed while the server runs"),
        ({"listenPort": "1", "listenPrt": "2"}, r"unknown key listenPrt \(did you mean listenPort\?\)"),
        ({"listenPort": "1", "keepAlive": "perhaps"}, "keepAlive='perhaps' is not allowed: expected true or false"),
    ],
)
def test_an_update_is_all_or_nothing(changes: dict[str, str], message: str) -> None:
    settings = Settings()
    with pytest.raises(ConfigError, match=message):
        update(settings, changes, allowed={"listenPort", "keepAlive"})
    assert settings == Settings()


def test_reads_utf8_and_falls_back_to_what_java_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.conf"
    path.write_bytes(b"\xef\xbb\xbfname=" + "Zürich".encode())
    assert read(path) == {"name": "Zürich"}
    path.write_bytes("name=Zürich".encode("latin-1"))
    assert read(path) == {"name": "Zürich"}


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.conf: No such file or directory"):
        read(tmp_path / "absent.conf")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read(tmp_path)
    bad = tmp_path / "bad.conf"
    bad.write_text("a=\\uzzzz")
    with pytest.raises(ConfigError, match=r"bad\.conf line 1: bad escape \\uzzzz"):
        read(bad)
    bad.write_bytes(b"#" * (properties.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="is this a configuration file"):
        read(bad)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{\n  "brokerName": "a"\n}\n', "line 1: '{' is not a key: this looks like JSON"),
        (b'# ours\n\n{"brokerName":"a"}', "line 3: '{\"brokerName\"' is not a key: this looks like JSON"),
        (b'["a", "b"]', "line 1: '[\"a\",' is not a key: this looks like JSON"),
        (b'a=1\r\n"brokerName": "a"', "line 2: '\"brokerName\"' is not a key: this looks like JSON"),
        (b"a=1\\\n2\n<xml>", "line 3: '<xml>' is not a key: this looks like XML"),
        (b'"' + 100 * b"x", "line 1: '\"xxxxxxxxxxxxxxxxxxx' is not a key: this looks like JSON"),
        (b"[1]", "line 1: '[1]' is not a key: this looks like JSON"),
        (b"[\n{}\n]", "line 1: '[' is not a key: this looks like JSON"),
        (b"a=1\n<<<<<<< HEAD\n", "line 2: '<<<<<<<' is a conflict marker of git: choose one of the two versions"),
        (b"a=1\nb=2\0\n", "line 2: this is not a text file"),
        (b"\x1f\x8b\x08\x08abc", "line 1: this is not a text file"),
        (b"a=1\n\x95\x80\x04=2", "line 2: this is not a text file"),
        ("a=1\n".encode("utf-16"), "line 1: this is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_line(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read(path)
    expected = "" if "UTF-16" in told else "; Apache's .properties format is expected, such as brokerName=broker-a"
    assert str(caught.value) == f"{path} {told}{expected}"


def test_what_java_reads_is_never_refused_for_its_looks(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    # Also sections of .ini files, keys that are escaped, control characters in comments and values, nothing at all.
    more = [
        ["[broker]\n[my section]\na=1", {"[broker]": "", "[my": "section]", "a": "1"}],
        ["\\{a=b\n\\u0001=c", {"{a": "b", "\x01": "c"}],
        ["#\x07{\na={\x07}", {"a": "{\x07}"}],
        ["---\nbrokerName: a", {"---": "", "brokerName": "a"}],
        ["", {}],
    ]
    for text, expected in [*JAVA_CASES, *more]:
        if expected is not None:
            path.write_bytes(text.encode())
            assert read(path) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"brokerName=x\r\n\x1a", {"brokerName": "x"}),
        (b"# \0\na=1", {"a": "1"}),
        (b"caf\xe9\x80=\x93b\x94", {"caf\xe9\x80": "\x93b\x94"}),
        (b"[ broker ]\n[a/b]", {"[": "broker ]", "[a/b]": ""}),
        (b"[a].b=1", {"[a].b": "1"}),
    ],
)
def test_odd_bytes_are_read_as_java_reads_them(data: bytes, expected: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_bytes(data)
    assert read(path) == expected


def test_a_section_is_called_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("[ listen ]\n[listenPort]\nlistenPort=1")
    bind(Settings, read(path), source="broker.conf")
    said = "is a section, which Apache ignores: the keys below it count as all others do"
    assert caplog.messages == [f"broker.conf line 1: [ listen ] {said}", f"broker.conf line 2: [listenPort] {said}"]


def test_a_value_of_a_file_is_complained_about_with_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("# ours\nzzz=1\n\nlistenPort=\\\n high\n")
    with pytest.raises(ConfigError) as caught:
        bind(Settings, read(path), source="broker.conf")
    assert str(caught.value).startswith("broker.conf line 4: listenPort='high' is not allowed")
    assert caplog.messages == ["broker.conf line 2: unknown key zzz"]


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="/dev/zero line 1: this is not a text file"):
        read(Path("/dev/zero"))


def test_the_example_in_the_module_runs() -> None:
    assert doctest.testmod(properties).failed == 0


def test_settings_of_a_request_are_no_longer_than_settings_are() -> None:
    assert len(parse("a\\\n" * 20_000)) == 1
    with pytest.raises(ConfigError, match="65537 characters of settings, 65536 are allowed"):
        parse("x" * 65_537)


def test_a_key_that_is_too_long_to_be_misspelt_is_compared_with_none() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key x{100}\.\.\., which has 60000 characters$"):
        update(Settings(), {"x" * 60_000: "1"}, allowed={"listenPort"})

"""The KV config and its file."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from skylark.config.properties import ConfigError
from skylark.nameserver import kvconfig
from skylark.nameserver.kvconfig import KVConfig, TooLarge


def loaded(path: Path) -> KVConfig:
    kv = KVConfig(path)
    kv.load()
    return kv


def test_values_are_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kvConfig.json"

    async def run() -> None:
        kv = loaded(path)
        await kv.put("ORDER_TOPIC_CONFIG", "TopicTest", "broker-a:4")
        await kv.put("ns", "ключ", 'значение"q"')
        assert json.loads(path.read_text()) == {
            "configTable": {"ORDER_TOPIC_CONFIG": {"TopicTest": "broker-a:4"}, "ns": {"ключ": 'значение"q"'}}
        }
        await kv.delete("ns", "ключ")
        await kv.delete("ns", "nothing")
        await kv.delete("nowhere", "nothing")

    asyncio.run(run())
    kv = loaded(path)
    assert kv.get("ORDER_TOPIC_CONFIG", "TopicTest") == "broker-a:4"
    assert kv.get("ns", "ключ") is None
    assert kv.namespace("ns") == {}
    assert kv.namespace("nowhere") is None


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"

    async def run() -> None:
        kv = loaded(path)
        await asyncio.gather(*(kv.put("ns", str(i), str(i)) for i in range(20)))

    asyncio.run(run())
    assert loaded(path).namespace("ns") == {str(i): str(i) for i in range(20)}


def test_changes_that_wait_for_the_disk_go_there_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvConfig.json"
    written: list[bytes] = []
    replace = KVConfig._replace
    monkeypatch.setattr(KVConfig, "_replace", lambda self, content: (written.append(content), replace(self, content)))

    async def run() -> None:
        kv = loaded(path)
        await asyncio.gather(*(kv.put("ns", str(i), str(i)) for i in range(20)))

    asyncio.run(run())
    assert len(written) == 2
    assert loaded(path).namespace("ns") == {str(i): str(i) for i in range(20)}


def test_a_change_that_nobody_waits_for_any_more_is_written_to_its_end_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvConfig.json"
    begun, go_on = threading.Event(), threading.Event()
    done: list[bytes] = []
    replace = KVConfig._replace

    def held(self: KVConfig, content: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        replace(self, content)
        done.append(path.read_bytes())

    monkeypatch.setattr(KVConfig, "_replace", held)

    async def run() -> None:
        kv = loaded(path)
        first = asyncio.create_task(kv.put("ns", "a", "1"))
        await asyncio.to_thread(begun.wait, 60)
        begun.clear()
        first.cancel()
        second = asyncio.create_task(kv.put("ns", "b", "2"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not begun.is_set()
        go_on.set()
        await second
        assert first.cancelled()

    asyncio.run(run())
    assert [json.loads(content)["configTable"]["ns"] for content in done] == [{"a": "1"}, {"a": "1", "b": "2"}]


def test_a_file_of_apaches_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text('{"configTable":{"ns1":{"k1":"v1","k2":null},"empty":{}}}')
    kv = loaded(path)
    assert kv.namespace("ns1") == {"k1": "v1"}
    assert kv.namespace("empty") == {}


def test_a_damaged_file_is_replaced_by_its_backup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kvConfig.json"

    async def run() -> None:
        kv = loaded(path)
        await kv.put("ns", "a", "1")
        await kv.put("ns", "b", "2")

    asyncio.run(run())
    path.write_bytes(path.read_bytes()[:-5])
    backup = path.with_name("kvConfig.json.bak").read_bytes()
    kv = loaded(path)
    assert kv.namespace("ns") == {"a": "1"}
    assert "damaged" in caplog.text
    asyncio.run(kv.put("ns", "c", "3"))
    assert path.with_name("kvConfig.json.bak").read_bytes() == backup
    assert loaded(path).namespace("ns") == {"a": "1", "c": "3"}


def test_a_damaged_file_without_a_backup_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"kvConfig\.json"):
        loaded(path)
    assert path.read_text() == "{"


def test_the_table_is_bounded_by_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvconfig, "MAX_BYTES", 2_000)

    async def run() -> None:
        kv = loaded(tmp_path / "kvConfig.json")
        await kv.put("x", "a", "1" * 500)
        await kv.put("y", "a", "1" * 500)
        for value in ("1", "1" * 5_000):
            with pytest.raises(TooLarge):
                await kv.put("z", "a", value)
        with pytest.raises(TooLarge):
            await kv.put("y", "a", "2" * 900)
        await kv.put("y", "a", "2" * 400)
        await kv.delete("x", "a")
        assert kv.namespace("x") == {}
        await kv.put("z", "a", "1")

    asyncio.run(run())
    kv = loaded(tmp_path / "kvConfig.json")
    with pytest.raises(TooLarge):
        asyncio.run(kv.put("z", "b", "1" * 1_000))


def test_namespaces_without_keys_do_not_fill_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvconfig, "MAX_BYTES", 2_000)

    async def run() -> None:
        kv = loaded(tmp_path / "kvConfig.json")
        for number in range(10):
            await kv.put(f"{number}", "a", "1")
            await kv.delete(f"{number}", "a")
        assert kv.namespace("9") == {}
        assert kv.namespace("0") is None

    asyncio.run(run())


def test_an_answer_is_kept_until_its_namespace_changes(tmp_path: Path) -> None:
    async def main() -> None:
        config = KVConfig(tmp_path / "kvConfig.json")
        assert config.encoded("n") is None
        await config.put("n", "a", "1")
        await config.put("other", "b", "1")
        body = config.encoded("n")
        assert body == b'{"table":{"a":"1"}}'
        await config.delete("other", "b")
        assert config.encoded("n") is body
        await config.put("n", "b", "2")
        assert config.encoded("n") == b'{"table":{"a":"1","b":"2"}}'
        await config.delete("n", "a")
        await config.delete("n", "b")
        assert config.encoded("n") == b'{"table":{}}'

    asyncio.run(main())

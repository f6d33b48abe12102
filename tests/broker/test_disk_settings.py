"""What a broker's settings say about a full disk reaches its store, also while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.live import live_broker
from skylark.broker.app import _apply_to_store, _store_config
from skylark.broker.config import UPDATABLE_KEYS, BrokerConfig, from_mapping
from skylark.store import StoreConfig
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.records import encode_host

SETTINGS = {
    "cleanFileForciblyEnable": "false",
    "diskSpaceCleanForciblyRatio": "40",
    "diskSpaceWarningLevelRatio": "50",
    "diskMaxUsedSpaceRatio": "30",
}


def of_disk(config: StoreConfig) -> tuple[bool, int, int, int]:
    return (
        config.clean_forcibly,
        config.disk_clean_forcibly_ratio,
        config.disk_warning_ratio,
        config.disk_max_used_ratio,
    )


def test_the_store_has_apaches_defaults_and_what_is_set() -> None:
    host = encode_host("127.0.0.1", 1)
    config = _store_config(BrokerConfig(broker_name="b"), host)
    assert of_disk(config) == (True, 85, 90, 75)
    _apply_to_store(config, from_mapping(SETTINGS, source="broker.conf"))
    assert of_disk(config) == (False, 40, 50, 30)
    assert set(SETTINGS) <= UPDATABLE_KEYS


def test_they_can_be_changed_while_the_broker_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            body = "\n".join(f"{key}={value}" for key, value in SETTINGS.items()).encode()
            answer = await broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body)
            assert answer.code == ResponseCode.SUCCESS
            shown = (await broker.ask(RequestCode.GET_BROKER_CONFIG)).body.decode()
            assert {f"{key}={value}" for key, value in SETTINGS.items()} <= set(shown.split("\n"))

    asyncio.run(run())

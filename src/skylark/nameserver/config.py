"""What a name server can be told: the keys of Apache's `namesrv.conf` that Skylark honours, with its defaults.

The defaults are Apache 5.5.0's but for `listenPort`: it is 9876, which Apache's start script sets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, field

from skylark.config import properties, without_effect
from skylark.config.apache_keys import NAMESRV_KEYS
from skylark.config.hosts import Host
from skylark.config.places import at_home

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class NamesrvConfig(msgspec.Struct, rename="camel", kw_only=True):
    """One name server's settings. Mutable, because operators change some while it runs (`UPDATABLE_KEYS`)."""

    bind_address: Host = "0.0.0.0"
    listen_port: Annotated[int, Meta(ge=0, le=65535)] = 9876
    kv_config_path: Annotated[str, Meta(min_length=1, description="a file")] = field(
        default_factory=lambda: at_home("namesrv", "kvConfig.json")
    )
    scan_not_active_broker_interval: Count = 5_000
    server_channel_max_idle_time_seconds: Count = 120
    order_message_enable: bool = False
    return_order_topic_config_to_broker: bool = True
    enable_topic_list: bool = True
    enable_all_topic_list: bool = True
    delete_topic_with_broker_registration: bool = False


# What an operator may change while the name server runs; addresses and paths are not in it.
UPDATABLE_KEYS = frozenset(
    """
    deleteTopicWithBrokerRegistration enableAllTopicList enableTopicList orderMessageEnable
    returnOrderTopicConfigToBroker
    """.split()
)

NO_EFFECT_KEYS = without_effect.harmless(NAMESRV_KEYS) - properties.keys(NamesrvConfig)
"""Apache's keys that an operator may set while the name server runs, for nothing."""


def load(path: Path) -> NamesrvConfig:
    """The settings in the `.properties` file at `path`."""
    return from_mapping(properties.read(path), source=str(path))


def from_mapping(mapping: Mapping[str, str], *, source: str) -> NamesrvConfig:
    """The settings in `mapping`; raises `ConfigError` for what cannot be, warns about what has no effect."""
    return properties.bind(NamesrvConfig, mapping, source=source, ignored=NAMESRV_KEYS)

"""What a filter server can be told: the keys of the old `mqfiltersrv` that Skylark honours, and limits of its own.

`clientUploadFilterClassEnable` is false here: whoever may upload a class runs code of their own on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from skylark.config import properties
from skylark.config.hosts import Host

Address = Annotated[str, Meta(pattern=r"^[^;\s]+:\d{1,5}$", description="host:port")]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


# Keys of Apache's filter server that have no effect here.
_IGNORED = frozenset(
    """
    compressMsgBodyOverHowmuch filterClassRepertoryUrl fsServerAsyncSemaphoreValue fsServerCallbackExecutorThreads
    fsServerWorkerThreads namesrvAddr rocketmqHome zipCompressLevel
    """.split()
)


class FiltersrvConfig(msgspec.Struct, rename="camel", kw_only=True):
    connect_which_broker: Address = "127.0.0.1:10911"
    filter_server_ip: Host = msgspec.field(default="", name="filterServerIP")
    bind_address: Host = "0.0.0.0"
    listen_port: Annotated[int, Meta(ge=0, le=65535, description="a port, or 0 for a free one")] = 0
    client_upload_filter_class_enable: bool = False
    max_filter_classes: Annotated[int, Meta(ge=1, le=1000)] = 32
    filter_timeout_millis: Annotated[int, Meta(ge=10, le=60_000)] = 1_000
    filter_max_memory_megabytes: Annotated[int, Meta(ge=64, le=65_536)] = 256


def load(path: Path) -> FiltersrvConfig:
    """The settings in the `.properties` file at `path`."""
    return properties.bind(FiltersrvConfig, properties.read(path), source=str(path), ignored=_IGNORED)

"""A RocketMQ cluster inside the process of a test, for the tests of programs that use one.

    async with LocalCluster() as cluster:
        async with Producer(cluster.name_servers, group="orders") as producer:
            await producer.send("orders", b"hello")

`with LocalCluster() as cluster` is the same for blocking code. Each server can be stopped and started again:
`await cluster.broker.stop()`, `await cluster.name_server.start()`; `cluster.run(cluster.broker.stop)` where nothing can
be awaited. Installing Skylark also gives pytest the fixture
`skylark_cluster`: a fresh cluster for each test that asks for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skylark.testing.cluster import LocalBroker, LocalCluster, LocalNameServer

__all__ = ["LocalBroker", "LocalCluster", "LocalNameServer"]


def __getattr__(name: str) -> object:
    # pytest imports this package for its plugin in every run, and most runs need no servers.
    if name in __all__:
        from skylark.testing import cluster

        return getattr(cluster, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

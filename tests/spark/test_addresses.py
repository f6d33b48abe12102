"""The addresses of servers, as Spark's source and sink take them. No Spark is started."""

from __future__ import annotations

import pytest

from skylark.client.errors import NotANameServer, NotReachable
from skylark.spark.cluster import Cluster
from skylark.spark.options import BadOption, read_options
from skylark.testing import LocalCluster


@pytest.mark.parametrize("given", [" ", "xx", "a:1;b:", "a..b:9876", "a:99999"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(BadOption, match=f"nameServer='{given}'"):
        read_options({"nameServer": given, "subscribe": "orders"})


def test_a_broker_is_no_name_server() -> None:
    with LocalCluster() as cluster, Cluster(cluster.broker.address, 10.0) as blocking:
        said = f"{cluster.broker.address} is a broker, not a name server"
        with pytest.raises(NotANameServer, match=said):
            blocking.route("orders")
        with pytest.raises(NotANameServer, match=said):
            blocking.brokers()


def test_a_broker_among_the_name_servers_is_no_harm() -> None:
    with LocalCluster() as local, Cluster(f"{local.broker.address};{local.name_servers}", 10.0) as cluster:
        assert cluster.brokers()


def test_a_broker_whose_address_makes_no_sense_is_not_reachable() -> None:
    with Cluster("127.0.0.1:1", 1.0) as cluster, pytest.raises(NotReachable, match="neither a name nor an IP"):
        cluster.retrying(lambda: cluster._connection("a..b:9876"))

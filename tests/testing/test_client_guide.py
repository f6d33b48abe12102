"""Every example of docs/client.md runs, against a cluster in this process that somebody keeps sending to."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skylark import OutgoingMessage
from skylark.client.sync import Producer
from skylark.testing import LocalCluster

GUIDE = Path(__file__).parents[2] / "docs" / "client.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = {"recallMessageEnable": "true"}
    with LocalCluster(topics={"orders": 4, "metrics": 1}, settings=settings) as cluster:
        # For consumers that begin at the start, and take several at once.
        with Producer(cluster.name_servers, group="feeders") as producer:
            producer.send_batch("orders", [OutgoingMessage(b"an order", tag="new")] * 16)
        yield cluster


@pytest.fixture
def orders(cluster: LocalCluster) -> Iterator[None]:
    """New messages for consumers that begin at the end."""
    done = threading.Event()

    def send() -> None:
        with Producer(cluster.name_servers, group="feeders") as producer:
            while not done.wait(0.05):
                producer.send("orders", b"an order", tag="new")

    thread = threading.Thread(target=send)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("source", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs(source: str, cluster: LocalCluster, skylark_cluster: LocalCluster) -> None:
    printed: list[Any] = []
    names: dict[str, Any] = {"__name__": "example"}

    def show(*values: Any) -> None:
        printed.append(values)
        if "app" in names:
            names["app"].stop()

    names["print"] = show
    exec(compile(source.replace("localhost:9876", cluster.name_servers), str(GUIDE), "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    for test in tests:
        test(skylark_cluster)
    assert printed or tests


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 10

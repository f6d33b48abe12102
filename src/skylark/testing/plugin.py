"""The pytest plugin that comes with Skylark: every project that has it installed gets these fixtures.

pytest reads this module at the start of every run, so it imports the servers only when a test asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from skylark.testing.cluster import LocalCluster


@pytest.fixture
def skylark_cluster() -> Iterator[LocalCluster]:
    """A fresh name server and broker for this test, in a thread of their own: use `skylark_cluster.name_servers`."""
    from skylark.testing.cluster import LocalCluster

    with LocalCluster() as cluster:
        yield cluster

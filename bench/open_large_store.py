"""How long a large store takes to open, and how much memory: after a clean stop and after a crash.

    python bench/open_large_store.py --gigabytes 20 --directory /path/with/room

Writes a store of that size (4 KiB bodies, 64 queues), opens it in a process of its own each time, and removes it.
Memory is what the process holds besides mapped pages (RssAnon). A crash is the marker that a killed broker leaves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import track

from skylark.store import Store, StoreConfig
from skylark.wire.message import Message, encode_host

BODY = os.urandom(4096)
QUEUES = 64

OPEN = """
import sys, time
from pathlib import Path
from skylark.store import Store, StoreConfig
began = time.perf_counter()
store = Store.open(StoreConfig(root=Path(sys.argv[1])))
seconds = time.perf_counter() - began
status = Path("/proc/self/status").read_text().split()
anonymous_mb = int(status[status.index("RssAnon:") + 1]) / 1024
messages = sum(store.max_offset(*queue) for queue in store.queues())
print(f"{seconds:.2f} s, {anonymous_mb:.0f} MB besides mapped pages, "
      f"log of {store.log_max_offset / 1e9:.1f} GB, {messages:,} messages")
store.close()
"""


def fill(root: Path, gigabytes: float) -> None:
    store = Store.open(StoreConfig(root=root))
    born_host = encode_host("127.0.0.1", 1)
    count = int(gigabytes * 1e9 / (len(BODY) + 250))
    for number in track(range(count), f"writing {gigabytes:g} GB", console=None):
        properties = {"KEYS": f"key{number}", "UNIQ_KEY": f"{number:032X}", "TAGS": "t"}
        store.append(
            Message("Large", number % QUEUES, BODY, properties, born_host=born_host), time.time_ns() // 1_000_000
        )
    store.close()


def show(what: str, root: Path) -> None:
    run = subprocess.run([sys.executable, "-c", OPEN, str(root)], capture_output=True, text=True, check=True)
    print(f"{what}: {run.stdout.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="large-store-") as directory:
        root = Path(directory)
        fill(root, options.gigabytes)
        show("after a clean stop", root)
        (root / "abort").write_text("0")
        show("after a crash", root)


if __name__ == "__main__":
    main()

"""The Python clients beside each other: bench/python_client.py, which compares them against one server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.suite.report import OFFICIAL, OURS
from bench.suite.running import ROOT, Measured, commit, now

MESSAGES = "20000"
"""Of our client in a round; the official one, which is slow, gets a fifth of them."""


def compare(rounds: int, say: Callable[[str], None]) -> dict[str, Measured]:
    """Kind of work -> messages a second of each client, round by round."""
    say("both clients against one server")
    with tempfile.TemporaryDirectory(prefix="skylark-bench-") as scratch:
        figures = Path(scratch) / "clients.json"
        program = [sys.executable, str(ROOT / "bench" / "python_client.py"), "throughput", "--messages", MESSAGES]
        done = subprocess.run(
            [*program, "--rounds", str(rounds), "--json", str(figures)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise OSError(f"{program[1]} failed:\n{done.stderr}")
        rates = json.loads(figures.read_text())
    if not rates["official"]:
        raise OSError(f"nothing to compare with:\n{done.stdout}")
    when, of = now(), commit()
    return {
        work: Measured(
            {
                OFFICIAL: [{"rate": rate} for rate in rates["official"][work]],
                OURS: [{"rate": rate} for rate in ours],
            },
            when,
            of,
        )
        for work, ours in rates["ours"].items()
    }

"""Skylark beside Apache RocketMQ 5.5.0, on one machine, by turns; `python -m bench.suite --help`.

workloads.py    what is measured, as declared values: name, measure, aim
measures.py     the kinds of measurement: prepare a server, then take a sample as often as wanted
load.py         the load generator (bench/load, in Go) and what it is asked for
java.py         Apache's own benchmark programs
contenders.py   the two servers; what their processes cost
figures.py      samples, medians, ratios, aims
running.py      rounds by turns; what is finished is kept and not measured again
report.py       tables, on the terminal and as Markdown, and the document
charts.py       the same as pictures
clients.py      the Python clients beside each other
"""

import sys
from pathlib import Path

# The servers of the interop tests are those that are measured.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "interop"))

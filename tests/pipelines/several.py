"""Runs the pipelines of some files in one Spark session, until it is told to stop: several.py FILE...

Each starts when the one before it has done a batch: Spark gives up when too many Python processes start at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from skylark.pipelines import spec
from skylark.pipelines.progress import follow_all, stopped_by_signal
from skylark.pipelines.running import start
from skylark.pipelines.session import session


def main() -> None:
    declared = [spec.read(Path(name)) for name in sys.argv[1:]]
    with session("local[4]", "several") as spark, stopped_by_signal() as stop:
        queries = []
        for each in declared:
            queries.append(start(each, spark))
            while queries[-1].isActive and queries[-1].lastProgress is None:
                time.sleep(0.05)
        follow_all(queries, titles=[each.pipeline.name for each in declared], stop=stop)


if __name__ == "__main__":
    main()

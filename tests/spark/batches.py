"""A driver without Spark that writes batch after batch as Spark's does: tasks, commit, then its own note of progress.

batches.py NAME_SERVER TOPIC GUARANTEE PROGRESS_FILE BATCHES ROWS
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import StringType, StructType

from skylark.spark.options import write_options
from skylark.spark.sink import Delivery

TASKS = 2


def main() -> None:
    name_server, topic, guarantee, file, batches, rows = sys.argv[1:]
    given = {"nameServer": name_server, "topic": topic, "deliveryGuarantee": guarantee}
    schema = StructType().add("body", StringType())
    progress = Path(file)
    first = int(progress.read_text()) if progress.exists() else 0
    for batch in range(first, int(batches)):
        sent = []
        for task in range(TASKS):
            numbers = range(batch * int(rows) + task, (batch + 1) * int(rows), TASKS)
            table = pa.RecordBatch.from_pydict({"body": pa.array([str(number) for number in numbers])})
            sent.append(Delivery(write_options(given), schema).send(iter([table]), topic, batch, task))
        Delivery(write_options(given), schema).commit(sent, batch)
        new = progress.with_suffix(".new")
        new.write_text(str(batch + 1))
        new.replace(progress)


if __name__ == "__main__":
    main()

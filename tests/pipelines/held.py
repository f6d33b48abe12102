"""The command `skylark`, which comes to a stop at a step of an archive: held.py STEP TIMES FILE ARGUMENT...

It does so when it comes to the step for the given time, and makes the file to say that it is there. Then it waits to be
killed; only while Spark is writing it goes on, since there is nothing of ours to be held.

    begun    Spark has noted which messages are in the batch
    writing  it is about to write them aside
    staged   they are written; which files they are is not
    planned  that is, too
    moved    one of the files is in its place
    done     all are, and it is noted
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.sql.readwriter import DataFrameWriter

from skylark.cli.main import main
from skylark.pipelines.files import Files
from skylark.pipelines.keeping import KEPT, PLANNED, Batch, Keeper, Rows

KEEP, WRITE, RENAME, PARQUET = Keeper.keep, Files.write, Files.rename, DataFrameWriter.parquet


class Hold:
    def __init__(self, step: str, times: int, file: Path) -> None:
        self._step = step
        self._left = times
        self._file = file

    def at(self, step: str) -> None:
        if step != self._step:
            return
        self._left -= 1
        if self._left == 0:
            self._file.touch()
            if step != "writing":
                threading.Event().wait()

    def keep(self, keeper: Keeper, batch: Batch, rows: Rows) -> None:
        self.at("begun")
        KEEP(keeper, batch, rows)

    def parquet(self, writer: DataFrameWriter, *arguments: Any) -> None:
        self.at("writing")
        PARQUET(writer, *arguments)

    def write(self, files: Files, name: str, text: str) -> None:
        if name.startswith(PLANNED):
            self.at("staged")
        WRITE(files, name, text)
        if name.startswith(PLANNED):
            self.at("planned")

    def rename(self, files: Files, old: str, new: str) -> None:
        RENAME(files, old, new)
        self.at("done" if new.startswith(KEPT) else "moved")


if __name__ == "__main__":
    hold = Hold(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    Keeper.keep = lambda *arguments: hold.keep(*arguments)  # type: ignore[method-assign]
    DataFrameWriter.parquet = lambda *arguments: hold.parquet(*arguments)  # type: ignore[method-assign,assignment]
    Files.write = lambda *arguments: hold.write(*arguments)  # type: ignore[method-assign]
    Files.rename = lambda *arguments: hold.rename(*arguments)  # type: ignore[method-assign]
    sys.argv = ["skylark", *sys.argv[4:]]
    main()

"""Rows on stdout: as a table, as lines of JSON, or as CSV.

Spark itself makes the texts, in UTC, so that a time looks the same wherever the command runs. Bytes are shown as the
UTF-8 text that they usually are; JSON has those that are no such text in base64, under the column's name with _base64.
"""

from __future__ import annotations

import csv
import enum
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, BinaryType, MapType, StructField, StructType
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Style(enum.StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Printer:
    """Prints the rows of one query, at most `limit` of them, however many DataFrames they come in."""

    def __init__(self, style: Style, limit: int | None = None, out: TextIO | None = None) -> None:
        self._style = style
        self._left = limit
        self._out = out or sys.stdout
        self._headed = False

    @property
    def full(self) -> bool:
        return self._left == 0

    def show(self, frame: DataFrame) -> int:
        """How many rows were printed. They are fetched a partition at a time, so that any number of them fits."""
        if self.full:
            return 0
        limited = frame if self._left is None else frame.limit(self._left)
        if self._style == Style.TABLE:
            count = self._table(frame.columns, _texts(limited))
        elif self._style == Style.CSV:
            count = self._csv(frame.columns, _texts(limited))
        else:
            count = self._lines(_json(limited))
        self._left = None if self._left is None else self._left - count
        self._out.flush()
        return count

    def _lines(self, lines: Iterable[str]) -> int:
        return sum(1 for line in lines if self._out.write(f"{line}\n"))

    def _csv(self, names: list[str], rows: Iterable[list[str | None]]) -> int:
        writer = csv.writer(self._out, lineterminator="\n")
        if not self._headed:
            writer.writerow(names)
            self._headed = True
        return sum(1 for row in rows if writer.writerow(row))

    def _table(self, names: list[str], rows: Iterable[list[str | None]]) -> int:
        """Column widths need all rows, so a table holds them all: for many, a limit or another style is better."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(Text(name))
        for row in rows:
            table.add_row(*[Text("null", style="dim") if value is None else Text(value) for value in row])
        Console(file=self._out).print(table)
        return table.row_count


def _json(frame: DataFrame) -> Iterator[str]:
    numbered = _numbered(frame)
    named = list(zip(numbered.schema.fields, frame.columns, strict=True))
    columns = [_readable(field).alias(name) for field, name in named]
    coded = [
        f.when(~_is_text(field), f.translate(f.base64(field.name), "\r\n", "")).alias(f"{name}_base64")
        for field, name in named
        if isinstance(field.dataType, BinaryType)
    ]
    record = _object(columns)
    for field, _ in named:
        if isinstance(field.dataType, BinaryType):
            record = f.when(~_is_text(field), _object(columns + coded)).otherwise(record)
    return (row[0] for row in numbered.select(record).toLocalIterator())


def _object(columns: list[Column]) -> Column:
    return f.to_json(f.struct(*columns), {"ignoreNullFields": "false"})


def _texts(frame: DataFrame) -> Iterator[list[str | None]]:
    numbered = _numbered(frame)
    nested = (MapType, ArrayType, StructType)
    columns = [
        f.to_json(field.name) if isinstance(field.dataType, nested) else f.col(field.name).cast("string")
        for field in numbered.schema.fields
    ]
    return ([*row] for row in numbered.select(*columns).toLocalIterator())


def _numbered(frame: DataFrame) -> DataFrame:
    """Columns go by position: two of one query may have the same name, and any name may have dots in it."""
    return frame.toDF(*[f"c{index}" for index in range(len(frame.columns))])


def _readable(field: StructField) -> Column:
    column = f.col(field.name)
    return f.when(_is_text(field), column.cast("string")) if isinstance(field.dataType, BinaryType) else column


def _is_text(field: StructField) -> Column:
    return f.is_valid_utf8(f.col(field.name).cast("string"))

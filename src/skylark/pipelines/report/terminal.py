"""The report on a terminal: a table for each section, a line of bars for how throughput went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skylark.pipelines.report.figures import SECTIONS, Report, Section, duration, heading, is_number, written
from skylark.pipelines.report.times import over_time

_BARS: Final = " ▁▂▃▄▅▆▇█"
_MOST_BARS: Final = 60
_WIDTH_OF_FILES: Final = 1000  # as wide as a table wants: a pipe has no width
_MOST_LINES: Final = 20


def show(report: Report, out: TextIO) -> None:
    is_terminal = out.isatty()
    console = Console(file=out, width=None if is_terminal else _WIDTH_OF_FILES, highlight=False)
    console.print(Text(head(report)), soft_wrap=True)
    for section in SECTIONS:
        if section.name == "buckets":
            _show_bars(console, report)
        else:
            _show_section(console, report, section)


def head(report: Report) -> str:
    return f"{', '.join(report.topics)}, from {report.read_from}, {period(report)}"


def period(report: Report) -> str:
    since = f"from {written('', report.since)} " if report.since else "up to "
    return f"{since}{'to ' if report.since else ''}{written('', report.until or report.made)} UTC"


def _show_section(console: Console, report: Report, section: Section) -> None:
    rows, note = report.rows(section), report.notes.get(section.name)
    if not rows and not note:
        return
    console.print()
    console.print(Text(section.title, style="bold"))
    if note:
        console.print(Text(note, style="dim"), soft_wrap=True)
    shown = rows[:_MOST_LINES] if section.is_long else rows
    if shown:
        console.print(_table(section, [section.cells(row) for row in shown]))
    if len(shown) < len(rows):
        console.print(Text(f"and {len(rows) - len(shown):,} more: see --json, --html or --parquet", style="dim"))


def _table(section: Section, rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in section.columns:
        number = is_number(column)
        table.add_column(Text(heading(column)), justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _show_bars(console: Console, report: Report) -> None:
    for topic in report.topics:
        series = over_time(report.buckets, topic, report.bucket_s)
        if len(series) > 1:
            step = -(-len(series) // _MOST_BARS)
            sums = [sum(b.messages for b in series[at : at + step]) for at in range(0, len(series), step)]
            each = duration(step * report.bucket_s * 1000)
            console.print(Text(f"{topic} {_bars(sums)} {each} a bar"), soft_wrap=True)


def _bars(counts: Sequence[int]) -> str:
    most = max(counts)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)

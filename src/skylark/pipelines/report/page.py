"""The report as one HTML file that needs nothing else: its charts are inside, it is light or dark as the system is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from skylark.pipelines.report import charts
from skylark.pipelines.report.figures import SECTIONS, Report, Section, duration, heading, is_number, size
from skylark.pipelines.report.gathering import END_TO_END, TO_BROKER
from skylark.pipelines.report.terminal import period

_STYLE: Final = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #667085; --line: #e4e7ec; }
@media (prefers-color-scheme: dark) {
  :root { --page: #11151c; --card: #1a2029; --ink: #e6e9ee; --soft: #98a2b3; --line: #2c3440; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 8px; }
p { margin: 4px 0; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: 12px; margin: 24px 0 12px; }
.tiles div, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: 12px 16px; }
.tiles b { display: block; font-size: 19px; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tiles span, summary { color: var(--soft); font-size: 13px; }
section { padding: 18px 20px; margin-top: 16px; }
section svg { width: 100%; height: auto; margin: 6px 0 2px; font-family: inherit; }
.scroll { overflow-x: auto; }
summary { cursor: pointer; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 8px; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; min-width: 5em; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; min-width: 0; }
"""


def page(report: Report) -> str:
    """The whole page. Raises PipelineError where charts can't be drawn."""
    charts.check()
    drawn = charts.draw(report)
    title = ", ".join(report.topics)
    sections = "".join(_section(report, section, drawn.get(section.name)) for section in SECTIONS)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: report</title><style>{_STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1><p>{escape(f'From {report.read_from}, {period(report)}')}</p>"
        f"{_tiles(report)}{sections}</main></body></html>\n"
    )


def _tiles(report: Report) -> str:
    """The figures that one looks for first."""
    tiles = [
        ("messages", f"{sum(row.messages for row in report.throughput):,}"),
        ("bytes of bodies", size(sum(row.body_bytes for row in report.throughput))),
        ("messages/s at the peak", f"{max(row.peak_per_s for row in report.throughput):,.1f}"),
    ]
    way = END_TO_END if any(row.way == END_TO_END for row in report.latency) else TO_BROKER
    slowest = [row.p99_ms for row in report.latency if row.way == way]
    if slowest:
        tiles.append((f"p99, {way}", duration(max(slowest))))
    if report.groups:
        tiles.append(("messages behind", f"{sum(row.behind for row in report.lag):,}"))
        tiles.append(("retries", f"{sum(row.messages for row in report.retries):,}"))
        tiles.append(("dead letters", f"{sum(row.messages for row in report.dead_letters):,}"))
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
        + "</div>"
    )


def _section(report: Report, section: Section, chart: str | None) -> str:
    rows, note = report.rows(section), report.notes.get(section.name)
    if not rows and not note:
        return ""
    parts = [f'<section id="{section.name}"><h2>{escape(section.title)}</h2>']
    if note:
        parts.append(f"<p>{escape(note[0].upper() + note[1:])}.</p>")
    if chart:
        parts.append(chart)
    if rows:
        table = _table(section, [section.cells(row) for row in rows])
        parts.append(f"<details><summary>{len(rows):,} rows</summary>{table}</details>" if section.is_long else table)
    return "".join([*parts, "</section>\n"])


def _table(section: Section, rows: Sequence[Sequence[str]]) -> str:
    kinds = [' class="n"' if is_number(column) else "" for column in section.columns]
    head = "".join(f"<th{kind}>{escape(heading(name))}</th>" for name, kind in zip(section.columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

"""Tables of the results: one with every workload's figure and the aims, one with everything that was measured.

The document docs/benchmarks.md is written by hand but for what stands between its two marks: that comes from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.suite.contenders import APACHE, BROKERS, SKYLARK
from bench.suite.figures import DETAILS, METRICS, Aim, ratio, summary
from bench.suite.running import Grown, Measured, Results
from bench.suite.workloads import GROWTHS, WORKLOADS, Workload

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
CLIENTS = OFFICIAL, OURS = "official gRPC client", "Skylark's client"
LOAD_SHOWN = ("pipelined-json", "pipelined-binary", "rate-5000")
"""Where the generator's own cost is told beside the servers'."""
COLUMNS = ("workload", "", "Apache", "Skylark", "ratio", "aim", "reached")


class Row(msgspec.Struct, frozen=True):
    title: str
    metric: str
    apache: str
    skylark: str
    ratio: float
    aim: str = ""
    reached: str = ""

    def cells(self) -> tuple[str, ...]:
        return self.title, self.metric, self.apache, self.skylark, f"{self.ratio:.2f}", self.aim, self.reached


def row(title: str, measured: Measured, metric: str, aim: Aim | None, sides: tuple[str, str]) -> Row | None:
    apache, skylark = (summary(measured.samples.get(name, []), metric) for name in sides)
    if apache is None or skylark is None:
        return None
    shown = METRICS[metric]
    quotient = ratio(apache, skylark)
    return Row(
        title,
        shown.title,
        apache.text(shown.digits),
        skylark.text(shown.digits),
        quotient,
        "" if aim is None else str(aim),
        "" if aim is None else "yes" if aim.reached(quotient) else "no",
    )


def workload_rows(workload: Workload, measured: Measured) -> Iterator[Row]:
    """Its own metric first, then the others that have an aim."""
    aims = {aim.metric: aim for aim in workload.aims}
    for metric in dict.fromkeys((workload.shows, *aims)):
        found = row(workload.title, measured, metric, aims.get(metric), (APACHE, SKYLARK))
        if found is not None:
            yield found


def rows(results: Results) -> list[Row]:
    return [
        found
        for workload in WORKLOADS
        if workload.name in results.workloads
        for found in workload_rows(workload, results.workloads[workload.name])
    ]


def other_rows(measured: dict[str, Measured], sides: tuple[str, str]) -> list[Row]:
    """Messages a second of other contenders than the two servers; the ratio is the second's to the first's."""
    found = [row(title, each, "rate", None, sides) for title, each in measured.items()]
    return [each for each in found if each is not None]


def other_tables(results: Results) -> list[tuple[str, tuple[str, str], list[Row]]]:
    """Title, contenders and rows of what is not Skylark beside Apache, as far as it was measured."""
    tables = [
        ("Python clients", CLIENTS, other_rows(results.clients, CLIENTS)),
        ("More brokers", BROKERS, other_rows(results.brokers, BROKERS)),
    ]
    return [table for table in tables if table[2]]


def markdown_table(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    bars = ["---" if at == 0 else "---:" for at in range(len(columns))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, tuple(bars), *lines)) + "\n"


def detail_lines(results: Results) -> list[tuple[str, ...]]:
    lines = []
    for workload in WORKLOADS:
        measured = results.workloads.get(workload.name)
        if measured is None:
            continue
        for name in (APACHE, SKYLARK):
            found = [summary(measured.samples[name], metric) for metric in DETAILS]
            cells = [
                "" if each is None else each.text(METRICS[metric].digits, spread=False)
                for metric, each in zip(DETAILS, found, strict=True)
            ]
            lines.append((workload.title if name == APACHE else "", name.capitalize(), *cells))
    return lines


def generator_lines(results: Results) -> list[tuple[str, ...]]:
    """What the load generator spends beside each server."""
    lines = []
    for workload in WORKLOADS:
        if workload.name in LOAD_SHOWN and workload.name in results.workloads:
            samples = results.workloads[workload.name].samples
            found = [
                summary(samples[name], metric) for name in (APACHE, SKYLARK) for metric in ("generator_cpu", "cpu")
            ]
            lines.append((workload.title, *("" if each is None else each.text(2, spread=False) for each in found)))
    return lines


def growth_lines(results: Results, name: str) -> list[tuple[str, ...]]:
    grown = results.growths[name]
    lines = []
    for at, point in enumerate(grown.points):
        found = [summary(grown.samples[side][at], "rate") for side in (APACHE, SKYLARK)]
        lines.append((f"{point:g}", *("" if each is None else each.text(0) for each in found)))
    return lines


def markdown(results: Results, chart: str | None, growth_chart: str | None) -> str:
    """Everything that was measured, with links to the charts when there are any."""
    runs: list[Measured | Grown] = [
        each
        for kind in (results.workloads, results.growths, results.clients, results.brokers)
        for each in kind.values()
    ]
    when = sorted({each.when[:10] for each in runs})
    commits = sorted({each.commit for each in runs})
    parts = [
        f"Measured on {' and '.join(when)} in {sum(results.took_s.values()) / 60:.0f} minutes, commit "
        f"{', '.join(commits)}, on {results.machine}. A figure is the median of the rounds, with the lowest and the "
        "highest; the ratio is Skylark's to Apache's.\n",
    ]
    if results.workloads:
        parts.append(markdown_table(COLUMNS, [each.cells() for each in rows(results)]))
    if chart:
        parts.append(f"![The ratios as a chart]({chart})\n")
    if results.workloads:
        titles = ("workload", "server", *(METRICS[metric].title for metric in DETAILS))
        parts += ["### In full\n", markdown_table(titles, detail_lines(results))]
    if costs := generator_lines(results):
        heads = ("CPU s per 100,000 messages", "generator", "Apache", "generator", "Skylark")
        parts += ["### What the load costs\n", markdown_table(heads, costs)]
    for title, sides, lines in other_tables(results):
        parts += [f"### {title}\n", markdown_table(("", "", *sides, "ratio"), [each.cells()[:5] for each in lines])]
    if results.growths:
        parts.append("### How cost grows\n")
    if results.growths and growth_chart:
        parts.append(f"![Messages a second against size]({growth_chart})\n")
    for growth in GROWTHS:
        if growth.name in results.growths:
            columns = (growth.axis, "Apache, messages/s", "Skylark, messages/s")
            parts += [
                f"{growth.title[0].upper()}{growth.title[1:]}:\n",
                markdown_table(columns, growth_lines(results, growth.name)),
            ]
    return "\n".join(parts)


def replace_figures(document: str, figures: str) -> str:
    """The document with other figures between its marks."""
    before, mark, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the document lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{figures}{END}{after}"


def write_document(document: Path, figures: str) -> None:
    document.write_text(replace_figures(document.read_text(), figures))

"""The charts of the page, as SVG to be put into HTML: what is text or axis there has the page's own colour.

They are drawn by matplotlib, which is an extra: nothing else needs it, and it is loaded when a chart is drawn.
"""

from __future__ import annotations

import importlib.util
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from skylark.extras import how_to_install
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.report.figures import Report, duration
from skylark.pipelines.report.times import over_time

COLOURS: Final = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16")
_INK: Final = "#010203"  # stands for the colour of the page's text
_WIDTH_INCHES: Final = 8.4
_MOST_BARS: Final = 40
_FEW_POINTS: Final = 20
_LONGEST_LABEL: Final = 40
_SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "skylark",
    "text.parse_math": False,  # a key may have dollars in it
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.alpha": 0.15,
    "grid.color": _INK,
    "legend.frameon": False,
    "font.size": 9,
}


def check() -> None:
    """Raises PipelineError where charts can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PipelineError(f"the page's charts need matplotlib: {how_to_install('report')}")


def draw(report: Report) -> dict[str, str]:
    """Name of a section -> its chart. A section that has nothing to draw has none."""
    drawn = {
        "buckets": _throughput(report) if report.buckets else None,
        "queues": _queues(report) if report.queues else None,
        "keys": _keys(report) if report.keys else None,
        "latency": _latency(report) if report.latency else None,
        "lag": _lag(report) if report.lag else None,
        "retries": _retries(report) if report.retries else None,
    }
    return {name: svg for name, svg in drawn.items() if svg is not None}


class _Chart:
    """Axes to draw on, side by side, and what comes of it."""

    def __init__(self, height_inches: float, columns: int = 1) -> None:
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        self.axes: list[Any] = list(self._figure.subplots(1, columns, squeeze=False)[0])

    def svg(self, title: str) -> str:
        text = io.StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # the browser has the fonts
            self._figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        return _for_html(text.getvalue(), title)


def _for_html(svg: str, title: str) -> str:
    """Only the element itself, in the page's colour and font, with no id that nothing refers to."""
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _label(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def _throughput(report: Report) -> str:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    with _styled():
        chart = _Chart(2.8, columns=2)
        step = timedelta(seconds=report.bucket_s)
        begin = min(bucket.time for bucket in report.buckets) - step
        end = max(bucket.time for bucket in report.buckets) + step
        for axes, what, unit in zip(chart.axes, ("messages", "body_bytes"), ("messages/s", "KiB/s"), strict=True):
            scale = report.bucket_s * (1024 if what == "body_bytes" else 1)
            for number, topic in enumerate(report.topics):
                series = over_time(report.buckets, topic, report.bucket_s)
                times = [bucket.time for bucket in series]
                rates = [getattr(bucket, what) / scale for bucket in series]
                marker = "o" if len(times) < _FEW_POINTS else ""
                axes.plot(times, rates, color=_colour(number), label=_label(topic), marker=marker, markersize=3)
                axes.fill_between(times, rates, color=_colour(number), alpha=0.15, linewidth=0)
            axes.set_ylim(bottom=0)
            axes.set_xlim(begin, end)
            axes.set_title(unit)
            locator = AutoDateLocator(maxticks=6)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        if len(report.topics) > 1:
            chart.axes[0].legend()
        return chart.svg("Throughput over time")


def _queues(report: Report) -> str:
    shown = report.queues[:_MOST_BARS]
    colours = [_colour(report.topics.index(row.topic)) for row in shown]
    names = [_of(report, row.topic, f"{row.broker} {row.queue}") for row in shown]
    return _bars(
        "Messages by queue", names, [row.messages for row in shown], [f"{row.share:.1%}" for row in shown], colours
    )


def _keys(report: Report) -> str:
    shown = sorted(report.keys, key=lambda row: -row.messages)[:_MOST_BARS]
    colours = [_colour(report.topics.index(row.topic)) for row in shown]
    names = [_of(report, row.topic, row.key) for row in shown]
    return _bars(
        "Messages by key", names, [row.messages for row in shown], [f"{row.share:.1%}" for row in shown], colours
    )


def _lag(report: Report) -> str:
    shown = sorted(report.lag, key=lambda row: -row.behind)[:_MOST_BARS]
    notes = ["" if row.behind_s is None else duration(row.behind_s * 1000) for row in shown]
    names = [f"{row.group}: {row.topic}" for row in shown]
    return _bars("Messages behind", names, [row.behind for row in shown], notes, [_colour(0)] * len(shown))


def _retries(report: Report) -> str:
    shown = report.retries[:_MOST_BARS]
    names = [f"{row.group}, {row.topic}: retry {row.times}" for row in shown]
    colours = [_colour(report.groups.index(row.group)) for row in shown]
    return _bars(
        "Messages by how often they were sent back", names, [row.messages for row in shown], [""] * len(shown), colours
    )


def _of(report: Report, topic: str, name: str) -> str:
    return name if len(report.topics) == 1 else f"{topic}: {name}"


def _bars(title: str, names: Sequence[str], counts: Sequence[int], notes: Sequence[str], colours: Sequence[str]) -> str:
    with _styled():
        chart = _Chart(0.7 + 0.24 * len(names))
        axes = chart.axes[0]
        at = range(len(names))
        axes.barh(at, counts, color=colours, height=0.65)
        for place, count, note in zip(at, counts, notes, strict=True):
            text = f"{count:,} ({note})" if note else f"{count:,}"
            axes.annotate(text, (count, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(at, [_label(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, max(1, *counts) * 1.15)
        axes.grid(visible=False, axis="y")
        axes.xaxis.get_major_locator().set_params(integer=True)
        return chart.svg(title)


def _latency(report: Report) -> str:
    with _styled():
        chart = _Chart(3.2)
        axes = chart.axes[0]
        for number, row in enumerate(report.latency):
            values = [row.p50_ms, row.p90_ms, row.p99_ms, row.p999_ms, row.max_ms]
            whose = f", {row.group}" if row.group else ""
            name = _label(_of(report, row.topic, row.way + whose))
            axes.plot(range(len(values)), values, marker="o", markersize=4, color=_colour(number), label=name)
        axes.set_xticks(range(5), ["p50", "p90", "p99", "p99.9", "max"])
        axes.set_yscale("symlog", linthresh=1)
        # Clocks that differ make times below 0.
        axes.set_ylim(
            min(0, *[row.p50_ms for row in report.latency]), 2 * max(1, *[row.max_ms for row in report.latency])
        )
        axes.yaxis.set_major_formatter(lambda ms, _: duration(ms))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return chart.svg("Latency by percentile")

"""The results as pictures, SVG: a bar for each workload's ratio, and small curves of how cost grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.suite.contenders import APACHE, SKYLARK
from bench.suite.figures import summary
from bench.suite.report import Row, rows
from bench.suite.running import Results
from bench.suite.workloads import GROWTHS

COLOURS = {APACHE: "#c0504d", SKYLARK: "#2e75b6"}
BETTER, WORSE = "#2e75b6", "#b0b0b0"
BAR_INCHES, WIDTH_INCHES = 0.32, 10.0


def pyplot() -> Any:
    """Without a screen, and the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "skylark"
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})


def is_better(row: Row) -> bool:
    """More messages a second are better, less of everything else."""
    return row.ratio >= 1 if row.metric == "messages/s" else row.ratio <= 1


def draw_ratios(results: Results, path: Path) -> bool:
    """False when there is nothing to draw."""
    shown = [row for row in rows(results) if row.ratio not in {0.0, float("inf")}]
    if not shown:
        return False
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 1.2 + BAR_INCHES * len(shown)))
    at = range(len(shown))
    axes.barh(
        at, [row.ratio for row in shown], color=[BETTER if is_better(row) else WORSE for row in shown], height=0.6
    )
    for number, row in enumerate(shown):
        axes.annotate(f" {row.ratio:.2f}", (row.ratio, number), va="center", fontsize=8)
        if row.aim:
            axes.plot([float(row.aim.split()[-1])] * 2, [number - 0.4, number + 0.4], color="black", linewidth=1.5)
    axes.set_yticks(at, [f"{row.title}: {row.metric}" for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("Skylark / Apache; blue is better than Apache, a black mark is the aim")
    save(figure, path)
    plt.close(figure)
    return True


def draw_growths(results: Results, path: Path) -> bool:
    shown = [growth for growth in GROWTHS if growth.name in results.growths]
    if not shown:
        return False
    plt = pyplot()
    figure, grid = plt.subplots(2, 2, figsize=(WIDTH_INCHES, 6.5), squeeze=False)
    for axes, growth in zip(grid.flat, shown, strict=False):
        grown = results.growths[growth.name]
        for name, colour in COLOURS.items():
            found = [summary(samples, "rate") for samples in grown.samples[name]]
            medians = [each.median if each is not None else 0.0 for each in found]
            axes.plot(range(len(medians)), medians, marker="o", color=colour, label=name.capitalize())
        axes.set_xticks(range(len(grown.points)), [f"{point:g}" for point in grown.points])
        axes.set_ylim(bottom=0)
        axes.set_title(growth.title, fontsize=9)
        axes.set_xlabel(growth.axis, fontsize=8)
        axes.set_ylabel("messages/s", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8)
    for axes in list(grid.flat)[len(shown) :]:
        axes.axis("off")
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)
    return True

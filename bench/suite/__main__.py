"""Measure Skylark beside Apache RocketMQ 5.5.0.

    make bench                              # everything, a good half hour
    make bench ARGS=--quick                 # the main aims, in under five minutes
    make bench ARGS="--only push --again"   # some of it, even if it was measured before
    make bench ARGS=--document              # nothing new: write docs/benchmarks.md from what was measured

Finished workloads are kept in .cache/bench and not measured again, so a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from servers import ServerError

from bench.suite import charts, clients, report
from bench.suite.java import ClientFailed
from bench.suite.load import LoadFailed
from bench.suite.running import (
    FULL,
    QUICK,
    ROOT,
    Plan,
    Results,
    read_results,
    run_brokers,
    run_growth,
    run_workload,
    write_results,
)
from bench.suite.workloads import GROWTHS, MORE_BROKERS, WORKLOADS

CACHE = ROOT / ".cache" / "bench"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "benchmarks"
GROWTH_PREFIX, CLIENTS, TWO_BROKERS = "growth-", "python-client", "two-brokers"
console = Console(highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the main aims, few and short rounds")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only what has one of these words in its name")
    parser.add_argument("--again", action="store_true", help="measure again what was measured before")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of a round")
    parser.add_argument("--warm-seconds", type=float)
    parser.add_argument("--directory", type=Path, help="where the stores are written; some 30 GB for everything")
    parser.add_argument("--results", type=Path, help="the file that keeps them")
    parser.add_argument("--list", action="store_true", help="say what there is to measure")
    parser.add_argument(
        "--document", action="store_true", help="write docs/benchmarks.md from the results, measure nothing"
    )
    return parser.parse_args()


def names() -> list[str]:
    return [*(each.name for each in WORKLOADS), *(GROWTH_PREFIX + each.name for each in GROWTHS), CLIENTS, TWO_BROKERS]


def wanted(options: argparse.Namespace) -> list[str]:
    quick = {each.name for each in WORKLOADS if each.quick}
    chosen = names() if not options.quick else [name for name in names() if name in quick]
    return [name for name in chosen if not options.only or any(word in name for word in options.only)]


def measure(name: str, results: Results, plan: Plan, directory: Path | None) -> None:
    with console.status(name) as status:

        def say(text: str) -> None:
            status.update(f"{name}: {text}")

        if name == CLIENTS:
            results.clients |= clients.compare(plan.rounds, say)
        elif name == TWO_BROKERS:
            title, pipelined = MORE_BROKERS
            results.brokers[title] = run_brokers(pipelined, plan, directory, say)
        elif name.startswith(GROWTH_PREFIX):
            growth = next(each for each in GROWTHS if GROWTH_PREFIX + each.name == name)
            results.growths[growth.name] = run_growth(growth, plan, directory, say)
        else:
            workload = next(each for each in WORKLOADS if each.name == name)
            results.workloads[name] = run_workload(workload, plan, directory, say)


def finished(name: str, results: Results) -> bool:
    if name == CLIENTS:
        return bool(results.clients)
    if name == TWO_BROKERS:
        return bool(results.brokers)
    return name in results.workloads or name.removeprefix(GROWTH_PREFIX) in results.growths


def outcome(name: str, results: Results) -> str:
    workload = next((each for each in WORKLOADS if each.name == name), None)
    if workload is None:
        return "done"
    lines = [
        f"{row.metric}: Apache {row.apache}, Skylark {row.skylark}, ratio {row.ratio:.2f}"
        for row in report.workload_rows(workload, results.workloads[name])
    ]
    return "; ".join(lines)


def measure_all(options: argparse.Namespace, path: Path) -> tuple[Results, list[str]]:
    """The results, and what could not be measured."""
    plan = QUICK if options.quick else FULL
    plan = Plan(
        options.rounds or plan.rounds, options.seconds or plan.seconds, options.warm_seconds or plan.warm_seconds
    )
    results, failed = read_results(path), []
    todo = wanted(options)
    for number, name in enumerate(todo, 1):
        where = f"[{number}/{len(todo)}] {name}"
        if finished(name, results) and not options.again:
            console.print(f"{where}: kept from before", markup=False)
            continue
        began_s = time.monotonic()
        try:
            measure(name, results, plan, options.directory)
        except (LoadFailed, ClientFailed, ServerError, OSError) as problem:
            failed.append(name)
            console.print(f"{where}: failed: {problem}", markup=False)
            continue
        results.took_s[name] = took_s = time.monotonic() - began_s
        write_results(path, results)
        console.print(f"{where} ({took_s:.0f} s): {outcome(name, results)}", markup=False)
    return results, failed


def show(results: Results) -> None:
    table = Table()
    for at, column in enumerate(report.COLUMNS):
        table.add_column(column, justify="left" if at < 2 else "right", overflow="fold")
    for row in report.rows(results):
        table.add_row(*row.cells(), style="" if row.reached != "no" else "yellow")
    if table.rows:
        console.print(table)
    for title, (first, second), rows in report.other_tables(results):
        for row in rows:
            sides = f"{first} {row.apache}, {second} {row.skylark}"
            console.print(f"{title}, {row.title}, messages/s: {sides}, ratio {row.ratio:.2f}")


def draw(results: Results, folder: Path) -> tuple[bool, bool]:
    """Whether there is a chart of the ratios, and one of how cost grows."""
    try:
        return (
            charts.draw_ratios(results, folder / "ratios.svg"),
            charts.draw_growths(results, folder / "growth.svg"),
        )
    except ImportError as problem:
        console.print(f"no charts: {problem}", markup=False)
        return False, False


def write_reports(results: Results, folder: Path) -> None:
    drawn, grown = draw(results, folder)
    text = report.markdown(results, "ratios.svg" if drawn else None, "growth.svg" if grown else None)
    (folder / "table.md").write_text(text)


def write_document(results: Results) -> None:
    """The figures of the document, the charts it shows, and the results they come from."""
    drawn, grown = draw(results, PICTURES)
    write_results(PICTURES / "results.json", results)
    figures = report.markdown(
        results, "benchmarks/ratios.svg" if drawn else None, "benchmarks/growth.svg" if grown else None
    )
    report.write_document(DOCUMENT, figures)


def main() -> int:
    options = arguments()
    if options.list:
        console.print("\n".join(names()))
        return 0
    path = options.results or CACHE / ("quick.json" if options.quick else "full.json")
    if options.document:
        write_document(read_results(path))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended and their stores removed
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a thousand connections, at both ends
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; results in {path}")
    try:
        results, failed = measure_all(options, path)
    except KeyboardInterrupt:
        console.print("stopped; what was finished is kept, the same command goes on from there")
        return 130
    show(results)
    write_reports(results, path.parent)
    if failed:
        console.print(f"could not be measured: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

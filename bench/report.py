"""Tables: on the terminal and as Markdown, with what is needed to judge or repeat them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from .charts import bars, draw

NONE = "-"


@dataclass
class Table:
    """One table of results.

    Args:
        title: what was measured.
        columns: headings, with units.
        rows: cells, as many as headings.
        notes: how it was measured and what to make of it.
        chart: the column to draw bars of; none if empty.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: Sequence[str] = ()
    chart: str = ""

    def markdown(self, chart: str = "") -> str:
        """The table in Markdown, its first column left-aligned and the others right-aligned, above the file
        ``chart``."""
        cells = [list(self.columns), *[list(row) for row in self.rows]]
        widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(self.columns))]
        lines = [_line(row, widths) for row in cells]
        rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
        lines.insert(1, "| " + " | ".join(rule) + " |")
        picture = [f"![{self.chart}]({chart})", ""] if chart else []
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"- {note}" for note in self.notes), "", *picture])

    def show(self, console: Console) -> None:
        """Print the table."""
        table = RichTable(title=escape(self.title), box=box.SIMPLE_HEAD, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(escape(column), justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", style="dim", markup=False, highlight=False)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"


def number(value: float, digits: int = 1) -> str:
    """``value`` with ``digits`` decimals."""
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def mebibytes(count: float, digits: int = 1) -> str:
    """``count`` bytes in MiB."""
    return number(count / 2**20, digits)


def ratio(value: float, reference: float) -> str:
    """``value / reference``, or nothing where ``reference`` is no positive amount to compare with."""
    return f"{value / reference:.2f}" if reference > 0 else NONE


def environment(command: str) -> list[str]:
    """Lines that say where, with what and when a result was measured."""
    load = os.getloadavg()
    return [
        f"command: `{command}`",
        f"date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"machine: {_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, {platform.system()} "
        f"{platform.release()}; load at the start {load[0]:.1f}",
        f"versions: Python {platform.python_version()}, torch {torch.__version__}, shardwise at {_revision()}",
        "one thread per process; contenders interleaved step by step, medians",
    ]


def _processor() -> str:
    return f"{torch.cuda.get_device_name()}; {_host_processor()}" if torch.cuda.is_available() else _host_processor()


def _host_processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _revision() -> str:
    """The commit that is checked out, and whether the engine has changes since."""
    root = Path(__file__).parent
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", "../src").strip()
    except (OSError, subprocess.SubprocessError):
        return "an unknown commit"
    return f"{commit} with uncommitted changes" if changed else commit


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout


def write(path: Path, heading: str, tables: Sequence[Table], about: Sequence[str]) -> None:
    """Write ``tables`` to ``path`` as Markdown, and their charts beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"## {heading}", "", *(f"- {line}" for line in about), ""]
    for index, table in enumerate(tables):
        chart = path.with_name(f"{path.stem}-{index + 1}.svg") if table.chart and bars(table) else None
        if chart is not None:
            draw(table, chart)
        lines.append(table.markdown(chart.name if chart is not None else ""))
    path.write_text("\n".join(lines))

"""Bars of one column of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from .report import Table

OURS, OTHERS = "#1f6feb", "#b6bdc6"
ROW_INCHES = 0.34


def bars(table: Table) -> list[tuple[str, float]]:
    """Name and value of each row that has a number in the column that the table's chart shows."""
    column = list(table.columns).index(table.chart)
    found = []
    for row in table.rows:
        try:
            found.append((row[0], float(row[column].replace(",", ""))))
        except (ValueError, IndexError):
            continue
    return found


def draw(table: Table, path: Path) -> None:
    """Write an SVG of ``table``'s chart to ``path``: a bar for each row, ours in another colour."""
    shown = bars(table)
    # The same numbers give the same file; letters as text, since their outlines are most of one.
    with matplotlib.rc_context({"svg.hashsalt": "shardwise", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.5, 0.9 + ROW_INCHES * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        colours = [OURS if "shardwise" in name or "our" in name.split() else OTHERS for name, _ in shown]
        drawn = axes.barh([name for name, _ in shown], [value for _, value in shown], color=colours)
        axes.bar_label(drawn, padding=3, fmt="{:,.4g}")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(table.title, loc="left", fontsize=9)
        axes.set_xlabel(table.chart)
        figure.savefig(path, metadata={"Date": None})

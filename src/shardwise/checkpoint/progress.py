"""A progress bar for what takes long."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

PATIENCE = 1.0
"""Seconds until the bar appears: what is done by then needs none."""


class Progress(ExitStack):
    """A context whose bar on stderr shows how many of ``total`` bytes are done, if stderr is a terminal. Where none can
    be shown, as on a terminal that has hung up, none is: the other ranks would wait for the one that shows it.

    Args:
        label: what is done.
        total: bytes.
        shown: whether this rank is the one that shows it.
    """

    def __init__(self, label: str, total: int, *, shown: bool):
        super().__init__()
        self.label, self.total = label, total
        self._done = 0
        self._starts_at = time.monotonic() + PATIENCE
        self._shown = shown and _is_terminal(sys.stderr)
        self._bar: Any = None

    def advance(self, count: int) -> None:
        """``count`` more bytes are done."""
        self._done += count
        if not self._shown or time.monotonic() <= self._starts_at:
            return
        try:
            if self._bar is None:
                self._bar = _make_bar()
                self.callback(_stop, self._bar)
                self._bar.start()
                self._bar.add_task(self.label, total=self.total)
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        except Exception:
            self._shown = False


def _is_terminal(stream: Any) -> bool:
    with suppress(Exception):  # it may be closed, or None, or whatever a program has put there
        return bool(stream.isatty())
    return False


def _stop(bar: Any) -> None:
    with suppress(Exception):
        bar.stop()


def _make_bar() -> Any:
    # Imported only where a bar appears.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)

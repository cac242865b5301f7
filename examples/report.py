"""What a run shows: its progress, and the bytes that each rank held, measured on the real tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import TracebackType

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

RANKS_SHOWN = 8


class ProgressDisplay:
    """A progress bar on a terminal, a line now and then elsewhere, nothing on other ranks than 0."""

    def __init__(self, console: Console, shown: bool, first_step: int, steps: int, bytes_per_step: int) -> None:
        self._console, self._shown, self._bytes_per_step = console, shown, bytes_per_step
        self._first_step, self._steps = first_step, steps
        self._steps_per_line = max(1, (steps - first_step) // 20)
        self._next_line = first_step + self._steps_per_line
        self._start = time.monotonic()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[rate]:,.0f} bytes/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step, loss=float("nan"), rate=0.0)

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        self._start = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, step: int, loss: float) -> None:
        """Show that ``step`` steps are done, the last with ``loss`` nats per byte."""
        seconds = time.monotonic() - self._start
        rate = (step - self._first_step) * self._bytes_per_step / seconds
        self._progress.update(self._task, completed=step, loss=loss, rate=rate)
        is_due = step >= self._next_line or step == self._steps
        if self._shown and not self._console.is_terminal and is_due:
            self._next_line = step + self._steps_per_line
            remaining = (self._steps - step) * self._bytes_per_step / rate
            self._console.print(
                f"step {step}/{self._steps}  loss {loss:.3f}  {rate:,.0f} bytes/s  ETA {remaining:.0f} s",
                soft_wrap=True,
            )


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of training state; ``copies`` are unsharded parameters that stay in memory between uses."""

    parameters: int
    copies: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage behind ``tensors``, by address; of a DTensor, its local tensor's."""
    storages = ((tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _optimizer_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


@torch.no_grad()
def held_bytes(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """Measure what this rank holds now; right after an optimizer step, when the gradients are still there.

    Whatever floating-point storage of more than 1 KiB is alive beside the three kinds of state counts as
    a copy: nothing here asks the engine what it holds.
    """
    parameters = _storages(model.parameters())
    gradients = _storages(p.grad for p in model.parameters() if p.grad is not None)
    state = _storages(_optimizer_tensors(optimizer))
    alive = _storages(
        item
        for item in gc.get_objects()
        if issubclass(type(item), Tensor)
        and not isinstance(item, DTensor)
        and not item.is_meta
        and item.is_floating_point()
    )
    known = parameters.keys() | gradients.keys() | state.keys() | _storages(model.buffers()).keys()
    copies = sum(size for address, size in alive.items() if address not in known and size > 1024)
    return HeldBytes(sum(parameters.values()), copies, sum(gradients.values()), sum(state.values()))


def unsharded_bytes(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """What one process would hold of the same state unsharded: the global sizes of the same tensors."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return HeldBytes(size(model.parameters()), 0, size(gradients), size(_optimizer_tensors(optimizer)))


def held_table(ranks: list[HeldBytes], unsharded: HeldBytes, parameter_count: int) -> Table:
    """A table of the bytes held by each rank (of many, by those that hold least and most)."""
    title = f"{parameter_count:,} parameters; bytes held between steps, measured"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("rank")
    for column in ("parameters", "unsharded\ncopies", "gradients", "optimizer\nstate", "total", "share"):
        table.add_column(column, justify="right", no_wrap=True)

    def add(name: str, held: HeldBytes) -> None:
        values = (held.parameters, held.copies, held.gradients, held.optimizer, held.total)
        table.add_row(name, *(f"{value:,}" for value in values), f"{held.total / unsharded.total:.1%}")

    named = list(enumerate(ranks))
    if len(ranks) > RANKS_SHOWN:
        named.sort(key=lambda item: item[1].total)
        named = [named[0], named[-1]]
    for rank, held in named:
        add(str(rank), held)
    table.add_section()
    add("unsharded", unsharded)
    return table

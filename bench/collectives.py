"""All-gather and reduce-scatter of one unit, by every way that gloo offers."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import PairwiseGlooComm

from .model import Shape
from .ranks import BenchError, run_on_gloo
from .report import Table, mebibytes, number, ratio
from .timing import interleave, median

WORLD_SIZE = 2
WIDTHS = (64, 512, 1024)
LIMIT = 120.0
# Renamed in torch 2.13, where the old names warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
FLAT_GATHER, FLAT_SCATTER = "all_gather_into_tensor, one run", "reduce_scatter_tensor, one run"


def collective_tables(quick: bool) -> list[Table]:
    """One table for gathers, one for reductions."""
    gathers: dict[int, dict[str, float]] = {}
    scatters: dict[int, dict[str, float]] = {}
    for width in WIDTHS:
        rounds = 8 if quick else 60 if width < 512 else 25
        gathers[width], scatters[width] = run_on_gloo(WORLD_SIZE, LIMIT, measure, width, rounds)[0]
    return [
        _table("All-gather of one unit", gathers, FLAT_GATHER, "copying out of the one run into the tensors"),
        _table("Reduce-scatter of one unit", scatters, FLAT_SCATTER, "copying the tensors into the one run"),
    ]


def _table(title: str, found: dict[int, dict[str, float]], reference: str, copies: str) -> Table:
    columns = ["way"]
    for width in found:
        columns += [f"width {width}: ms", "ratio"]
    table = Table(f"{title} (9 fp32 tensors) on {WORLD_SIZE} gloo processes", columns)
    for way in next(iter(found.values())):
        row = [way]
        for times in found.values():
            row += [number(1e3 * times[way], 2), ratio(times[way], times[reference])]
        table.rows.append(row)
    sizes = ", ".join(f"{mebibytes(4 * sum(_sizes(width)))} MiB at {width}" for width in found)
    table.notes = (
        f"whole unit: {sizes}. Medians of rounds after 3 of warm-up, the ways interleaved; ratio to {reference}.",
        f"{reference}: the collective alone; 'with copies' adds {copies}, which the ways per tensor do not need.",
    )
    return table


def _sizes(width: int) -> list[int]:
    """Elements of each parameter of a unit."""
    return [math.prod(shape) for shape in Shape(1, width, 1, 1).block_shapes]


def measure(width: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """On one rank: median seconds of each way to gather and to reduce."""
    rank, sizes = dist.get_rank(), _sizes(width)
    tensors = list(torch.arange(sum(sizes)).remainder(251).float().split(sizes))
    shards = [tensor.chunk(WORLD_SIZE)[rank].clone() for tensor in tensors]
    gathers, scatters = Gathers(shards), Scatters(tensors)
    doubled = [WORLD_SIZE * shard for shard in shards]
    _check(gathers.ways(), gathers.result, gathers.outputs, tensors)
    _check(scatters.ways(), scatters.result, scatters.outputs, doubled)
    return _medians(gathers.ways(), rounds), _medians(scatters.ways(), rounds)


Ways = dict[str, Callable[[], object]]


def _medians(ways: Ways, rounds: int) -> dict[str, float]:
    timed = {name: functools.partial(_timed, way) for name, way in ways.items()}
    return {name: median(seconds) for name, seconds in interleave(timed, 3, rounds).items()}


def _timed(way: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _check(
    ways: Ways, result: Callable[[str], list[Tensor]], outputs: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    for name, way in ways.items():
        for output in outputs:
            output.fill_(-1)
        way()
        pairs = zip(result(name), expected, strict=True)
        if not all(torch.equal(found.reshape(-1), value) for found, value in pairs):
            raise BenchError(f"{name} gave other values")


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class Gathers:
    """Ways to gather ``shards`` (flat, one per tensor). Buffers are made once: communication and copies are timed."""

    def __init__(self, shards: list[Tensor]) -> None:
        self.shards, self.run = shards, torch.cat(shards)
        self.gathered = self.run.new_empty(WORLD_SIZE * self.run.numel())
        self.whole = [shard.new_empty(WORLD_SIZE * shard.numel()) for shard in shards]
        self.outputs = [self.gathered, *self.whole]
        self.sizes = [shard.numel() for shard in shards]
        self.messages = PairwiseGlooComm(_world())

    def ways(self) -> Ways:
        """By name."""
        return {
            FLAT_GATHER: self.one_run,
            f"{FLAT_GATHER}, with copies": self.one_run_with_copies,
            "all_gather_into_tensor per tensor": self.per_tensor,
            "allgather_into_tensor_coalesced": self.coalesced,
            "send + recv, one run, with copies": self.messages_one_run,
            "send + recv per tensor": self.messages_per_tensor,
        }

    def result(self, way: str) -> list[Tensor]:
        """The gathered tensors."""
        return self._parts() if way == FLAT_GATHER else self.whole

    def _parts(self) -> list[Tensor]:
        return list(self.gathered.view(WORLD_SIZE, -1).split(self.sizes, dim=1))

    def _copy_out(self) -> None:
        rows = [tensor.view(WORLD_SIZE, -1) for tensor in self.whole]
        torch.split_with_sizes_copy(self.gathered.view(WORLD_SIZE, -1), self.sizes, dim=1, out=rows)

    def one_run(self) -> None:
        """All shards as one."""
        _gather(self.gathered, self.run)

    def one_run_with_copies(self) -> None:
        """All shards as one, then each tensor to its place: what FSDP2 does."""
        self.one_run()
        self._copy_out()

    def per_tensor(self) -> None:
        """One asynchronous collective for each."""
        pairs = zip(self.whole, self.shards, strict=True)
        _wait([_gather(whole, shard, async_op=True) for whole, shard in pairs])

    def coalesced(self) -> None:
        """One call for all."""
        _world().allgather_into_tensor_coalesced(self.whole, self.shards).wait()

    def messages_one_run(self) -> None:
        """One message, then each tensor to its place."""
        _wait(self.messages.all_gather([self.gathered], [self.run]))
        self._copy_out()

    def messages_per_tensor(self) -> None:
        """A message for each, straight to its place."""
        _wait(self.messages.all_gather(self.whole, self.shards))


class Scatters:
    """Ways to add ``tensors`` (flat) over ranks, each rank getting its shards."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.sizes = [tensor.numel() // WORLD_SIZE for tensor in tensors]
        self.run = tensors[0].new_empty(WORLD_SIZE * sum(self.sizes))
        self.received, self.reduced = torch.empty_like(self.run), self.run.new_empty(sum(self.sizes))
        self.shards = [tensor.new_empty(size) for tensor, size in zip(tensors, self.sizes, strict=True)]
        self.outputs = [self.reduced, *self.shards]
        self.messages = PairwiseGlooComm(_world())
        self._copy_in()

    def ways(self) -> Ways:
        """By name."""
        return {
            FLAT_SCATTER: self.one_run,
            f"{FLAT_SCATTER}, with copies": self.one_run_with_copies,
            "reduce_scatter_tensor per tensor": self.per_tensor,
            "reduce_scatter_tensor_coalesced": self.coalesced,
            "all_to_all_single + sum, one run, with copies": self.all_to_all,
            "send + recv + sum, one run, with copies": self.messages_one_run,
            "send + recv + sum per tensor": self.messages_per_tensor,
        }

    def result(self, way: str) -> list[Tensor]:
        """The reduced shards."""
        return list(self.reduced.split(self.sizes)) if "one run" in way else self.shards

    def _copy_in(self) -> None:
        torch._chunk_cat(self.tensors, 0, WORLD_SIZE, out=self.run.view(WORLD_SIZE, -1))

    def one_run(self) -> None:
        """All tensors as one."""
        _scatter(self.reduced, self.run)

    def one_run_with_copies(self) -> None:
        """The tensors into one run, then all as one: what FSDP2 does."""
        self._copy_in()
        self.one_run()

    def per_tensor(self) -> None:
        """One asynchronous collective for each."""
        pairs = zip(self.shards, self.tensors, strict=True)
        _wait([_scatter(shard, tensor, async_op=True) for shard, tensor in pairs])

    def coalesced(self) -> None:
        """One call for all."""
        _world().reduce_scatter_tensor_coalesced(self.shards, self.tensors).wait()

    def all_to_all(self) -> None:
        """Everyone's part to everyone, then the sum in rank order."""
        self._copy_in()
        dist.all_to_all_single(self.received, self.run)
        torch.sum(self.received.view(WORLD_SIZE, -1), dim=0, out=self.reduced)

    def messages_one_run(self) -> None:
        """The tensors into one run, one message to each rank, then the sum."""
        self._copy_in()
        _wait(self.messages.reduce_scatter([self.reduced], [self.run], mean=False))

    def messages_per_tensor(self) -> None:
        """A message for each tensor and rank, straight from it, then the sum."""
        _wait(self.messages.reduce_scatter(self.shards, self.tensors, mean=False))

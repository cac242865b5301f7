"""Time and memory of saving and loading a checkpoint, beside `torch.distributed.checkpoint` used plainly."""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.checkpoint import load, save, wait

from .allocations import Meter, NoCompilerError, preloaded_meter
from .model import Shape, Transformer
from .ranks import BenchError, run_on_gloo
from .report import Table, mebibytes, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 2
LIMIT = 580.0
SHARDWISE, DCP = "shardwise", "plain DCP"
NAMES = (SHARDWISE, DCP)
WIDTH = 1024
"""A block has 48 MiB of parameters, 9 of them."""


@dataclass(frozen=True)
class Cost:
    """Of saving or loading once, on one rank.

    Args:
        seconds: until the call returned.
        cpu: seconds of all of the process's threads until then.
        peak: bytes allocated at most meanwhile, above what was allocated before.
        total: seconds until the checkpoint was complete.
    """

    seconds: float
    cpu: float
    peak: int
    total: float


def checkpoint_tables(quick: bool) -> list[Table]:
    """Parameters alone, parameters with AdamW's state, and what saving beside training costs."""
    blocks, rounds = (6, 2) if quick else (20, 5)
    try:
        with preloaded_meter():
            return [
                _table(_shape(blocks), rounds, with_optimizer=False),
                _table(_shape(blocks // 3), rounds, with_optimizer=True),
                _stall_table(_shape(blocks), rounds),
            ]
    except NoCompilerError as error:
        return [Table("Checkpoints", ["not measured"], [[str(error)]])]


def _shape(blocks: int) -> Shape:
    return Shape(blocks, WIDTH, batch=1, length=1)


def _bytes_of(shape: Shape) -> int:
    """Of a model's parameters."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in Transformer(shape).parameters())


def _table(shape: Shape, rounds: int, with_optimizer: bool) -> Table:
    by_rank = run_on_gloo(WORLD_SIZE, LIMIT, measure, shape, rounds, with_optimizer)
    size = _bytes_of(shape) * (3 if with_optimizer else 1)
    what = "parameters and AdamW's state" if with_optimizer else "parameters"
    columns = ["contender", *(f"{kind} {unit}" for kind in ("save", "load") for unit in ("s", "± s", "CPU s", "MiB"))]
    columns += ["save / DCP's", "load / DCP's"]
    table = Table(f"Checkpoint of {mebibytes(size, 0)} MiB of {what}, world {WORLD_SIZE}", columns)
    costs = {action: _slowest([ranks[action] for ranks in by_rank]) for action in by_rank[0]}
    for name in NAMES:
        row, compared = [name], []
        for kind in ("save", "load"):
            own = costs[f"{kind} {name}"]
            seconds, cpu = [cost.seconds for cost in own], [cost.cpu for cost in own]
            reference = median([cost.seconds for cost in costs[f"{kind} {DCP}"]])
            row += [number(median(seconds), 2), number(spread(seconds), 2), number(median(cpu), 2)]
            row.append(mebibytes(max(cost.peak for cost in own)))
            compared.append(ratio(median(seconds), reference))
        table.rows.append([*row, *compared])
    table.notes = (
        f"{rounds} interleaved rounds after one of warm-up, medians of the slower rank; ± is half the distance between "
        "the quartiles; CPU: of one process, all its threads, which other programs on the machine disturb less; MiB: "
        "allocated at most on a rank during the call, above what was before.",
        "plain DCP: get_state_dict and dcp.save; get_state_dict, dcp.load and set_state_dict. Both save "
        "into a new directory and wait until the data are on the disk; files are read from the page cache.",
        "shardwise takes checksums of everything while it saves, and compares them when it loads.",
    )
    return table


def _slowest(by_rank: list[list[Cost]]) -> list[Cost]:
    rounds = zip(*by_rank, strict=True)
    return [
        Cost(*(max(getattr(cost, part) for cost in costs) for part in ("seconds", "cpu", "peak", "total")))
        for costs in rounds
    ]


def _stall_table(shape: Shape, rounds: int) -> Table:
    by_rank = run_on_gloo(WORLD_SIZE, LIMIT, measure_stall, shape, rounds)
    columns = ["saving", "stall s", "± s", "complete after s", "stall / sync's"]
    title = f"Stall of training, checkpoint of {mebibytes(_bytes_of(shape), 0)} MiB of parameters, world {WORLD_SIZE}"
    table = Table(title, columns)
    costs = {action: _slowest([ranks[action] for ranks in by_rank]) for action in by_rank[0]}
    reference = median([cost.seconds for cost in costs["sync"]])
    for action, found in costs.items():
        seconds = [cost.seconds for cost in found]
        stall, complete = median(seconds), median([cost.total for cost in found])
        half = number(spread(seconds), 2)
        table.rows.append([action, number(stall, 2), half, number(complete, 2), ratio(stall, reference)])
    table.notes = ("copy alone: cloning the shards, which is the least that an asynchronous save has to wait for.",)
    return table


def make_model(shape: Shape) -> nn.Module:
    """A transformer, each block a unit, sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Transformer(shape)
    for block in model.blocks:
        shardwise.fully_shard(block, mesh=mesh)
    return shardwise.fully_shard(model, mesh=mesh)


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@dataclass
class _Run:
    """One rank's part of the measurements."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    root: Path
    meter: Meter
    saves: int = 0

    def save_shardwise(self) -> None:
        save(self.root / SHARDWISE, model=self.model, optimizer=self.optimizer)

    def load_shardwise(self) -> None:
        load(self.root / SHARDWISE, model=self.model, optimizer=self.optimizer)

    def save_dcp(self) -> None:
        self.saves += 1
        dcp.save(self._state(), checkpoint_id=self.root / DCP / str(self.saves))

    def load_dcp(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=self.root / DCP / str(self.saves))
        optimizers = [] if self.optimizer is None else [self.optimizer]
        set_state_dict(
            self.model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {})
        )

    def _state(self) -> dict[str, object]:
        optimizers = [] if self.optimizer is None else [self.optimizer]
        model, optimizer = get_state_dict(self.model, optimizers)
        return {"model": model, "optimizer": optimizer} if optimizers else {"model": model}

    def cost(self, action: Callable[[], object], complete: Callable[[], None] = lambda: None) -> Cost:
        gc.collect()
        self._delete_old()
        dist.barrier()
        before, cpu_start, start = self.meter.current(), time.process_time(), time.perf_counter()
        _, peak = self.meter.highest_during(action)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        complete()
        return Cost(seconds, cpu, peak - before, time.perf_counter() - start)

    def _delete_old(self) -> None:
        """All checkpoints but the newest of each contender; what deleting costs is not measured."""
        for parent in self.root.iterdir() if dist.get_rank() == 0 else ():
            for old in sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-1]:
                shutil.rmtree(old)


def _shared_directory() -> Path:
    names: list[str] = [tempfile.mkdtemp(prefix="shardwise-bench-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


def measure(shape: Shape, rounds: int, with_optimizer: bool) -> dict[str, list[Cost]]:
    """On one rank: every contender's saves and loads."""
    model, root = make_model(shape), _shared_directory()
    run = _Run(model, _make_optimizer(model) if with_optimizer else None, root, Meter())
    expected = _checksum(model)
    try:
        actions = {f"save {SHARDWISE}": run.save_shardwise, f"save {DCP}": run.save_dcp}
        found = interleave({name: functools.partial(run.cost, action) for name, action in actions.items()}, 1, rounds)
        actions = {f"load {SHARDWISE}": run.load_shardwise, f"load {DCP}": run.load_dcp}
        found |= interleave({name: functools.partial(run.cost, action) for name, action in actions.items()}, 1, rounds)
    finally:
        dist.barrier()
        shutil.rmtree(root, ignore_errors=True)
    if _checksum(model) != expected:
        raise BenchError("what was loaded is not what was saved")
    return found


def _checksum(model: nn.Module) -> float:
    locals_ = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return float(sum(local.detach().double().sum() for local in locals_))


def measure_stall(shape: Shape, rounds: int) -> dict[str, list[Cost]]:
    """On one rank: how long saves hold up training."""
    run = _Run(make_model(shape), None, _shared_directory(), Meter())
    root = run.root / "stall"

    def copy() -> list[torch.Tensor]:
        return [parameter.to_local().detach().clone() for parameter in run.model.parameters()]  # type: ignore[operator]

    def background() -> None:
        save(root, model=run.model, async_=True)

    actions: dict[str, Callable[[], Cost]] = {
        "sync": lambda: run.cost(run.save_shardwise),
        "async": lambda: run.cost(background, wait),
        "copy alone": lambda: run.cost(copy),
    }
    try:
        return interleave(actions, 1, rounds)
    finally:
        dist.barrier()
        shutil.rmtree(run.root, ignore_errors=True)

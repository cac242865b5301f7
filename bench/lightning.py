"""Time of a Trainer's step with our strategy, beside Lightning's ModelParallelStrategy over torch FSDP2 and its DDP."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from shardwise.optim import flat

from .model import Block, Shape, Transformer, loss_of, make_tokens
from .ranks import BenchError, run_on_gloo
from .report import Table, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 2
COMPUTE_HEAVY = Shape(blocks=8, width=512, batch=4, length=128)
PARAMETER_HEAVY = Shape(blocks=4, width=1024, batch=1, length=32)
STEPS, DROPPED = 6, 2
"""Steps of one fit, and how many of them are its warm-up."""
LIMIT = 400.0
LOSS_TOLERANCE = 1e-3
"""Nats per token by which contenders may differ: rounding of other orders of summation."""
OURS, KEPT = "shardwise", "shardwise, parameters kept, flat AdamW"
FSDP2, DDP = "ModelParallelStrategy (FSDP2)", "DDPStrategy"
CONTENDERS = (OURS, FSDP2, KEPT, DDP)

Fit = tuple[float, float]
"""Median seconds of a step, and the last loss in nats per token."""


def lightning_tables(quick: bool) -> list[Table]:
    """One table per model."""
    if importlib.util.find_spec("lightning") is None:
        return [Table("Step of a Trainer", ["not measured"], [["Lightning is not installed: pip install lightning"]])]
    rounds = 2 if quick else 6
    return [_table(COMPUTE_HEAVY, rounds), _table(PARAMETER_HEAVY, rounds)]


def _table(shape: Shape, rounds: int) -> Table:
    by_rank = run_on_gloo(WORLD_SIZE, LIMIT, measure, shape, rounds)
    slowest = {name: [max(fits) for fits in zip(*(rank[name] for rank in by_rank), strict=True)] for name in CONTENDERS}
    losses = [fits[-1][1] for fits in slowest.values()]
    if max(losses) - min(losses) > LOSS_TOLERANCE:
        raise BenchError(f"the contenders' losses differ: {losses}")
    steps = {name: median([seconds for seconds, _ in fits]) for name, fits in slowest.items()}
    table = Table(
        f"Step of a Trainer on {WORLD_SIZE} gloo processes: {shape}",
        ["strategy", "step ms", "± ms", "/ FSDP2's", "/ DDP's"],
    )
    for name, fits in slowest.items():
        half = number(1e3 * spread([seconds for seconds, _ in fits]))
        compared = [ratio(steps[name], steps[other]) for other in (FSDP2, DDP)]
        table.rows.append([name, number(1e3 * steps[name]), half, *compared])
    table.chart = "step ms"
    table.notes = (
        f"AdamW, each block a unit. {rounds} rounds after 1 of warm-up; a round is one fit of {STEPS} steps with each "
        f"strategy, of which the last {STEPS - DROPPED} count, by their median and on the slower rank; ± is half the "
        "distance between the quartiles. A step is all that the Trainer does between two batches.",
        "parameters kept: between forward and backward, as DDP has them (reshard_after_forward=False); parameters "
        "between steps, gradients and optimizer state are sharded all the same. Flat AdamW: shardwise.optim.flat.",
        f"all contenders reported the same loss to within {LOSS_TOLERANCE:g} nats.",
    )
    return table


def measure(shape: Shape, rounds: int) -> dict[str, list[Fit]]:
    """On one rank: each contender's fits."""
    warnings.filterwarnings("ignore")
    os.environ.update(
        LOCAL_RANK=str(dist.get_rank()), NODE_RANK="0", WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="localhost"
    )
    os.environ.setdefault("MASTER_PORT", "29500")  # not used: the process group is there
    with tempfile.TemporaryDirectory() as directory:
        actions = {name: functools.partial(_fit, name, shape, directory) for name in CONTENDERS}
        return interleave(actions, warm_up=1, rounds=rounds)


def _strategy(name: str) -> Any:
    # Here, since Lightning's import takes seconds.
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from shardwise.lightning import DDPFullyShardedStrategy

    if name == FSDP2:
        return ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1)
    if name == DDP:
        return DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    return DDPFullyShardedStrategy(auto_wrap_policy={Block}, reshard_after_forward=name == OURS)


def _fit(name: str, shape: Shape, directory: str) -> Fit:
    import lightning

    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)  # its import sets another level

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.model = Transformer(shape)
            self.seconds: list[float] = []
            self.start = 0.0
            self.last = 0.0

        def configure_model(self) -> None:
            if name == FSDP2:
                for module in (*self.model.blocks, self.model):
                    fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            loss = loss_of(self.model, tokens)
            self.last = loss.detach()
            return loss

        def on_train_batch_start(self, *_: Any) -> None:
            dist.barrier()
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if name == KEPT:
                return flat(torch.optim.AdamW, self.parameters(), lr=1e-4)
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = lightning.Trainer(
        strategy=_strategy(name),
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=directory,
    )
    module = Module()
    gc.collect()
    trainer.fit(module, DataLoader([make_tokens(shape)] * STEPS, batch_size=None))
    return median(module.seconds[DROPPED:]), float(module.last)

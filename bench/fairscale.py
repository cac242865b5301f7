"""Step time and peak bytes of OSS and ShardedDDP, beside FairScale's own and DDP."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import fairscale as ours

from .model import Shape, Transformer, make_tokens
from .peers import MANY_SMALL, Comparison, Contender, memory_table, time_table, updating
from .report import Table
from .steps import COMPUTE_HEAVY, PARAMETER_HEAVY

PLAIN = "DDP"
PAIRS = {
    "DDP + our OSS": "DDP + FairScale's OSS",
    "our ShardedDDP + OSS": "FairScale's ShardedDDP + OSS",
    "our ShardedDDP + OSS, no buffers": "FairScale's ShardedDDP + OSS, no buffers",
}


def make_contender(name: str, shape: Shape) -> Contender:
    """Build and wrap a model for the default process group; all contenders start from the same parameters."""
    torch.manual_seed(1)
    model: nn.Module = Transformer(shape)
    tokens = make_tokens(shape)
    if name == PLAIN:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Contender(_data_parallel(model), tokens, updating(optimizer))
    is_ours = "our " in name
    oss, sharded = _classes(is_ours)
    optimizer = oss(model.parameters(), optim=torch.optim.AdamW, lr=1e-4)
    if name.startswith("DDP"):
        return Contender(_data_parallel(model), tokens, updating(optimizer))
    options = {"reduce_buffer_size": 0} if "no buffers" in name else {}
    model = sharded(model, optimizer, **options)
    # With buffers, FairScale's trains on zeros once its optimizer has dropped the gradients.
    return Contender(model, tokens, updating(optimizer, None if is_ours else model.zero_grad))


def _classes(is_ours: bool) -> tuple[Any, Any]:
    if is_ours:
        return ours.OSS, ours.ShardedDDP
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    return OSS, ShardedDataParallel


def _data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fairscale_tables(quick: bool) -> list[Table]:
    """One table of times per model, one of peak bytes."""
    has_fairscale = importlib.util.find_spec("fairscale") is not None
    comparison = Comparison("FairScale's", make_contender, PLAIN, PAIRS, has_fairscale, limit=300.0)
    rounds = (3, 5, 5) if quick else (10, 16, 90)
    shapes = (COMPUTE_HEAVY, PARAMETER_HEAVY, MANY_SMALL)
    note = "OSS sends the parameters in its update."
    tables = [time_table(comparison, shape, count, note) for shape, count in zip(shapes, rounds, strict=True)]
    tables.append(memory_table(comparison))
    if not has_fairscale:
        missing = "FairScale is not installed: pip install fairscale==0.4.13 --no-build-isolation"
        for table in tables:
            table.notes = (*table.notes, missing)
    return tables

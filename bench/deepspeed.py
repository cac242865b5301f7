"""Steps, host time and peak bytes of ZeRO 1 to 3, beside DeepSpeed's own and no sharding."""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise

from .contenders import UNSHARDED, wrap
from .host import SHAPE, WORLD_SIZE
from .model import Shape, Transformer, make_tokens
from .peers import MANY_SMALL, Comparison, Contender, measure_time, memory_table, phase_table, time_table, updating
from .ranks import run_on_fake, run_on_gloo
from .report import Table
from .steps import COMPUTE_HEAVY, PARAMETER_HEAVY

INSTALLED = Path(__file__).parent.parent / ".venv" / "peers"
"""Apart from everything else, since Lightning and transformers import DeepSpeed wherever they find it."""
COMPILED = INSTALLED / "compiled"
PAIRS = {f"shardwise zero{stage}": f"DeepSpeed ZeRO-{stage}" for stage in (1, 2, 3)}
LEAST_BUCKET = 2**18
"""Elements."""
LIMIT = 600.0
"""Seconds; DeepSpeed compiles an operator when it is used first."""


def make_contender(name: str, shape: Shape) -> Contender:
    """Build and wrap a model for the default process group; all contenders start from the same parameters."""
    torch.manual_seed(1)
    model: nn.Module = Transformer(shape)
    tokens = make_tokens(shape)
    if "DeepSpeed" in name:
        return _by_deepspeed(model, tokens, shape, stage=int(name[-1]))
    if name != UNSHARDED:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        wrap(model, functools.partial(shardwise.fully_shard, placements=name.split()[-1]), mesh, {})
    kind: Any = torch.optim.AdamW if name == UNSHARDED else functools.partial(shardwise.optim.flat, torch.optim.AdamW)
    return Contender(model, tokens, updating(kind(model.parameters(), lr=1e-4)))


def _by_deepspeed(model: nn.Module, tokens: torch.Tensor, shape: Shape, stage: int) -> Contender:
    # As transformers' Trainer sets what is "auto" there, but for small models; the defaults allocate gigabytes.
    bucket = max(shape.width**2, LEAST_BUCKET)
    zero = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": int(0.9 * bucket),
        "stage3_param_persistence_threshold": 10 * shape.width,
        "allgather_bucket_size": 8 * bucket,
    }
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # not 1
        "zero_allow_untested_optimizer": True,  # torch's own
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = _deepspeed().initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return Contender(engine, tokens, engine.step, engine.backward)


@functools.cache
def _deepspeed() -> Any:
    """The library, on the default process group."""
    sys.path.append(str(INSTALLED))
    os.environ["PATH"] += f"{os.pathsep}{INSTALLED / 'bin'}"  # its compiler asks for ninja
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "TORCH_EXTENSIONS_DIR": str(COMPILED)}
    import deepspeed

    logging.disable(logging.WARNING)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def prepare() -> None:
    """On one rank alone: let DeepSpeed compile what it needs."""
    _deepspeed()


def deepspeed_tables(quick: bool) -> list[Table]:
    """One table of times per model, one of host time, one of peak bytes."""
    has_deepspeed = (INSTALLED / "deepspeed").is_dir()
    if has_deepspeed:
        for lock in COMPILED.glob("*/lock"):  # of a bench that was killed: torch would wait for it for ever
            lock.unlink()
        run_on_gloo(1, LIMIT, prepare)
    comparison = Comparison("DeepSpeed's", make_contender, UNSHARDED, PAIRS, has_deepspeed, LIMIT)
    setting = (
        "shardwise: AdamW by shardwise.optim.flat. DeepSpeed: torch's AdamW, which it too runs on flat shards; bucket "
        'sizes as transformers\' Trainer sets them for "auto" (the square of the width), but at least '
        f"{LEAST_BUCKET} elements, and for gathers of ZeRO-1 and ZeRO-2 eight times as many."
    )
    rounds = (3, 4, 3) if quick else (10, 16, 20)
    shapes = (COMPUTE_HEAVY, PARAMETER_HEAVY, MANY_SMALL)
    tables = [time_table(comparison, shape, count, setting) for shape, count in zip(shapes, rounds, strict=True)]
    tables += [_host_table(comparison, 3 if quick else 20), memory_table(comparison)]
    if not has_deepspeed:
        for table in tables:
            table.notes = (*table.notes, "DeepSpeed is not installed: `make bench` does that.")
    return tables


def _host_table(comparison: Comparison, rounds: int) -> Table:
    runs = run_on_fake(WORLD_SIZE, LIMIT, measure_time, make_contender, SHAPE, comparison.names, 3, rounds)
    table = phase_table(f"Host time of a step on a fake group of {WORLD_SIZE}: {SHAPE}", comparison, runs)
    table.notes = (f"nothing is communicated; {rounds} rounds after 3 of warm-up.",)
    return table

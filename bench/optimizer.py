"""Host time of an optimizer's step and of clipping gradients, with nothing to communicate and little to compute."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.optim import flat

from .contenders import FSDP2, SHARDWISE, UNSHARDED, make_contender
from .model import Shape
from .ranks import run_on_fake
from .report import Table, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 8
SHAPE = Shape(blocks=32, width=64, batch=1, length=4)
LIMIT = 180.0
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "foreach=True": {"foreach": True},
    "fused=True": {"fused": True},
}

PLAIN, FLAT, THEIRS = "AdamW on shardwise", "flat AdamW on shardwise", f"AdamW on {FSDP2}"
CONTENDERS = {
    f"AdamW, {UNSHARDED}": (UNSHARDED, torch.optim.AdamW),
    THEIRS: (FSDP2, torch.optim.AdamW),
    PLAIN: (SHARDWISE, torch.optim.AdamW),
    FLAT: (SHARDWISE, functools.partial(flat, torch.optim.AdamW)),
}
"""An engine and who makes the optimizer."""

Times = tuple[float, float]
"""Seconds of clipping and of the step."""


def optimizer_tables(quick: bool) -> list[Table]:
    """One table for each way in which AdamW runs its operators."""
    rounds = 5 if quick else 25
    tables = []
    for title, settings in SETTINGS.items():
        count, runs = run_on_fake(WORLD_SIZE, LIMIT, measure, settings, 2, rounds)
        # DTensor's caches keep the specs of the engine that came first, with which those of the other are compared.
        for name, found in run_on_fake(WORLD_SIZE, LIMIT, measure, settings, 2, rounds, True)[1].items():
            runs[name] += found
        columns = ["contender", "clip µs", "step µs", "both µs", "± µs", "both / FSDP2's"]
        table = Table(f"AdamW {title}, {count} parameters on a fake group of {WORLD_SIZE}: {SHAPE}", columns)
        both = {name: median([sum(run) for run in found]) for name, found in runs.items()}
        for name, found in runs.items():
            phases = [number(1e6 * median([run[phase] for run in found]), 0) for phase in range(2)]
            half = number(1e6 * spread([sum(run) for run in found]), 0)
            compared = ratio(both[name], both[THEIRS])
            table.rows.append([name, *phases, number(1e6 * both[name], 0), half, compared])
        table.notes = (
            f"{rounds} rounds after 2 of warm-up in each of two processes, in one of which the contenders are made in "
            "reverse; forward, backward and zero_grad are not timed.",
            "clip: torch.nn.utils.clip_grad_norm_, and shardwise.clip_grad_norm_ on shardwise.",
        )
        tables.append(table)
    return tables


def measure(
    settings: dict[str, Any], warm_up: int, rounds: int, in_reverse: bool = False
) -> tuple[int, dict[str, list[Times]]]:
    """In one process: how many parameters there are, and each contender's runs."""
    actions: dict[str, Callable[[], Times]] = {}
    for name, (engine, make) in reversed(CONTENDERS.items()) if in_reverse else CONTENDERS.items():
        contender = make_contender(engine, SHAPE)
        contender.forward().backward()
        parameters = list(contender.model.parameters())
        optimizer = make(parameters, lr=1e-4, **settings)
        clip = shardwise.clip_grad_norm_ if engine == SHARDWISE else nn.utils.clip_grad_norm_
        actions[name] = functools.partial(_timed_run, parameters, clip, optimizer)
        actions[name]()
    gc.collect()
    gc.freeze()
    return len(parameters), interleave(actions, warm_up, rounds)


def _timed_run(parameters: list[nn.Parameter], clip: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Times:
    for parameter in parameters:  # a fake group leaves what was in memory
        gradient = parameter.grad
        assert gradient is not None
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).normal_()
    start = time.perf_counter()
    clip(parameters, 1.0)
    clipped = time.perf_counter()
    optimizer.step()
    return clipped - start, time.perf_counter() - clipped

"""Ways to train by MMEngine's Runners, on any device."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mmengine.device.utils
import torch
import torch.distributed as dist
from mmengine.runner import FlexibleRunner, Runner

import shardwise
from shardwise.mmengine import init_process_group

from ..adapters.mmengine_runs import LINEAR, Toy, settings, train
from .cases import ALONE, BF16, DEVICE, Results, is_on, set_up

SCALED = {"type": "AmpOptimWrapper", "dtype": "float16", "loss_scale": {"init_scale": 256.0}}
"""MMEngine has this for GPUs alone."""


@contextmanager
def on(device: str) -> Iterator[None]:
    """Inside, MMEngine computes on ``device``; it looks for the best one when it is imported."""
    before, mmengine.device.utils.DEVICE = mmengine.device.utils.DEVICE, device
    levels = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # Its logger looks for the device of that number among those that CUDA_VISIBLE_DEVICES shows.
    number, os.environ["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", "0"), "0"
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = number
        mmengine.device.utils.DEVICE = before
        logging.disable(levels)


def start(directory: Path) -> Path:
    """A file with the values that all runs begin with: those that devices draw are their own."""
    torch.manual_seed(3)
    file = directory / f"start{dist.get_rank()}.pth"
    torch.save({"state_dict": Toy().state_dict(), "meta": {}}, file)
    return file


def make(kind: Any, directory: Path, wrapper: dict[str, Any], optim_wrapper: dict[str, Any], **changes: Any) -> Any:
    optimizer = {"type": "SGD", "lr": 0.05, "momentum": 0.9}
    changes["optim_wrapper"] = {"optimizer": optimizer, "clip_grad": {"max_norm": 0.5}, **optim_wrapper}
    wrapper = {"auto_wrap_policy": LINEAR, **wrapper}
    if kind is Runner:
        changes["cfg"] = {"model_wrapper_cfg": {"type": "MMFullyShardedDataParallel", **wrapper}}
    else:
        changes["strategy"] = {"type": "ShardwiseStrategy", "model_wrapper": wrapper}
    return kind(**settings("", directory, launcher="pytorch", **changes))


def model_of(runner: Any) -> Any:
    return runner.model if isinstance(runner, Runner) else runner.strategy.model


def by_runner(
    device: str,
    directory: Path,
    kind: Any = Runner,
    wrapper: dict[str, Any] | None = None,
    optim_wrapper: dict[str, Any] | None = None,
    **changes: Any,
) -> Results:
    """An epoch, and another one by a Runner that resumes."""
    with on(device):
        if device != "cuda" and optim_wrapper is SCALED:
            optim_wrapper = None
        makes = functools.partial(make, kind, directory, wrapper or {}, optim_wrapper or {})
        first = makes(load_from=str(start(directory)), train_cfg={"by_epoch": True, "max_epochs": 1}, **changes)
        records = [train(first)]
        again = makes(load_from=str(directory / "epoch_1.pth"), resume=True, **changes)
        records.append(train(again))
        model = model_of(again)
        kept_on = "cpu" if (wrapper or {}).get("cpu_offload") else device
        optimizer = again.optim_wrapper.optimizer
        used = [*model.parameters(), *(state["momentum_buffer"].to_local() for state in optimizer.state.values())]
        assert is_on(kept_on, used)
        assert is_on(device, model.buffers())
        metrics = again.test()
        saved = torch.load(directory / "epoch_2.pth", map_location="cpu", weights_only=False)
        results: Results = {f"saved {name}": value.float() for name, value in saved["state_dict"].items()}
        results |= {f"average of {name}": value.float() for name, value in saved.get("ema_state_dict", {}).items()}
        for index, record in enumerate(records):
            results[f"losses {index}"], results[f"errors {index}"] = map(torch.tensor, (record.losses, record.errors))
        results |= {name: torch.tensor(value) for name, value in metrics.items()}
        weights = shardwise.full_state_dict(model.module, rank0_only=False)
        return results | {name: value.float().cpu() for name, value in weights.items()}


AVERAGED = {"custom_hooks": [{"type": "EMAHook", "momentum": 0.3, "update_buffers": True}]}
OFFLOADED = {"wrapper": {"cpu_offload": True}}
WAYS: dict[str, Any] = {
    "runner": (by_runner, torch.float32),
    "runner_offloaded": (functools.partial(by_runner, **OFFLOADED), torch.float32),
    "runner_averaged": (functools.partial(by_runner, **AVERAGED), torch.float32),
    "runner_scaled": (functools.partial(by_runner, optim_wrapper=SCALED), BF16),
    "flexible": (functools.partial(by_runner, kind=FlexibleRunner, **AVERAGED), torch.float32),
    "flexible_scaled": (functools.partial(by_runner, kind=FlexibleRunner, optim_wrapper=SCALED, **OFFLOADED), BF16),
}


def join() -> None:
    """The process group, by the variables of a launcher."""
    set_up(DEVICE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports: list[Any] = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)
    rank, environment = dist.get_rank(), dict(os.environ)
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]), RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        init_process_group(ALONE[DEVICE] if DEVICE == "simulated" else None)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    assert dist.get_backend() == ALONE[DEVICE]
    total = torch.ones(1, device=DEVICE)
    dist.all_reduce(total)
    assert total.item() == 2

"""Checkpoints that are either complete or not there, written by all ranks and readable at any world size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

KEPT = 2


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(directory: Path, run: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Write the state after step ``run["step"]`` and make it the newest checkpoint of ``directory``.

    All ranks write into one hidden folder; when every one has finished, rank 0 renames it and moves the
    pointer ``latest`` to it. A crash at any point leaves the pointer at the last complete checkpoint.
    ``run`` is kept beside the tensors, as JSON.
    """
    unfinished = directory / ".unfinished"
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(model, optimizer), checkpoint_id=unfinished)
    dist.barrier()
    if is_first:
        (unfinished / "run.json").write_text(json.dumps(run))
        _publish(directory, unfinished, run["step"])
    dist.barrier()


def _publish(directory: Path, unfinished: Path, step: int) -> None:
    numbers = [int(path.name.split("-")[1]) for path in directory.glob("checkpoint-*")]
    # Numbered in the order of writing, so that a new run in the same folder never replaces an older run's.
    complete = directory / f"checkpoint-{max(numbers, default=0) + 1}-step-{step}"
    unfinished.rename(complete)
    pointer = directory / ".latest"
    pointer.write_text(complete.name)
    pointer.replace(directory / "latest")
    for number in sorted(numbers)[: 1 - KEPT]:
        for path in directory.glob(f"checkpoint-{number}-step-*"):
            shutil.rmtree(path)


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Load ``checkpoint`` into ``model`` and ``optimizer`` in place; returns the ``run`` that `save` got."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return json.loads((checkpoint / "run.json").read_text())

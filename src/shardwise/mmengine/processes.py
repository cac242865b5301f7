"""How the processes of a run find each other, on GPUs and on CPUs."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_LIMIT = timedelta(minutes=30)
"""The time limit of every collective, as in `mmengine.dist`."""


def init_process_group(backend: str | None = None, timeout: float | timedelta | None = None) -> None:
    """Join the process group that a launcher such as torchrun describes by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
    and MASTER_PORT. Does nothing if that has been done.

    Call it before ``Runner(launcher="pytorch", ...)``: what MMEngine does itself needs a GPU. The Runner takes the
    group that it finds.

    Args:
        backend: "nccl", "gloo" …; None for the default of the available device ("gloo" on the CPU).
        timeout: limit of every collective, in seconds; None for 30 minutes.

    Raises:
        RuntimeError: naming the variables that no launcher has set.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"init_process_group needs the environment variables {', '.join(missing)}: start the program by "
            "torchrun --nproc-per-node N, or set them"
        )
    # MMEngine needs LOCAL_RANK, which torch does without.
    local_rank = int(os.environ.setdefault("LOCAL_RANK", os.environ["RANK"]))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(local_rank)
    if backend is None:
        backend = dist.get_default_backend_for_device(accelerator or torch.device("cpu"))
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    dist.init_process_group(backend, timeout=DEFAULT_LIMIT if limit is None else limit)

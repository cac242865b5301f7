"""How the processes of a run find each other, on GPUs and on CPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

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
        TypeError: for a ``timeout`` of a wrong type.
        ValueError: for one that is no time.
    """
    limit = _limit(timeout)
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
        # A launcher may show each process its own device only.
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    if backend is None:
        backend = dist.get_default_backend_for_device(accelerator or torch.device("cpu"))
    dist.init_process_group(backend, timeout=limit)


def _limit(timeout: Any) -> timedelta:
    if timeout is None or isinstance(timeout, timedelta):
        return DEFAULT_LIMIT if timeout is None else timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout should be None, a number of seconds or a timedelta, but is {timeout!r}")
    if not 0 < timeout < timedelta.max.total_seconds():
        raise ValueError(f"timeout={timeout}: pass a number of seconds above 0, or None for 30 minutes")
    return timedelta(seconds=timeout)

"""A classifier, trained by MMEngine's Runner on two processes, stopped, continued from its checkpoint, and tested.

python examples/mmengine_runner.py
torchrun --nproc-per-node 2 examples/mmengine_runner.py
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.runner import Runner

from launch import launch
from shardwise.mmengine import init_process_group

CONFIG = Path(__file__).with_name("mmengine_config.py")
PROCESSES = 2


def run(work_dir: str, max_epochs: int, *, resume: bool) -> Runner:
    """Train up to an epoch."""
    config = Config.fromfile(CONFIG)
    config.work_dir = work_dir
    config.resume = resume
    config.train_cfg.max_epochs = max_epochs
    # Every run of one process needs a name of its own.
    config.experiment_name = f"spiral_{max_epochs}"
    runner = Runner.from_cfg(config)
    runner.train()
    return runner


def main() -> None:
    # The Runner takes the process group that it finds: gloo's where there is no GPU.
    init_process_group(timeout=120)
    # All ranks need the directory that the first one makes.
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    run(names[0], 2, resume=False)
    runner = run(names[0], 4, resume=True)
    accuracy = runner.test()["spiral/accuracy"]
    held = sum(parameter.to_local().numel() for parameter in runner.model.module.parameters())
    if dist.get_rank() == 0:
        saved = torch.load(Path(names[0]) / "epoch_4.pth")
        total = sum(value.numel() for value in saved["state_dict"].values())
        print(f"resumed at epoch 2, trained to epoch {runner.epoch}: accuracy {accuracy:.3f}")
        print(f"rank 0 holds {held} of {total} parameters; the checkpoint has all of them")
        shutil.rmtree(names[0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(launch(__file__, [], PROCESSES, threads=1))

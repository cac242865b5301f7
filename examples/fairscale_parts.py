"""What the FairScale page's training programs leave to the reader: data, model, loss, and how processes start."""

from __future__ import annotations

import functools
import inspect
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORLD_SIZE, EPOCHS = 2, 2
CONTEXT = 12
"""Bytes that the next one is predicted from."""
WIDTH = 64

Train = Callable[[int, int, int], None]
"""``train(rank, world_size, epochs)``."""


def run(train: Train) -> None:
    """Run ``train`` on every rank: of torchrun, or of processes that are started here."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), EPOCHS)
        return
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(train, args=(WORLD_SIZE, EPOCHS), nprocs=WORLD_SIZE, join=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def device_of(rank: int) -> torch.device:
    """Where ``rank`` computes."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")


def dist_init(rank: int, world_size: int) -> None:
    """Join the process group that the environment variables describe."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(device_of(rank))
        backend = "nccl"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(minutes=2))
    torch.manual_seed(rank)


def dist_end(rank: int, history: list[float]) -> None:
    """Say what training did to the loss, and leave."""
    if rank == 0:
        losses = " ".join(f"{loss:.3f}" for loss in history)
        print(f"mean loss of each epoch, in nats per byte: {losses}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


class MyAwesomeModel(nn.Module):
    """Predicts a byte from the ones before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * WIDTH, 4 * WIDTH), nn.LayerNorm(4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 256)
        )

    def forward(self, data: Tensor) -> Tensor:
        """``data``: bytes, batch x context; gives logits, batch x 256."""
        logits: Tensor = self.layers(self.embed(data).flatten(1))
        return logits


MyVeryRelevantLoss = nn.CrossEntropyLoss


@functools.cache
def _windows() -> TensorDataset:
    """The source text of Python's `inspect` module: every twelfth window of it."""
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    windows = text.unfold(0, CONTEXT + 1, CONTEXT)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, -1].contiguous())


def my_super_fast_dataloader() -> DataLoader[tuple[Tensor, ...]]:
    """This rank's part of the data, in batches."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(_windows())
    return DataLoader(_windows(), batch_size=64, sampler=sampler)

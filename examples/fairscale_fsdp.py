"""Parameters, gradients and optimizer state sharded: the FairScale page's fourth program, with another import.

python examples/fairscale_fsdp.py
torchrun --nproc-per-node 2 examples/fairscale_fsdp.py
"""

from __future__ import annotations

import torch

from fairscale_parts import (
    MyAwesomeModel,
    MyVeryRelevantLoss,
    device_of,
    dist_end,
    dist_init,
    my_super_fast_dataloader,
    run,
)
from shardwise.fairscale import FSDP


def train(rank: int, world_size: int, epochs: int) -> None:
    # process group init
    dist_init(rank, world_size)
    device = device_of(rank)

    # Problem statement
    model = MyAwesomeModel().to(device)
    dataloader = my_super_fast_dataloader()
    loss_fn = MyVeryRelevantLoss()

    # optimizer specific arguments e.g. LR, momentum, etc...
    base_optimizer_arguments = {"lr": 1e-3}

    # Wrap the model into FSDP, which will shard the parameters over the ranks
    model = FSDP(model)

    # The optimizer sees this rank's shards, so it is made after the model is wrapped
    base_optimizer = torch.optim.Adam
    optimizer = base_optimizer(params=model.parameters(), **base_optimizer_arguments)

    model.train()
    history = []
    for _ in range(epochs):
        total = 0.0
        for data, target in dataloader:
            data, target = data.to(device), target.to(device)
            model.zero_grad()
            outputs = model(data)
            loss = loss_fn(outputs, target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        history.append(total / len(dataloader))
    dist_end(rank, history)


if __name__ == "__main__":
    run(train)

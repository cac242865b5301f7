"""A model that no process ever holds whole: built without memory, initialized and sharded by Fabric, saved and loaded.

python examples/fabric_meta_init.py
torchrun --nproc-per-node 2 examples/fabric_meta_init.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor

from shardwise.fabric import FullyShardedStrategy
from transformer import Block, Transformer, TransformerConfig

DEVICES, STEPS = 2, 5
CONFIG = TransformerConfig(layers=4, width=256)


def megabytes_of(model: torch.nn.Module) -> float:
    """Megabytes (10^6) of the parameters that this process holds."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(0 if tensor.is_meta else tensor.nbytes for tensor in held) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    fabric = Fabric(strategy=FullyShardedStrategy(auto_wrap_policy={Block}), accelerator="auto", devices=DEVICES)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    with fabric.init_module(empty_init=True):
        model = Transformer(CONFIG)  # the model is now on the meta device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of parameters on the meta device
    fabric.print(f"before setup: {megabytes_of(model):.1f} MB of parameters")

    # Each block gets memory and its first values, and is sharded, before the next one.
    model, optimizer = fabric.setup(model, optimizer)
    fabric.print(f"after setup: {megabytes_of(model):.1f} MB of parameters on each of {fabric.world_size} processes")

    tokens = torch.randint(256, (4, 33), device=fabric.device)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    fabric.print("loss of each step, in nats per byte: " + " ".join(f"{loss:.3f}" for loss in losses))

    with tempfile.TemporaryDirectory() as directory:
        path = Path(fabric.broadcast(directory)) / "checkpoint"
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": STEPS})
        with fabric.init_module(empty_init=True):
            again = Transformer(CONFIG)
        state = {"model": again, "step": 0}
        fabric.load(path, state, strict=False)  # into a model that is still on the meta device
        again = fabric.setup(again)
        with torch.no_grad():
            same = torch.equal(model(tokens), again(tokens))
        fabric.print(f"loaded after step {state['step']}: {'the same' if same else 'another'} model")
        fabric.barrier()


if __name__ == "__main__":
    main()

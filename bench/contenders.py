"""The engines that are compared, each around the same model and optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise

from .model import Shape, Transformer, loss_of, make_tokens

UNSHARDED, SHARDWISE, FSDP2, DDP = "no sharding", "shardwise zero3", "torch FSDP2", "DDP"
CONTENDERS = (UNSHARDED, SHARDWISE, FSDP2, DDP)
FLAT = "shardwise zero3, flat AdamW"
VERBS: dict[str, Callable[..., Any]] = {SHARDWISE: shardwise.fully_shard, FSDP2: torch_fully_shard}
MIXED_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IS_NEWER = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")
"""Whether torch is newer than 2.11, of which some engines can less."""
FAKE_GROUPS_REDUCE = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
"""Whether reductions of a fake group give results; those of torch 2.11 and 2.12 leave the memory as they find it."""


@dataclass
class Contender:
    """One engine with a model of its own, ready to train.

    Args:
        name: of the engine.
        model: wrapped.
        optimizer: AdamW on the model's parameters.
        tokens: the batch of every step.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor

    def forward(self) -> Tensor:
        """The loss, in nats per token."""
        return loss_of(self.model, self.tokens)

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def queue_step(self) -> Tensor:
        """One whole training step, for which nothing waits; gives its loss in nats per token."""
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()

    def step(self) -> float:
        """One whole training step; gives its loss in nats per token."""
        return self.queue_step().item()

    def resident_bytes(self) -> int:
        """Bytes that this rank keeps between steps: parameters (its shards) and optimizer state."""
        kept: list[Tensor] = list(self.model.parameters())
        for state in self.optimizer.state.values():
            kept += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(_local(tensor).numel() * tensor.itemsize for tensor in kept)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_contender(
    name: str,
    shape: Shape,
    precision: MixedPrecisionPolicy | None = None,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
) -> Contender:
    """Build and wrap a model on ``device``, sharded over ``mesh`` (all ranks if not given); all contenders start from
    the same parameters. That without sharding is whole in the dtype that ``precision`` gives parameters."""
    torch.manual_seed(1)
    with torch.device(device):
        model: nn.Module = Transformer(shape)
    if name in (SHARDWISE, FLAT, FSDP2):
        options = {} if precision is None else {"mp_policy": precision}
        verb = VERBS[FSDP2 if name == FSDP2 else SHARDWISE]
        wrap(model, verb, mesh or init_device_mesh(device, (dist.get_world_size(),)), options)
    elif precision is not None and name == UNSHARDED:
        model.to(precision.param_dtype)
    elif precision is not None:
        raise ValueError(f"{name} has no setting for {precision}")
    elif name == DDP:
        model = _data_parallel(model)
    flat = functools.partial(shardwise.optim.flat, torch.optim.AdamW)
    optimizer = (flat if name == FLAT else torch.optim.AdamW)(model.parameters(), lr=1e-4)
    return Contender(name, model, optimizer, make_tokens(shape).to(device))


def wrap(model: nn.Module, verb: Any, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Make each block a unit by ``verb``, one of both engines' ``fully_shard``, and the root another."""
    for block in model.get_submodule("blocks").children():
        verb(block, mesh=mesh, **options)
    verb(model, mesh=mesh, **options)


def _data_parallel(model: nn.Module) -> DistributedDataParallel:
    if dist.get_backend() != "fake":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    # A fake group neither compares initial parameters nor gives all-reduces the results that DDP looks for.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    wrapped.register_comm_hook(None, noop_hook)
    return wrapped

"""Two ranks train with torch FSDP2 and with shardwise to the same bits, on the device and over its own collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import shardwise
from bench.contenders import wrap
from bench.model import Shape, Transformer, loss_of, make_tokens

from ..ranks.harness import on_ranks
from .cases import DEVICE, PRECISIONS, mesh_on

SHAPE = Shape(blocks=3, width=256, batch=2, length=64)


def trained(verb: Any, options: dict[str, Any]) -> list[Tensor]:
    """Losses, and whole parameters and moments of the optimizer at the end."""
    torch.manual_seed(1)
    with torch.device(DEVICE):
        model = Transformer(SHAPE)
    tokens = make_tokens(SHAPE)
    tokens = (tokens.flip(0) if dist.get_rank() else tokens // 2).to(DEVICE)
    wrap(model, verb, mesh_on(DEVICE, (2,)), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(5):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    for parameter in model.parameters():
        for tensor in (parameter, optimizer.state[parameter]["momentum_buffer"]):
            assert isinstance(tensor, DTensor)
            found.append(tensor.full_tensor())
    return found


@on_ranks(2, precision=list(PRECISIONS), reshards=[True, False])
def test_bits_of_fsdp2(precision: str, reshards: bool) -> None:
    options = {"mp_policy": PRECISIONS[precision], "reshard_after_forward": reshards}
    expected, found = (trained(verb, options) for verb in (torch_fully_shard, shardwise.fully_shard))
    assert found[0] > found[4]
    assert [index for index, value in enumerate(expected) if not torch.equal(found[index], value)] == []

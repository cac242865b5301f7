"""Collectives over one process group, chosen by backend; the only module that talks to a process group.

gloo: up to `PAIRWISE_WORLD_SIZE` ranks every rank sends to every other rank straight from and into the tensors.
That takes no staging copy, and at 10 MB half the time of gloo's own all-gather and a third of its reduce-scatter
(which clones its input and all-reduces it); `bench/collectives.py` measures it.
Others (NCCL, fake): one coalesced call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .device import Waitable

PAIRWISE_WORLD_SIZE = 8
PACK_BELOW_BYTES = 128 * 1024
"""A chunk below this is sent with others in one staging run: a message costs as long as copying so much."""

_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, Comm] = weakref.WeakKeyDictionary()


class _Done:
    """Work that another step of the same collective finishes."""

    __slots__ = ("finish", "works")

    def __init__(self, works: Sequence[Waitable], finish: Callable[[], None]):
        self.works, self.finish = works, finish

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.finish()


class Comm:
    """Collectives of one process group. All tensors are 1-D and contiguous; works are waited for by the caller."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Waitable]:
        """Fill ``outputs[i]`` (size x n_i elements) with all ranks' ``inputs[i]`` (n_i elements), in rank order."""
        if len(inputs) == 1:
            return [_all_gather_single(outputs[0], inputs[0], self.group)]
        return [self.group.allgather_into_tensor_coalesced(list(outputs), list(inputs))]

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, mean: bool
    ) -> list[Waitable]:
        """Fill ``outputs[i]`` (n_i elements) with the sum (``mean``: the mean) over ranks of their part of
        ``inputs[i]`` (size x n_i elements)."""
        if len(inputs) == 1:
            return [_reduce_scatter_single(outputs[0], inputs[0], self.group, _op(mean))]
        options = dist.ReduceScatterOptions()
        options.reduceOp = _op(mean)
        return [self.group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), options)]

    def all_reduce(self, tensor: torch.Tensor, *, mean: bool) -> list[Waitable]:
        """Replace ``tensor`` by its sum (``mean``: mean) over ranks."""
        return [dist.all_reduce(tensor, op=_op(mean), group=self.group, async_op=True)]

    def all_reduce_now(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks and wait."""
        dist.all_reduce(tensor, group=self.group)

    def all_reduce_largest(self, tensor: torch.Tensor, *, smallest: bool = False) -> None:
        """Replace each element by its largest (``smallest``: smallest) value over ranks and wait."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN if smallest else dist.ReduceOp.MAX, group=self.group)


class SingleComm(Comm):
    """An axis over which nothing is sharded: this rank alone, without a process group."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


class GlooComm(Comm):
    """gloo: asynchronous on its own threads; its averaging is a sum and a division."""

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Waitable]:
        # Its coalesced all-gather copies everything through one more buffer.
        pairs = zip(outputs, inputs, strict=True)
        return [_all_gather_single(output, input_, self.group) for output, input_ in pairs]

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, mean: bool
    ) -> list[Waitable]:
        op = _op(mean)
        pairs = zip(outputs, inputs, strict=True)
        return [_reduce_scatter_single(output, input_, self.group, op) for output, input_ in pairs]

    def all_reduce(self, tensor: torch.Tensor, *, mean: bool) -> list[Waitable]:
        works: list[Waitable] = [dist.all_reduce(tensor, group=self.group, async_op=True)]
        return [_Done(works, lambda: _divide(tensor, self.size))] if mean else works


class PairwiseGlooComm(GlooComm):
    """gloo with few ranks: direct messages. Every operation has a tag of its own, the same on all ranks."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self._operations = 0

    def _tag(self) -> int:
        # Far from the small tags that users choose for messages of their own.
        self._operations = (self._operations + 1) % 2**20
        return 2**24 + self._operations

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Waitable]:
        works: list[Waitable] = []
        for output, input_ in zip(outputs, inputs, strict=True):
            tag, parts = self._tag(), output.split(input_.numel())
            works += [self.group.recv([parts[peer]], peer, tag) for peer in self._peers()]
            works += [self.group.send([input_], peer, tag) for peer in self._peers()]
            if parts[self.rank].data_ptr() != input_.data_ptr():
                parts[self.rank].copy_(input_)
        return works

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, mean: bool
    ) -> list[Waitable]:
        return [self._reduce_scatter_one(output, input_, mean) for output, input_ in zip(outputs, inputs, strict=True)]

    def _reduce_scatter_one(self, output: torch.Tensor, input_: torch.Tensor, mean: bool) -> Waitable:
        tag, parts = self._tag(), input_.split(output.numel())
        received = input_.new_empty((self.size - 1) * output.numel()).split(output.numel())
        works: list[Waitable] = []
        for peer, buffer in zip(self._peers(), received, strict=True):
            works.append(self.group.recv([buffer], peer, tag))
            works.append(self.group.send([parts[peer]], peer, tag))
        # gloo's ring adds from the rank before this one downwards and this one's own part last: the same bits.
        terms = [*reversed(received), parts[self.rank]]

        def add() -> None:
            torch.add(terms[0], terms[1], out=output)
            for term in terms[2:]:
                output.add_(term)
            if mean:
                _divide(output, self.size)
            terms.clear()

        return _Done(works, add)


def comm_for(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """The collectives of ``group`` on ``device``; one object per group, since operations are numbered."""
    if (comm := _comms.get(group)) is None:
        comm = _comms[group] = _make_comm(group, device)
    return comm


def _make_comm(group: dist.ProcessGroup, device: torch.device) -> Comm:
    if device.type != "cpu" or "gloo" not in _backend_name(group, device):
        return Comm(group)
    return PairwiseGlooComm(group) if 1 < group.size() <= PAIRWISE_WORLD_SIZE else GlooComm(group)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    # A mixed group ("cpu:gloo,cuda:nccl") has a backend per device, which only the private getter tells.
    return str(group._get_backend(device).name())


def _op(mean: bool) -> Any:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM


def _divide(tensor: torch.Tensor, divisor: float) -> None:
    tensor.div_(divisor)


def _all_gather_single(output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup) -> Any:
    # The public wrapper has another name before and after torch 2.13.
    return group._allgather_base(output, input_)


def _reduce_scatter_single(output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup, op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return group._reduce_scatter_base(output, input_, options)

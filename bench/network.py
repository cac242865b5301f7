"""A modelled network: a process group of one process whose collectives take as long as a network would need.

Values are a fake group's: this process is rank 0, and the other ranks have what it has. The time is a link's, which
carries one collective after the other: latency + bytes / bandwidth each, with the bytes of a ring. On the CPU a
collective is done at a deadline, for which `Work.wait` sleeps; on CUDA it occupies the stream that it is called on, as
a kernel does. The copies on this machine come on top: the calling thread makes them on the CPU, the stream on CUDA, by
one kernel for each tensor. (A fake group takes one for each rank's part of it.)
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from .ranks import BenchError

NAME = "modelled"
DEVICES = ("cpu", "cuda")
SPIN_SECONDS = 200e-6
"""Of a wait's end: a sleep ends up to so much late."""
OCCUPY = r"""
__device__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void occupy(int nanoseconds) {
    unsigned long long start = now();
    while (now() - start < nanoseconds) {}
}
"""

GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, MESSAGE = "exchange", "message"
SENT: dict[str, Callable[[int], float]] = {
    GATHER: lambda size: size - 1,
    REDUCE_SCATTER: lambda size: (size - 1) / size,
    ALL_REDUCE: lambda size: 2 * (size - 1) / size,
    EXCHANGE: lambda size: (size - 1) / size,
    MESSAGE: lambda size: 1,
}
"""Bytes on the link for each byte of a rank's input, by kind and number of ranks."""
COLLECTIVES: dict[str, tuple[str, int]] = {
    "_allgather_base": (GATHER, 1),
    "all_gather_single": (GATHER, 1),
    "all_gather_single_coalesced": (GATHER, 1),
    "allgather": (GATHER, 1),
    "allgather_coalesced": (GATHER, 1),
    "allgather_into_tensor_coalesced": (GATHER, 1),
    "gather": (GATHER, 1),
    "scatter": (GATHER, 0),
    "_reduce_scatter_base": (REDUCE_SCATTER, 1),
    "reduce_scatter": (REDUCE_SCATTER, 1),
    "reduce_scatter_single": (REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": (REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": (REDUCE_SCATTER, 1),
    "allreduce": (ALL_REDUCE, 0),
    "allreduce_coalesced": (ALL_REDUCE, 0),
    "all_to_all_single": (EXCHANGE, 1),
    "alltoall": (EXCHANGE, 1),
    "alltoall_base": (EXCHANGE, 1),
    "broadcast": (MESSAGE, 0),
    "reduce": (MESSAGE, 0),
    "send": (MESSAGE, 0),
    "recv": (MESSAGE, 0),
    "recv_anysource": (MESSAGE, 0),
}
"""Kind of each method of a process group (some have another name before and after torch 2.13), and which of its
arguments has the bytes that count."""


@dataclass(frozen=True)
class Network:
    """What a link is like.

    Args:
        latency: seconds that a collective takes whatever its size; a coalesced one is one.
        bandwidth: bytes per second that a rank sends.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __str__(self) -> str:
        return f"{1e6 * self.latency:g} µs + {self.bandwidth / 1e9:g} GB/s"

    def seconds(self, sent: float) -> float:
        """That a collective takes which sends ``sent`` bytes."""
        return self.latency + sent / self.bandwidth


INSTANT = Network()


class Clock(Protocol):
    """Who tells the time, in seconds."""

    def now(self) -> float: ...

    def sleep_until(self, deadline: float) -> None: ...


class HostClock:
    """This machine's."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def sleep_until(self, deadline: float) -> None:
        """Return at ``deadline``, or at once if that is over; leaves the core to others for all but the last moment."""
        if (rest := deadline - self.now() - SPIN_SECONDS) > 0:
            time.sleep(rest)
        while self.now() < deadline:
            pass


@dataclass
class Transfer:
    """One collective on a link; moments are by the link's clock, and not numbers where a stream decides.

    Args:
        kind: one of `SENT`.
        sent: bytes on the link.
        seconds: that it occupies the link.
        issued: when it was called.
        start: when the link began with it.
        copied: seconds that the caller then copied what arrives.
        arrived: when the first wait for it was over.
    """

    kind: str
    sent: float
    seconds: float
    issued: float = math.nan
    start: float = math.nan
    copied: float = 0.0
    arrived: float = math.nan

    @property
    def end(self) -> float:
        """When the link is free again."""
        return self.start + self.seconds


class Link(Protocol):
    """The wires between the same ranks."""

    def carry(self, kind: str, sent: float, seconds: float, move: Callable[[], object]) -> tuple[Transfer, dist.Work]:
        """Occupy the link for ``seconds`` once it is free; ``move`` copies what arrives."""


class TimerLink:
    """Tensors on the host: a collective is over when its time has come."""

    def __init__(self, clock: Clock):
        self.clock, self.free = clock, -math.inf

    def occupy(self, kind: str, sent: float, seconds: float) -> Transfer:
        """The next transfer: it starts now, or when the link is free."""
        now = self.clock.now()
        transfer = Transfer(kind, sent, seconds, now, max(now, self.free))
        self.free = transfer.end
        return transfer

    def carry(self, kind: str, sent: float, seconds: float, move: Callable[[], object]) -> tuple[Transfer, dist.Work]:
        transfer = self.occupy(kind, sent, seconds)
        move()
        transfer.copied = self.clock.now() - transfer.issued
        return transfer, TimerWork(self.clock, transfer)


class StreamLink:
    """Tensors on a CUDA device: a collective occupies the current stream, after those issued before it."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def carry(self, kind: str, sent: float, seconds: float, move: Callable[[], object]) -> tuple[Transfer, dist.Work]:
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            if seconds > 0:
                raise BenchError("what is captured into a graph knows no link: set the instant network")
            move()
            return Transfer(kind, sent, seconds), DoneWork()
        if self._last is not None:
            stream.wait_event(self._last)
        if seconds > 0:
            occupying_kernel(torch.cuda.current_device())(args=[round(1e9 * seconds)])
        move()
        self._last = stream.record_event()
        return Transfer(kind, sent, seconds), StreamWork(self._last)


@functools.lru_cache
def occupying_kernel(device: int) -> Any:
    """Takes as many nanoseconds as it is told. By the time of day of the GPU, not by `torch.cuda._sleep`, which counts
    cycles: there are fewer of them in a second when the GPU computes."""
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(OCCUPY, "occupy")


class TimerWork(dist.Work):
    """Done at a deadline."""

    def __init__(self, clock: Clock, transfer: Transfer):
        super().__init__()
        self.clock, self.transfer = clock, transfer

    def wait(self, timeout: Any = None) -> bool:
        """Return when it is done."""
        self.clock.sleep_until(self.transfer.end)
        if math.isnan(self.transfer.arrived):
            self.transfer.arrived = self.clock.now()
        return True

    def is_completed(self) -> bool:
        """Whether the deadline is over."""
        return self.clock.now() >= self.transfer.end


class DoneWork(dist.Work):
    """Ordered by the current stream alone."""

    def wait(self, timeout: Any = None) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """Whether the stream that issued it need not wait."""
        return True


class StreamWork(dist.Work):
    """Done at an event."""

    def __init__(self, event: torch.cuda.Event):
        super().__init__()
        self.event = event

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait."""
        torch.cuda.current_stream().wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        """Whether the device has come so far."""
        return self.event.query()


class Wires:
    """All links of this process, and what they carried. Groups of the same ranks share a link.

    Args:
        network: what every link is like; may be replaced between steps.
        clock: of the links on the host.
    """

    def __init__(self, network: Network, clock: Clock):
        self.network, self.clock = network, clock
        self.log: list[Transfer] = []
        self._links: dict[tuple[tuple[int, ...], str], Link] = {}

    def link(self, ranks: tuple[int, ...], device: str) -> Link:
        """That between ``ranks`` for tensors on ``device``."""
        if (ranks, device) not in self._links:
            self._links[ranks, device] = TimerLink(self.clock) if device == "cpu" else StreamLink()
        return self._links[ranks, device]

    def carry(
        self, ranks: tuple[int, ...], device: str, kind: str, payload: int, move: Callable[[], object]
    ) -> dist.Work:
        """A collective of ``ranks`` in which this rank's input has ``payload`` bytes."""
        sent = payload * SENT[kind](len(ranks))
        transfer, work = self.link(ranks, device).carry(kind, sent, self.network.seconds(sent), move)
        self.log.append(transfer)
        return work


class ModelledGroup(dist.ProcessGroup):
    """Collectives that take their time on ``wires``.

    Args:
        local: moves the bytes of this process.
        name: by which torch knows the group.
        ranks: the members.
        wires: what connects them.
    """

    def __init__(self, local: dist.ProcessGroup, name: str, ranks: tuple[int, ...], wires: Wires):
        super().__init__(local.rank(), local.size())
        self.local, self.ranks, self.wires = local, ranks, wires
        self._name = name

    @property
    def group_name(self) -> str:
        """By which torch finds the group."""
        return self._name

    def barrier(self, opts: Any = None) -> dist.Work:
        """A message without bytes."""
        return self.wires.carry(self.ranks, "cpu", MESSAGE, 0, lambda: None)

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """For messages."""
        return NAME


def _carried(name: str, kind: str, position: int) -> Callable[..., dist.Work]:
    def run(self: ModelledGroup, *args: Any, **kwargs: Any) -> dist.Work:
        values = [*args, *kwargs.values()]
        tensors = list(_tensors(values[position]))
        # An empty list has no device, and nothing to carry.
        device = tensors[0].device.type if tensors else "cpu"
        payload = sum(tensor.nbytes for tensor in tensors)
        if name in MOVES:
            move = functools.partial(MOVES[name], self, *values[:2])
        else:
            move = functools.partial(getattr(self.local, name), *args, **kwargs)
        return self.wires.carry(self.ranks, device, kind, payload, move)

    run.__name__ = name
    return run


def _gather(group: ModelledGroup, outputs: Any, inputs: Any) -> None:
    """All ranks have what this one has."""
    rank, size = group.rank(), group.size()
    # As NCCL's kernels: autograd does not see what is written.
    with torch._C._AutoDispatchBelowAutograd():
        for output, own in zip(_tensors(outputs), _tensors(inputs), strict=True):
            rows = output.view(size, own.numel())
            is_there = rows[rank].data_ptr() == own.data_ptr()
            for others in (rows[:rank], rows[rank + 1 :]) if is_there else (rows,):
                others.copy_(own.view(-1))


def _reduce_scatter(group: ModelledGroup, outputs: Any, inputs: Any) -> None:
    """The other ranks' terms are zeros."""
    with torch._C._AutoDispatchBelowAutograd():
        for output, whole in zip(_tensors(outputs), _tensors(inputs), strict=True):
            output.view(-1).copy_(whole.view(group.size(), output.numel())[group.rank()])


MOVES: dict[str, Callable[[ModelledGroup, Any, Any], None]] = {
    "_allgather_base": _gather,
    "all_gather_single": _gather,
    "all_gather_single_coalesced": _gather,
    "allgather_into_tensor_coalesced": _gather,
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_single_coalesced": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
}
"""Of tensors that hold all ranks' parts, by method; others are a fake group's."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence):
        for item in value:
            yield from _tensors(item)


for _name, (_kind, _position) in COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(ModelledGroup, _name, _carried(_name, _kind, _position))


def _make_group(wires: Wires, options: Any, _: Any) -> ModelledGroup:
    rank, size = options.group_rank, options.group_size
    local = dist.ProcessGroup(options.store, rank, size)
    backend = FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    group = ModelledGroup(local, options.group_id, ranks, wires)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    for owner in (local, group):
        for device in DEVICES:
            owner._register_backend(torch.device(device), kind, backend)
        owner._set_default_backend(kind)
    return group


@contextmanager
def modelled_network(world_size: int, network: Network = INSTANT, clock: Clock | None = None) -> Iterator[Wires]:
    """Make this process rank 0 of ``world_size`` ranks on a modelled network, and of no others; its links are given.

    Args:
        world_size: ranks of the default process group.
        network: what the links are like at first.
        clock: for the links on the host, if not this machine's.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    wires = Wires(network, clock or HostClock())
    make = functools.partial(_make_group, wires)
    dist.Backend.register_backend(NAME, make, extended_api=True, devices=list(DEVICES))
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield wires
    finally:
        dist.destroy_process_group()

"""Streams and events of the compute device.

The rest of the engine asks a `Device` for lanes. On an accelerator a lane is a side stream; on the CPU there is
none, and communication overlaps by asynchronous work alone. Memory is allocated on the compute stream: a lane waits
for the compute stream before it works, and its memory is held until the compute stream has waited for it, so the
caching allocator never reuses a block early. Two kinds of buffers have memory of a lane's own instead, which it uses
again only after the computation: what it gathers ahead of that (`Lease`), and what it reduces to, since gradients stay
when the activations around them go, whose blocks they would divide.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import GroupMember

from .device import annotated_like, map_leaves, not_inference


class Waitable(Protocol):
    """Work under way: its `wait` orders the current stream, or the host, after it."""

    def wait(self) -> object: ...


class Ticket(Protocol):
    """What `Lane.submit` gives."""

    @property
    def event(self) -> Any:
        """Lets what another lane does start `after` the work; of the host's, once it was waited for."""

    def wait(self) -> object:
        """Order the compute stream after the work."""

    def synchronize(self) -> object:
        """Order the host after the work."""


_abandoned: list[tuple[Callable[[], Any], Sequence[Waitable]]] = []
"""Works that nobody waited for before their `Flight` was deleted, each with a reference to the default process group of
that time."""


def current_world(_world: Any = GroupMember, _refer: Any = weakref.ref) -> weakref.ref[Any]:
    """A reference to the default process group, or to what stands for none."""
    # Defaults, here and below, since the names of modules may go before objects when the interpreter ends.
    reference: weakref.ref[Any] = _refer(_world.WORLD or _world)
    return reference


def abandon(
    works: Sequence[Waitable], world: Any = None, _to: list[Any] = _abandoned, _now: Any = current_world
) -> None:
    """Keep ``works`` alive, for which nobody will wait; they were started in ``world``, by default the current one."""
    _to.append((world or _now(), works))


class Flight:
    """Works under way. They are kept alive even if whoever started them is deleted without waiting: gloo breaks a
    connection when one of its messages is freed before it is complete, and the next collective hangs."""

    __slots__ = ("works",)

    def __init__(self, works: Sequence[Waitable]):
        self.works = works

    def wait(self) -> None:
        """Order the current stream, or the host, after them. Each is waited for once, whatever raises in between: the
        second wait for a message of gloo's is for one that never comes."""
        left = iter(self.works)
        try:
            for work in left:
                work.wait()
        finally:
            self.works = tuple(left)

    def __del__(self, abandon: Callable[[Sequence[Waitable]], None] = abandon) -> None:
        if works := getattr(self, "works", ()):
            abandon(works)


def _land_abandoned() -> None:
    """Wait for abandoned works, and free what they hold; other ranks have abandoned the same ones."""
    landed, has_failed, work = list[Sequence[Waitable]](), False, None
    while _abandoned:
        world, works = _abandoned.pop()
        landed.append(works)
        if world() is GroupMember.WORLD and not has_failed:  # otherwise a peer may be gone that they would wait for
            try:
                for work in works:
                    work.wait()
            except RuntimeError:
                has_failed = True
    if landed:
        del works, work
        landed.clear()
        _abandoned.clear()  # messages abandon themselves when they are freed


LITTLE = 2**22
"""Bytes of staging memory that may be kept while nothing is communicated, of small units."""
Step = Callable[[], Sequence[Waitable]]
"""Issues collectives and gives their works; may also compute, on what earlier steps received."""


class Lane(ABC):
    """An ordered sequence of communication beside the computation."""

    @abstractmethod
    def submit(self, *steps: Step, after: Sequence[Any] | None = None) -> Ticket:
        """Run ``steps`` one after the other.

        Args:
            steps: issue the collectives.
            after: events to wait for; None means all computation that is queued by now. One of them must be a
                `Device.mark` made after all memory that the steps use was allocated, unless that is the lane's own.
        """

    @abstractmethod
    def wait_event(self, event: Any) -> None:
        """Let everything that is submitted from now on start after ``event``."""

    is_stream = False
    """Whether what is submitted runs beside the computation by itself, and may run ahead of it."""

    @property
    def is_captured(self) -> bool:
        """Whether the computation is captured now, to run later, as into a CUDA graph; what is submitted is as well, if
        it waits for the computation."""
        return False

    def own_memory(self) -> contextlib.AbstractContextManager[object]:
        """What is allocated inside is this lane's, if it is a stream: it need not wait for the computation to use that
        first, and uses it again once it is free. The computation must not use it first."""
        return contextlib.nullcontext()

    @abstractmethod
    def wait_for_computation(self) -> None:
        """Let everything that is submitted from now on start after all computation that is queued by now."""

    keeps_staging = False
    """Whether staging memory that was released is allocated again, where that is as large: the last, or all that were
    little together."""

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Staging memory for what is submitted next."""
        for index, spare in enumerate(self._spare):
            if spare.shape == size and spare.dtype == dtype:
                return self._spare.pop(index)
        self._keep_little()
        with not_inference():
            return torch.empty(size, dtype=dtype, device=device)

    def release(self, staging: torch.Tensor) -> None:
        """Nothing uses ``staging`` any more, which `allocate` gave."""
        if self.keeps_staging:
            self._keep_little(LITTLE - staging.nbytes)
            self._spare.insert(0, staging)

    def rest(self, *, keeps_little: bool = False) -> None:
        """Nothing is submitted for a while.

        Args:
            keeps_little: let staging memory be, of which there is little: it knows its rows.
        """
        self._keep_little(LITTLE if keeps_little else 0)

    def _keep_little(self, room: int = LITTLE) -> None:
        spare, self._spare = self._spare, []
        for one in spare:
            if (room := room - one.nbytes) < 0:
                return
            self._spare.append(one)


class Lease:
    """Of a lane's own memory, where that submits work that does not wait for the computation; to be held as long as
    that uses it."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane):
        self._lane = lane

    def settle(self) -> None:
        """Some of the memory is about to be freed, and the lane may use it for something else."""
        self._lane.wait_for_computation()

    __del__ = settle


class Device(ABC):
    """A compute device as the engine sees it."""

    def __init__(self, device: torch.device):
        self.torch_device = device

    @abstractmethod
    def lane(self) -> Lane:
        """A new lane."""

    @abstractmethod
    def mark(self) -> Any:
        """An event after which everything queued on the compute stream so far is done."""

    @abstractmethod
    def move_inputs(self, value: Any) -> Any:
        """``value`` with its tensors moved to this device, where a device other than the host computes."""


class _HostTicket(Flight):
    """The first step runs at once, the others when this is waited for."""

    __slots__ = ("steps",)

    def __init__(self, steps: Sequence[Step]):
        self.works, self.steps = steps[0](), steps[1:]

    @property
    def event(self) -> Any:
        assert not self.works, "nothing but the host orders what the host does"
        return None

    def wait(self) -> None:
        super().wait()
        while self.steps:
            step, self.steps = self.steps[0], self.steps[1:]
            self.works = step()
            super().wait()

    synchronize = wait


class _HostLane(Lane):
    # If it were freed and allocated again for each unit, the C library would often return its pages to the kernel in
    # between, and each would fault again.
    keeps_staging = True

    def submit(self, *steps: Step, after: Sequence[Any] | None = None) -> Ticket:
        return _HostTicket(steps)

    def wait_event(self, event: Any) -> None:
        event.wait()

    def wait_for_computation(self) -> None:
        pass  # the host computes before it submits


class HostDevice(Device):
    """The CPU: collectives run on the process group's own threads."""

    def mark(self) -> Any:
        return None

    def lane(self) -> Lane:
        _land_abandoned()
        return _HostLane()

    def move_inputs(self, value: Any) -> Any:
        return value


class _OnStream:
    """Inside, the current stream is ``stream``. torch's own context asks each time which accelerators there are."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream):
        self._stream = stream
        self._before: Sequence[torch.Stream] = ()

    def __enter__(self) -> None:
        # Setting a stream sets the device, which may be another than the current one.
        devices = dict.fromkeys((self._stream.device_index, torch.accelerator.current_device_index()))
        self._before = [*map(torch.accelerator.current_stream, devices)]
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        for stream in self._before:
            torch.accelerator.set_stream(stream)


class _StreamTicket:
    """Holds what the work uses until the compute stream or the host waits for it, at the latest when it is deleted."""

    __slots__ = ("event", "lane", "steps")

    def __init__(self, lane: _StreamLane, event: torch.Event, steps: Sequence[Step]):
        self.lane, self.event, self.steps = lane, event, steps

    def wait(self) -> None:
        self.lane.computation.wait_event(self.event)
        self.steps = ()

    def synchronize(self) -> None:
        self.event.synchronize()
        self.steps = ()

    def __del__(self) -> None:
        if self.steps:
            self.wait()


class _StreamLane(Lane):
    is_stream = True

    def __init__(self, device: torch.device):
        super().__init__()
        # High priority: its kernels are short and computation waits for them.
        self.stream = torch.Stream(device, priority=-1)
        self._index = self.stream.device_index
        module = torch.get_device_module(device)
        self._is_capturing: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)

    @property
    def computation(self) -> torch.Stream:
        """The stream that computes now."""
        return torch.accelerator.current_stream(self._index)

    @property
    def is_captured(self) -> bool:
        return self._is_capturing()

    def own_memory(self) -> contextlib.AbstractContextManager[object]:
        # The caching allocator gives a block again to the stream that was current when it was allocated.
        return _OnStream(self.stream)

    def wait_for_computation(self) -> None:
        self.stream.wait_stream(self.computation)

    def submit(self, *steps: Step, after: Sequence[Any] | None = None) -> Ticket:
        if after is None:
            self.wait_for_computation()
        for event in after or ():
            self.wait_event(event)
        try:
            with _OnStream(self.stream):
                for step in steps:
                    for work in step():
                        work.wait()
        except BaseException:
            self.computation.wait_stream(self.stream)  # unwinding frees what earlier steps still use
            raise
        return _StreamTicket(self, self.stream.record_event(), steps)

    def wait_event(self, event: Any) -> None:
        # Users' are of a kind that waits for a stream of that kind alone, or for the current one.
        with _OnStream(self.stream):
            event.wait()


class AcceleratorDevice(Device):
    """CUDA and devices with its stream semantics."""

    def mark(self) -> Any:
        return torch.accelerator.current_stream(self.torch_device.index).record_event()

    def lane(self) -> Lane:
        _land_abandoned()
        return _StreamLane(self.torch_device)

    def move_inputs(self, value: Any) -> Any:
        return map_leaves(self._move, value)

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type != self.torch_device.type:
            return annotated_like(leaf.to(self.torch_device, non_blocking=True), leaf)
        return leaf


def current_device(device_type: str) -> torch.device:
    """The device of that type, ``"cpu"``, ``"cuda"`` …, that this process computes on."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


@functools.lru_cache
def device_for(device: torch.device) -> Device:
    """The `Device` of a torch device."""
    return HostDevice(device) if device.type == "cpu" else AcceleratorDevice(device)

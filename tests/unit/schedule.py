"""An accelerator that records, and happens-before of what it recorded: uses that a real one could run too early or too
late."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core import buffer
from shardwise.core.buffer import free_storage
from shardwise.core.lanes import Device, Lane, Step, Ticket
from shardwise.core.tree import tensors_in

Clock = dict[int, int]

ONLY_ALLOCATE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
"""Operators that leave the memory of what they make as it is."""


@dataclass(frozen=True)
class Logged:
    """One entry of a `RecordingDevice`'s log.

    Args:
        kind: "use", "record" or "wait"; of memory "allocate" or "free".
        stream: on which; 0 computes.
        event: recorded or waited for.
        name: of the operator.
        reads: storages that it reads, by number.
        writes: storages that it writes.
    """

    kind: str
    stream: int
    event: int = 0
    name: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


class RecordingDevice(Device):
    """The CPU behaving as an accelerator: its lanes are streams, and what happens on them is logged.

    Operators run at once, so results are right whatever the streams do; whether a real device could have run them
    in another order is what a checker reads from the log. Memory events come from whoever watches the operators.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[Logged] = []
        self.current = 0
        self.events = 0
        self.before_submit: Callable[[], None] = lambda: None
        self._streams = 0

    def lane(self) -> Lane:
        self._streams += 1
        return RecordingLane(self, self._streams)

    def move_inputs(self, value: Any) -> Any:
        return value

    def mark(self) -> Any:
        self.before_submit()
        return self.record(self.current)

    def record(self, stream: int) -> int:
        """Record an event on ``stream``; gives its number."""
        self.events += 1
        self.log.append(Logged("record", stream, self.events))
        return self.events

    def wait(self, stream: int, event: int) -> None:
        """Let ``stream`` wait for ``event``."""
        self.log.append(Logged("wait", stream, event))


class RecordingLane(Lane):
    is_stream = True

    def __init__(self, device: RecordingDevice, stream: int):
        super().__init__()
        self.device, self.stream = device, stream

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        device, outer = self.device, self.device.current
        device.before_submit()
        device.current = self.stream
        try:
            yield
            device.before_submit()
        finally:
            device.current = outer

    def wait_for_computation(self) -> None:
        self.device.wait(self.stream, self.device.record(self.device.current))

    def submit(self, *steps: Step, after: Sequence[Any] | None = None) -> Ticket:
        device, outer = self.device, self.device.current
        device.before_submit()
        for event in [device.record(outer)] if after is None else after:
            device.wait(self.stream, event)
        device.current = self.stream
        try:
            for step in steps:
                for work in step():
                    work.wait()
        except BaseException:
            device.wait(outer, device.record(self.stream))
            raise
        finally:
            device.current = outer
        return RecordingTicket(device, device.record(self.stream), steps)

    def wait_event(self, event: Any) -> None:
        self.device.wait(self.stream, event)


class RecordingTicket:
    __slots__ = ("device", "event", "steps")

    def __init__(self, device: RecordingDevice, event: int, steps: Sequence[Step]):
        self.device, self.event, self.steps = device, event, steps

    def wait(self) -> None:
        self.device.wait(self.device.current, self.event)
        self.steps = ()

    synchronize = wait

    def __del__(self) -> None:
        if self.steps:
            self.wait()


class Watched(TorchDispatchMode):
    """Logs on a recording device what operators read and write, and when memory comes and goes.

    Memory belongs to the stream that is current when it appears, as with the caching allocator: after it is freed,
    that stream may use it again at once.
    """

    def __init__(self, device: RecordingDevice):
        super().__init__()
        self.device = device
        self.numbers: dict[int, int] = {}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.empty: dict[int, tuple[StorageWeakRef, int]] = {}
        self.count = 0
        device.before_submit = self.sweep

    def __enter__(self) -> Watched:
        # What is freed and allocated again between two operators may be another stream's since.
        self.freeing = patch.object(buffer, "free_storage", self._free)
        self.freeing.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.freeing.stop()
        super().__exit__(*raised)

    def _free(self, tensor: torch.Tensor) -> None:
        free_storage(tensor)
        self.sweep()

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            self.count += 1
            self.numbers[key] = self.count
            self.device.log.append(Logged("allocate", self.device.current, self.count))
            self.alive[key] = (StorageWeakRef(storage), self.count)
        return self.numbers[key]

    def sweep(self) -> None:
        """Log what was freed since the last operator: storages that are gone, or resized to nothing."""
        for key, (reference, number) in list(self.empty.items()):
            if reference.expired():
                del self.empty[key]
            elif _size_of(reference):
                self.alive[key] = self.empty.pop(key)
                self.numbers[key] = number
                self.device.log.append(Logged("allocate", self.device.current, number))
        gone = [key for key, (reference, _) in self.alive.items() if not _size_of(reference)]
        for key in gone:
            number = self.alive[key][1]
            self.device.log.append(Logged("free", self.device.current, number))
            self.empty[key] = self.alive.pop(key)
            del self.numbers[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.sweep()
        written = _written(func, args, kwargs)
        before = {id(t): t for t in tensors_in((args, kwargs)) if _real(t)}
        reads = tuple(self._number(t) for t in before.values() if id(t) not in written)
        result = func(*args, **kwargs)
        outputs = [t for t in tensors_in(result) if _real(t)]
        writes = {self._number(t) for t in [*written.values(), *outputs] if _real(t)}
        # Neither touches memory.
        if not (_is_view(func) or func._schema.name in ONLY_ALLOCATE):
            self.device.log.append(Logged("use", self.device.current, 0, str(func), reads, tuple(sorted(writes))))
        return result


def _real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() > 0


def _size_of(reference: StorageWeakRef) -> int:
    """0 also if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


@functools.cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@functools.cache
def _arguments_written(func: Any) -> list[tuple[int, str]]:
    """Place and name of each."""
    arguments = enumerate(func._schema.arguments)
    return [(place, one.name) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write]


def _written(func: Any, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in _arguments_written(func)]
    return {id(t): t for t in tensors_in(values)}


def faults(log: list[Logged]) -> list[str]:
    """What is not ordered: reads of what another stream may still write, writes of what it may still use, and uses of
    memory that another stream may not have yet, or may still use as what it was before: whatever its owner freed."""
    clocks: dict[int, Clock] = defaultdict(lambda: defaultdict(int))
    events: dict[int, Clock] = {}
    owners: dict[int, int] = {}
    since: dict[int, int] = {}
    writes: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
    uses: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
    freed: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
    before: dict[int, dict[int, tuple[int, str]]] = {}
    found = []

    def unordered(stream: int, earlier: dict[int, tuple[int, str]]) -> list[str]:
        return [name for other, (time, name) in earlier.items() if other != stream and clocks[stream][other] < time]

    for entry in log:
        clock = clocks[entry.stream]
        if entry.kind == "record":
            clock[entry.stream] += 1
            events[entry.event] = dict(clock)
        elif entry.kind == "wait":
            for stream, time in events[entry.event].items():
                clock[stream] = max(clock[stream], time)
        elif entry.kind == "allocate":
            clock[entry.stream] += 1
            owners[entry.event], since[entry.event] = entry.stream, clock[entry.stream]
            before[entry.event] = dict(freed[entry.stream])
        elif entry.kind == "free":
            owner = owners.pop(entry.event, entry.stream)
            for stream, use in uses.pop(entry.event, {}).items():
                freed[owner][stream] = max(use, freed[owner].get(stream, use))
            writes.pop(entry.event, None)
        else:
            clock[entry.stream] += 1
            for storage in {*entry.reads, *entry.writes}:
                owner = owners.get(storage, entry.stream)
                if owner != entry.stream and clock[owner] < since[storage]:
                    found.append(f"{entry.name} uses memory that is not free yet")
                last = before.get(storage, {})
                found += [f"{entry.name} uses memory freed while in use by {n}" for n in unordered(entry.stream, last)]
            for storage in entry.reads:
                found += [f"{entry.name} reads before {n} wrote" for n in unordered(entry.stream, writes[storage])]
            for storage in entry.writes:
                found += [f"{entry.name} writes while {n} uses" for n in unordered(entry.stream, uses[storage])]
                writes[storage][entry.stream] = (clock[entry.stream], entry.name)
            for storage in (*entry.reads, *entry.writes):
                uses[storage][entry.stream] = (clock[entry.stream], entry.name)
    return found

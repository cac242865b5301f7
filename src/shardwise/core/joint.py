"""Gathers of several small units in one collective: a message costs more than what a small unit sends."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from .agreement import explain_failure, sized
from .buffer import Gather, ShardedBuffer, start_together
from .comm import Comm
from .device import label, outside_transforms
from .lanes import Lane, Ticket, Waitable

JOINT_BYTES = 2**21
"""Of whole parameters that are gathered together: the first of them waits for all."""


class _Member(NamedTuple):
    name: str
    buffers: Sequence[ShardedBuffer]
    takes: bool


def joins(buffers: Sequence[ShardedBuffer]) -> bool:
    """Whether ``buffers`` can be gathered in one run with those of other groups."""
    return all(buffer.run_plan is not None for buffer in buffers)


def size_of(buffers: Iterable[ShardedBuffer]) -> str:
    """What is gathered of ``buffers``, for messages."""
    return sized((buffer.dtype, tensor.numel) for buffer in buffers for tensor in buffer.layout.tensors)


def _issue(gathers: Sequence[tuple[Comm, Gather]], purpose: str) -> Sequence[Waitable]:
    works: list[Waitable] = []
    for comm, gather in gathers:
        if gather.prepare is not None:
            gather.prepare()
        works += comm.all_gather(gather.outputs, gather.inputs, purpose)
    return works


class JointGather:
    """The ticket of groups that are gathered together: started once all of them have been added, or by the first that
    waits.

    Args:
        lane: that communicates.
    """

    def __init__(self, lane: Lane):
        self.lane = lane
        self._members: list[_Member] = []
        self._finish: dict[ShardedBuffer, Callable[[], None]] = {}
        self._gathers: Sequence[tuple[Comm, Gather]] = ()
        """Held until somebody waited: memory in which this rank puts nothing is written all the same."""
        self._ticket: Ticket | None = None
        self._bytes = 0
        self.has_failed = False
        """Whether it raised: nobody waits for it then, and nothing was gathered."""
        self.is_followed = False
        """Whether what is expected after its units is on its way, or was."""

    def __len__(self) -> int:
        return len(self._members)

    def add(self, name: str, buffers: Sequence[ShardedBuffer]) -> list[Gather]:
        """Gather also a group.

        Args:
            name: of its unit, for messages.
            buffers: of which `joins` says that they can.

        Returns:
            What is left to do for each of the buffers, once it was waited for.
        """
        self._members.append(_Member(name, buffers, takes=True))
        return [Gather(finish=functools.partial(self._finish_one, buffer)) for buffer in buffers]

    def send(self, name: str, buffers: Sequence[ShardedBuffer]) -> None:
        """Send also this rank's part of a group that does not have to be gathered here, as others may have to."""
        self._members.append(_Member(name, buffers, takes=False))

    @property
    def held_bytes(self) -> int:
        """Of memory that holds what was gathered, until all of it is in its places."""
        return self._bytes if self._finish else 0

    def _finish_one(self, buffer: ShardedBuffer) -> None:
        self._finish.pop(buffer)()

    @outside_transforms
    def start(self) -> None:
        """Start gathering what was added; does nothing if that has begun.

        Raises:
            RuntimeError: if ranks are known to be gone.
        """
        if self._ticket is not None or not self._members:
            return
        alike: defaultdict[tuple[Comm, torch.dtype, torch.device], list[tuple[ShardedBuffer, bool]]] = defaultdict(list)
        for _, buffers, takes in self._members:
            for buffer in buffers:
                alike[buffer.comm, buffer.dtype, buffer.device].append((buffer, takes))
        names = ", ".join(member.name for member in self._members)
        try:
            with label(f"FSDP::all_gather ({names})"):
                gathers = [(comm, self._start_gather(*zip(*sent, strict=True))) for (comm, *_), sent in alike.items()]
                self._gathers = gathers
                self._ticket = self.lane.submit(functools.partial(_issue, gathers, names))
        except BaseException as error:
            self._fail(error)
            raise

    def _start_gather(self, buffers: Sequence[ShardedBuffer], takes: Sequence[bool]) -> Gather:
        if len(buffers) == 1 and takes[0]:
            gather = buffers[0].start_gather(self.lane)
            assert gather.finish is not None, "what joins is staged"
            finish = [gather.finish]
        else:
            plans = [plan for buffer in buffers if (plan := buffer.run_plan) is not None]
            gather, finish = start_together(plans, self.lane, takes)
        self._finish |= zip(compress(buffers, takes), finish, strict=True)
        self._bytes += sum([buffer.full_bytes for buffer in buffers])
        return gather

    @property
    def event(self) -> Any:
        """See `Ticket.event`."""
        assert self._ticket is not None
        return self._ticket.event

    def wait(self) -> None:
        """Order the compute stream after the gather."""
        self.start()
        assert self._ticket is not None
        try:
            self._ticket.wait()
        except BaseException as error:
            self._fail(error)
            raise
        self._members, self._gathers = [], ()  # units may leave the model

    def synchronize(self) -> None:
        """Order the host after the gather."""
        if self._ticket is not None:
            self._ticket.synchronize()

    def _fail(self, error: BaseException) -> None:
        """Nobody gets what it gathers, as ``error`` was raised, which is explained."""
        self.has_failed = True
        if isinstance(error, RuntimeError):
            self._explain(error)
        self._members, self._finish, self._gathers = [], {}, ()

    def _explain(self, error: RuntimeError) -> None:
        buffers = [buffer for member in self._members for buffer in member.buffers]
        names = ", ".join(repr(member.name) for member in self._members)
        comms = dict.fromkeys(buffer.comm for buffer in buffers)
        explain_failure(error, f"gathering the parameters of units {names} ({size_of(buffers)})", *comms)

"""ParamGroup: parameters that are gathered, and whose gradients are reduced, together. It knows how, never when."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from .agreement import explain_failure
from .buffer import Gather
from .comm import StagedCollective, by_custom
from .device import (
    annotated_like,
    labelled,
    local_of,
    make_spec,
    not_inference,
    outside_transforms,
    unwrapped,
    without_torch_function,
)
from .errors import StateError, is_explained
from .joint import JointGather, joins, size_of
from .lanes import Lane, Lease, Ticket, Waitable
from .mesh import DataParallelMesh, DataParallelRanks
from .options import GroupOptions
from .parameter import make_sharded_parameter
from .reducer import GradientReducer
from .replaced import mark_replaced, remember_successor
from .shards import Shards
from .slot import Slot


class ShardState(Enum):
    """Which face of its parameters a group has registered."""

    SHARDED = auto()
    RESHARDED = auto()
    """Cut over a smaller world, between forward and backward."""
    UNSHARDED = auto()


@dataclass(frozen=True)
class _Prepared:
    """A gather whose memory is allocated, the events that it has to wait for, and the `Shards.stamp` of that time."""

    gathers: Sequence[Gather]
    after: tuple[Any, ...]
    stamp: tuple[int, ...]


def _issue(reference: weakref.ref[ParamGroup], gathers: Sequence[Gather]) -> Sequence[Waitable]:
    # Weak: the group holds the ticket of the gather, which holds this.
    group = reference()
    assert group is not None
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for gather in gathers:
        if gather.prepare is not None:
            gather.prepare()
        outputs += gather.outputs
        inputs += gather.inputs
    works = group._issue_gather(outputs, inputs) if inputs else []
    for gather in gathers:
        if gather.thin is not None:
            works = [*works, *group.mesh.shard.unite(gather.thin)]
    return works


class ParamGroup:
    """Some parameters of one mesh, their buffers (one per dtype), and the verbs on them.

    Takes parameters, not a module: an optimizer wrapper has no module.

    Args:
        shards: the sharded parameters.
    """

    def __init__(self, shards: Shards):
        self.shards, self.policy = shards, shards.policy
        self.fqn = ""
        """Of the unit's module, for labels; empty for the root, as in the labels of its hooks."""
        self.options = GroupOptions()
        self.state = ShardState.SHARDED
        self.slots: Sequence[Slot] = shards.slots
        self.gradients = GradientReducer(shards, self.options)
        self._gather: tuple[Ticket | None, Sequence[Gather]] | None = None
        self._prepared: _Prepared | None = None
        self._lane: Lane | None = None
        """That the last gather ran on, after all that was written to the shards before it."""
        self._lease: Lease | None = None
        """Of the gathered buffers' memory, where that is a lane's."""
        self.is_asked_for = False
        """Whether the user started the gather, and nobody waited for it: not whether the handle exists still, of which
        ranks may differ."""
        self.stays_registered = False
        """Whether the unsharded parameters stay registered from forward to backward because the user gathered them,
        though resharding would keep their memory."""
        self.is_whole_everywhere = self.mesh.shard.size == 1 < self.mesh.size
        """Whether nothing but its reductions is communicated: ranks may run its unit forward or not, as they like."""
        self._is_kept = self._keeps_unsharded = self.mesh.strategy.keeps_unsharded
        self._is_replayed = False
        """Whether a graph was captured that has gathers of these: it writes the shards again whenever it is replayed,
        of which nothing tells."""
        self._is_cut = False
        """Whether chunks over the smaller world are there, which the next gather takes."""

    @property
    def mesh(self) -> DataParallelRanks:
        """Ranks and strategy."""
        return self.shards.mesh

    @property
    def name(self) -> str:
        """Of the unit, for messages."""
        return self.shards.unit_name

    @name.setter
    def name(self, name: str) -> None:
        self.shards.unit_name = name

    @property
    def takes_turns(self) -> bool:
        """Whether its gradients are reduced after every backward that reduces on all ranks, also where that has not
        come to its unit."""
        return self.is_whole_everywhere or self.options.zeros_for_unused

    def show_once(self, lane: Lane) -> None:
        """Let there be unsharded parameters, of those that are registered now, which gradients may come for, though no
        forward needed them here."""
        if self.state is ShardState.SHARDED and not (self.is_gathering or self.shards.is_adopted):
            with contextlib.suppress(StateError):  # what cannot be taken over the unit's next forward tells, if it runs
                self.adopt_for_use()
        if not all(slot.was_unsharded for slot in self.slots):
            self.unshard(lane)
            self.wait_for_unshard()
            self.reshard()

    def use_ranks(self, ranks: DataParallelRanks) -> None:
        """Communicate by ``ranks`` from now on: as many, and this rank in the same place."""
        assert (ranks.shard.rank, ranks.shard.size) == (self.mesh.shard.rank, self.mesh.shard.size)
        self.shards.mesh = ranks
        for buffer in self.shards.buffers:
            buffer.comm = ranks.shard
        self.gradients.forget_plans()
        self.gradients.forget_absences()

    @outside_transforms
    def adopt_registered(self, *, is_loading: bool = False) -> None:
        """`Shards.adopt_registered`, between uses."""
        assert self.state is ShardState.SHARDED
        self._prepared = None
        if self._lease is not None:
            self._lease.settle()  # memory of what is replaced goes, or stays in use
        if self.shards.adopt_registered(is_loading=is_loading):
            self.gradients.forget_plans()

    def adopt_for_use(self) -> None:
        """`adopt_registered`, once nothing more is to be replaced.

        Raises:
            StateError: if a tied parameter was replaced under one of its names alone.
        """
        for slot in self.slots:
            slot.refuse_untied()
        self.adopt_registered()

    # -- Unsharding

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self.state is ShardState.UNSHARDED

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started that nobody waited for."""
        return self._gather is not None

    @property
    def is_on_its_way(self) -> bool:
        """Whether it is gathering, and has to communicate for that."""
        return self._gather is not None and self._gather[0] is not None

    @property
    def joint(self) -> JointGather | None:
        """That it is gathered by with others, until it was waited for."""
        ticket = None if self._gather is None else self._gather[0]
        return ticket if isinstance(ticket, JointGather) else None

    def unshard(self, lane: Lane, *, for_backward: bool = False, ahead: bool = False) -> None:
        """Start gathering; does nothing if the parameters are gathered or on their way.

        Args:
            lane: that communicates.
            for_backward: the graph has the gathered buffers, so that what replaced parameters since counts later.
            ahead: as in `start_gather`.
        """
        if self.prepare_gather(lane, for_backward=for_backward):
            self.start_gather(lane, ahead=ahead)

    def prepare_gather(self, lane: Lane, *, for_backward: bool = False) -> bool:
        """Give up what is outdated, take over what was replaced.

        Returns:
            Whether to start a gather: not if the parameters are gathered, or on their way.
        """
        if self._gather is not None and self._has_failed_with_others:
            self._gather = None
        if self._gather is not None:
            # Others may compute long between a gather with theirs and its use.
            looks = self._keeps_unsharded or self.is_asked_for or self.joint is not None
            is_outdated = self.shards.changed() if looks else self.shards.is_outdated
            if for_backward or not is_outdated:
                return False
            self.reshard()  # an optimizer stepped since
        if self.state is ShardState.UNSHARDED:
            if for_backward or not self._may_differ(lane):
                self.shards.agree_on_gradients()
                return False
            # Kept since before the optimizer changed the shards.
            self._refuse_replaced()
            self.reshard()
        elif self.state is ShardState.RESHARDED and not for_backward and self._may_differ(lane):
            self.reshard()  # cut from what was gathered before
        if self.state is ShardState.SHARDED and not for_backward and not self.shards.is_adopted:
            self.adopt_for_use()
        if self._is_kept and not self._may_differ(lane):
            self._gather = None, ()
            return False
        if self._is_cut and self.state is ShardState.SHARDED and self._may_differ(lane):
            self._drop_resharded()
        self.shards.check_materialized()
        return True

    def _refuse_replaced(self) -> None:
        """
        Raises:
            StateError: if others are registered in place of the unsharded parameters.
        """
        if (found := self.shards.replaced()) is not None:
            name, other = found
            raise StateError(
                f"parameter {name!r} of unit {self.name!r} was replaced by a {type(other).__name__} while it was "
                "gathered, and has to be gathered again: call reshard() before it is replaced, and see that it is "
                "sharded, or write values into the sharded one (for torch.func.functional_call, which replaces for one "
                "forward, call unshard() after the optimizer's step)"
            )

    def refuse_lost(self) -> None:
        """
        Raises:
            StateError: if unsharded parameters that a graph has are gone, and backward would compute with freed memory,
                or leave gradients where nobody looks for them.
        """
        if (slot := self.shards.lost) is not None and (slot.sharded.requires_grad or not self._keeps_unsharded):
            raise StateError(
                f"parameter {slot.name!r} of unit {self.name!r} was converted or moved, or replaced by one that is "
                "gathered otherwise, between forward and backward, which needs what forward computed with: do that "
                "before forward, or after backward"
            )

    def join_changed(self, joint: JointGather) -> None:
        """Gather with others, though nothing uses it yet, if it ever was gathered, and has to be again."""
        lane = joint.lane
        has_to = self.shards.was_gathered and not (self._is_replayed or lane.is_captured) and self.has_to_gather(lane)
        if has_to and self.prepare_gather(lane):
            self.start_gather(lane, joint=joint if self.joins else None)

    def takes_from_others(self, *, for_backward: bool) -> bool:
        """Whether what others gather is put here as well, once it is used: not if it is there, or on its way."""
        if self.state is not ShardState.SHARDED or self._gather is not None or self._is_kept:
            return False
        is_usable = self.options.unshard_in_backward if for_backward else self.shards.is_adopted
        return is_usable and self.shards.is_materialized

    def has_to_gather(self, lane: Lane) -> bool:
        """Whether the next forward gathers, on ``lane``."""
        is_there = (self.is_unsharded or self._is_kept) and not self._may_differ(lane)
        return not (is_there or self.is_gathering)

    def _may_differ(self, lane: Lane) -> bool:
        """Whether what was gathered before may not be what the shards are."""
        return self._is_replayed or lane.is_captured or self.shards.changed()

    @labelled("FSDP::all_gather ({of.fqn})")
    @outside_transforms
    def start_gather(self, lane: Lane, *, ahead: bool = False, joint: JointGather | None = None) -> None:
        """Start gathering, prepared or not.

        Args:
            lane: that communicates.
            ahead: not to wait for what is queued on the compute stream, if the shards were not written since they were
                gathered last.
            joint: to gather with, and not to start; of the same lane. Only if it `joins`.
        """
        self._is_kept = False  # should the gather fail
        self._is_replayed = self._is_replayed or lane.is_captured
        ahead = ahead and self._may_run_ahead(lane)
        self.shards.note_gather()
        self._lane = lane
        if self.shards.borrowed:
            self.shards.take_borrowed()
        self.shards.note_gathered(keeps=self._keeps_unsharded)  # that may be used long after the shards are written
        if joint is not None:
            self._gather = joint, joint.add(self.name, self.shards.buffers)
            return
        prepared, self._prepared = self._prepared, None
        after: tuple[Any, ...] | None = None
        if ahead and prepared is None:
            self._lease = Lease(lane)
            with lane.own_memory():
                gathers, after = self._start_gathers(lane), ()
        elif prepared is None:
            gathers = self._start_gathers(lane)
        else:
            gathers = prepared.gathers
            # The event says nothing of what was written to the shards after it.
            after = prepared.after if prepared.stamp == self.shards.stamp() else None
        works = [gather for gather in gathers if gather.inputs or gather.prepare]
        issue = functools.partial(_issue, weakref.ref(self), works)
        ticket = None
        if works:
            try:
                ticket = lane.submit(issue, after=after)
            except RuntimeError as error:  # gloo refuses messages once it knows that the other rank is gone
                self._explain(error)
                raise
        self._gather = ticket, gathers

    def note_asked(self) -> None:
        """The user asked for its parameters, and may write to the shards before what was gathered is used."""
        self.is_asked_for = self.is_gathering
        self.shards.watch()

    @property
    def joins(self) -> bool:
        """Whether the next gather may be one with those of other groups, for as long as they need."""
        is_plain = self._prepared is None and self._custom_gather is None and not self.shards.is_meta
        return is_plain and joins(self.shards.buffers)

    def send_with(self, joint: JointGather) -> None:
        """Take part in a gather for others, of a group that does not have to be gathered here."""
        joint.send(self.name, self.shards.buffers)

    @property
    def _has_failed_with_others(self) -> bool:
        return (joint := self.joint) is not None and joint.has_failed

    def _may_run_ahead(self, lane: Lane) -> bool:
        if not (lane.is_stream and lane is self._lane and self.shards.sees_writes) or lane.is_captured:
            return False
        # What is gathered is computed then, or was since forward; or its memory is there already, and in use.
        computed = self.shards.borrowed or self._is_cut or any(buffer.computes_first for buffer in self.shards.buffers)
        waits = computed or self.options.keeps_memory or self.options.custom_gather is not None
        return not (waits or self.shards.changed())

    def prepare_unshard(self, lane: Lane, event: Any, mark: Callable[[], Any]) -> None:
        """Allocate what the next gather needs, which is then ordered after ``event`` and the allocation alone."""
        if any(buffer.computes_first for buffer in self.shards.buffers):
            return  # of shards that may be written until the computation comes to the gather
        if self._gather is None and self.state is ShardState.SHARDED and self.shards.is_adopted:
            self._drop_resharded()  # shards may be written until the computation comes to the gather, which reads those
            self.shards.check_materialized()
            gathers = self._start_gathers(lane)
            self._prepared = _Prepared(gathers, (event, mark()), self.shards.stamp())

    @property
    def _custom_gather(self) -> StagedCollective | None:
        """What the user set to gather, if there is anything to be gathered."""
        return None if self.mesh.shard.size == 1 else self.options.custom_gather

    def _start_gathers(self, lane: Lane) -> Sequence[Gather]:
        try:
            if (custom := self._custom_gather) is None:
                return [buffer.start_gather(lane) for buffer in self.shards.buffers]
            return [buffer.start_staged_gather(custom.allocate) for buffer in self.shards.buffers]
        except BaseException:  # of memory there is too little: what was allocated must not stay until it is enough
            self._free()
            raise

    def _issue_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[Waitable]:
        first = self.shards.buffers[0]
        if (custom := self._custom_gather) is None:
            return first.gather_comm.all_gather(outputs, inputs, self.name)
        return by_custom(custom, outputs, inputs, group=first.gather_comm.group, async_op=False)

    @outside_transforms
    def wait_for_unshard(self) -> None:
        """Wait for the gather and register the unsharded parameters.

        Raises:
            StateError: if it was one with other units, one of which waited for it and failed.
        """
        if self._gather is None:
            return
        has_failed, (ticket, gathers) = self._has_failed_with_others, self._gather
        was_asked_for, self._gather, self.is_asked_for = self.is_asked_for, None, False
        if has_failed:
            raise StateError(
                f"unit {self.name!r} was gathered together with others, which failed when one of those waited for it: "
                "call unshard() again"
            )
        if ticket is not None:
            try:
                ticket.wait()
            except RuntimeError as error:
                if not is_explained(error):
                    self._explain(error)
                raise
        try:
            self._finish_gathers(ticket, gathers, was_asked_for)
        except BaseException:  # as of an extension: nothing is registered that would be resharded
            self._free()
            raise
        self.state = ShardState.UNSHARDED  # from the first parameter on, whatever comes
        self.shards.put_unsharded()
        self._drop_resharded()

    def _finish_gathers(self, ticket: Ticket | None, gathers: Sequence[Gather], was_asked_for: bool) -> None:
        if self.policy.offload:
            self.shards.read_by = ticket
        for gather in gathers:
            if gather.finish is not None:
                gather.finish()
        if gathers:
            if not (self._keeps_unsharded or was_asked_for):
                # Where parameters do not stay gathered the next use gathers again anyhow, and maybe ahead.
                keeps = not (self.options.reshard_after_forward and self.options.reshard_after_backward)
                self.shards.note_gathered(keeps=keeps or (self._lane is not None and self._lane.is_stream))
            if self._lease is not None:
                self._lease.settle()  # staging memory goes with the gathers

    def _explain(self, error: RuntimeError) -> None:
        what = f"gathering the parameters of unit {self.name!r} ({size_of(self.shards.buffers)})"
        explain_failure(error, what, self.shards.buffers[0].gather_comm, self.mesh.shard)

    def _free(self) -> None:
        self._lease, self._is_kept = None, False
        for buffer in self.shards.buffers:
            buffer.free()

    def _drop_resharded(self) -> None:
        if self._is_cut:
            self._is_cut = False
            for buffer in self.shards.buffers:
                buffer.drop_resharded()

    def reshard(self, *, after_forward: bool = False, keep: bool = False) -> None:
        """Register the sharded parameters and free the gathered ones, unless the strategy keeps them.

        Args:
            after_forward: reshard to the smaller world, where the policy has one.
            keep: do not free the gathered ones, nor what was cut over the smaller world; the next `unshard` gathers
                from the shards only if those were written. Frees them all the same where writes may go unnoticed.
        """
        keep, self.stays_registered = keep and self.shards.sees_writes, False
        if self._gather is not None and self._has_failed_with_others:
            self._gather = None
        if self._gather is not None:
            self.wait_for_unshard()
        if after_forward and self.policy.reshard_to is not None and self.is_unsharded:
            self._reshard_to(self.policy.reshard_to)
            return
        if not keep:
            self._drop_resharded()
        if self.state is ShardState.SHARDED and (keep or not (self._is_kept or self._prepared)):
            return
        self._prepared = None
        self.shards.put_sharded()
        # What is cut over the smaller world freed the gathered ones.
        self._is_kept = (keep and self.is_unsharded) or self._keeps_unsharded
        self.state = ShardState.SHARDED
        if self._is_kept:
            self.shards.watch()
        if not (self._is_kept or self.options.keeps_memory):
            self._free()

    def reshard_after_use(self, *, after_forward: bool = False, keep: bool = False) -> None:
        """`reshard`, unless others are registered in place of the unsharded parameters: `torch.func.functional_call`
        gives its caller what it finds there after forward, and puts these back."""
        if not (self.is_unsharded and self.shards.replaced() is not None):
            self.reshard(after_forward=after_forward, keep=keep)

    @outside_transforms
    def _reshard_to(self, smaller: DataParallelMesh) -> None:
        self.state, self._is_cut = ShardState.RESHARDED, True  # from the first buffer on, whatever comes
        self.shards.watch()
        for buffer in self.shards.buffers:
            slots = [(position, slot) for position, slot in enumerate(self.slots) if slot.buffer is buffer]
            with torch.no_grad(), not_inference(), without_torch_function():
                chunks = buffer.reshard_to_smaller(smaller.shard, pack_all=self._custom_gather is not None)
                for position, slot in slots:
                    assert slot.unsharded is not None
                    chunk, dim = chunks[slot.index]
                    spec = make_spec(smaller.mesh, smaller.placements(dim), slot.unsharded)
                    parameter = make_sharded_parameter(chunk, spec, slot.sharded.requires_grad, self.shards.reference)
                    # An optimizer made of these would step what the next gather throws away.
                    mark_replaced(parameter)
                    remember_successor(parameter, self.shards.reference, position)
                    for place in slot.places:
                        place.put(parameter)
        self._free()

    def frees(self, tensor: torch.Tensor) -> bool:
        """Whether resharding frees the memory of ``tensor``: an unsharded parameter, or a view of one."""
        if self._keeps_unsharded:
            return False
        return any(not buffer.is_identity and buffer.shares_memory(tensor) for buffer in self.shards.buffers)


def kept(output: torch.Tensor, groups: Sequence[ParamGroup]) -> torch.Tensor:
    """``output``, or a copy if resharding one of ``groups`` frees its memory."""
    own = unwrapped(local_of(output))
    if type(own) in (torch.Tensor, nn.Parameter) and own.layout is torch.strided:
        for group in groups:
            if group.frees(own):
                return annotated_like(output.clone(), output)
    return output

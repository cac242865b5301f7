"""GradientReducer: unsharded gradients of a group to reduced shards. It knows how, never when."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .buffer import ShardedBuffer
from .device import (
    add_each,
    get_gradient,
    is_elsewhere,
    local_of,
    run_late_hooks,
    run_tensor_hooks,
    set_gradient,
    spec_of,
    without_torch_function,
    wrap_gradients,
    wrap_local,
)
from .errors import StateError
from .gradient import Deliver, GradientPlan, Reduction, ReductionLanes, Route, Scale, gradient_scale
from .mesh import DataParallelRanks
from .options import GroupOptions, communicated_dtype
from .parameter import local_gradient
from .shards import Shards
from .slot import Slot

MOST_PLANS = 64
"""Which parameters are reduced together may change with every step; plans are cheap to make again."""
IDLE_AFTER = 2
"""Reductions in a row in which no rank had a gradient for a parameter, after which it is left out until one has."""


class GradientReducer:
    """Gradients of the parameters of one group, between backward and the optimizer.

    Args:
        shards: the parameters, with ranks and dtypes.
        options: what users set.
    """

    def __init__(self, shards: Shards, options: GroupOptions):
        self.shards, self.options = shards, options
        self.slots: Sequence[Slot] = shards.slots
        self.policy = shards.policy
        self._plans: dict[tuple[Any, ...], GradientPlan] = {}
        self._absences: Counter[Slot] = Counter()
        """Of the parameters that had no gradient on any rank when they were reduced last."""
        self._was_kept = False
        """Whether a backward of the unit was not reduced: alike on all ranks, even if none of its gradients is here."""
        self._kept: set[Slot] = set()
        """Those that one may have given gradients, also on other ranks alone: they are reduced with the next, frozen
        since or not."""
        self._told: set[tuple[bool, ...]] = set()
        """Which are trained, as other ranks were told: now, or earlier."""
        self._told_of: object = None
        """What of `Shards.training` was told or found to be known."""

    @property
    def mesh(self) -> DataParallelRanks:
        """Ranks and strategy."""
        return self.shards.mesh

    def forget_plans(self) -> None:
        """The buffers of the slots were made anew. Sums that wait for their all-reduce do so still."""
        self._plans = {key: plan for key, plan in self._plans.items() if plan.partial is not None}

    def forget_absences(self) -> None:
        """Ranks may have counted those of different reductions."""
        self._absences.clear()

    def _reduce_dtype(self, gradient_dtype: torch.dtype, buffer: ShardedBuffer) -> torch.dtype:
        return communicated_dtype(gradient_dtype, self.policy.reduce_dtype(buffer.local.dtype))

    def accumulate(self) -> None:
        """Keep this backward's unsharded gradients for a later reduction, in the reduction's dtype."""
        self._was_kept = True
        self._kept.update(*self.shards.trainable())
        for slot in self.slots:
            slot.accumulate(self.policy.reduce_dtype(slot.buffer.local.dtype))

    def note_frozen(self) -> None:
        """What hooks have frozen since this backward came to the unit may have gradients of it."""
        self._kept.update(self.shards.frozen_in_use())

    def note_left_out(self) -> None:
        """Other ranks may have kept gradients of a backward that on this one did not come to the unit."""
        with without_torch_function():
            self._kept.update([slot for slot in self.slots if slot.sharded.requires_grad])

    def has_any(self) -> bool:
        """Whether an unsharded gradient waits for its reduction."""
        return self.slots[0].have_gradients(self.slots)

    def awaits_reduction(self) -> bool:
        """Whether a backward that took no part has to reduce: what earlier ones accumulated or summed, or zeros."""
        if self._was_kept or self.has_any() or (self.options.zeros_for_unused and self.trains()):
            return True
        return self.options.all_reduce_gradients and self._has_partial_sums()

    def may_have_any(self) -> bool:
        """Whether any rank may have one that waits for its reduction; alike on all of them, if all ran forward where
        that gathers."""
        if self.mesh.shard.size > 1:
            return self._was_kept or self.trains()
        with without_torch_function():
            return bool(self._kept) or any(slot.sharded.requires_grad for slot in self.slots)

    def leaves_partial_sums(self) -> bool:
        """Whether sums over the sharding axis alone would be kept, if gradients were reduced now."""
        return self.options.reduce_gradients and self._keeps_sums()

    def _has_partial_sums(self) -> bool:
        return self.mesh.has_replicas and any(plan.partial is not None for plan in self._plans.values())

    def _keeps_sums(self) -> bool:
        """Whether what is reduced now waits for its sum over replicas."""
        return self.mesh.has_replicas and not self.options.all_reduce_gradients

    def trains(self) -> bool:
        """Whether any parameter requires a gradient."""
        return bool(self.shards.trainable())

    @property
    def trains_otherwise(self) -> bool:
        """Whether other parameters require gradients now than ever before, as far as other ranks were told."""
        if self.shards.training is self._told_of:
            return False
        if self._requiring() not in self._told:
            return True
        self._told_of = self.shards.training
        return False

    def note_training(self) -> None:
        """Other ranks are told which parameters require gradients."""
        self._told.add(self._requiring())

    def _requiring(self) -> tuple[bool, ...]:
        with without_torch_function():
            return tuple([slot.sharded.requires_grad for slot in self.slots])

    def drop(self) -> None:
        """Forget unsharded gradients."""
        self._was_kept, self._kept = False, set()
        for slot in self.slots:
            slot.drop_gradient()
        for plan in self._plans.values():
            plan.partial = None
        self.forget_absences()

    def zero(self) -> None:
        """What earlier backward passes left unreduced is nothing. That they left it stays known: other ranks, which may
        not do the same, reduce with this one."""
        for slot in self.slots:
            slot.drop_gradient()
        for plan in self._plans.values():
            if plan.partial is not None:
                plan.partial.zero_()

    def take(self) -> list[tuple[Sequence[Slot], list[torch.Tensor | None]]]:
        """Remove the unsharded gradients of the trainable parameters, those of one buffer together."""
        kept, self._was_kept, self._kept = self._kept, False, set()
        return [(slots, slots[0].take_gradients(slots)) for slots in self.shards.trainable(kept)]

    def reduce(
        self, slots: Sequence[Slot], gradients: list[torch.Tensor | None], lanes: ReductionLanes
    ) -> Reduction | None:
        """Start reducing unsharded ``gradients`` (emptied) of ``slots``; None if they are theirs already."""
        gradients = self._complete(slots, gradients)
        present = _presence(gradients)
        is_own = self.mesh.size == 1 and self.options.all_reduce_hook is None
        if is_own and not is_elsewhere(slots[0].buffer.local, self.mesh.device) and self._completes_sums():
            self._deliver_own(slots, gradients)
            return None
        idle = self._idle(slots) if self._completes_sums() else []
        if not idle:
            return self.start(slots, gradients, lanes, present, functools.partial(self.deliver_and_note, slots))
        active = [slot for slot in slots if slot not in idle]
        whole = dict(zip(slots, gradients, strict=True))
        had = dict(zip(slots, present, strict=True))
        gradients.clear()

        def deliver(shards: Sequence[torch.Tensor | None], exist: Sequence[bool]) -> None:
            self.deliver_and_note([*active, *idle], shards, exist)
            late = [slot for slot, exists in zip(idle, exist[len(active) :], strict=True) if exists]
            if late:
                self._reduce_now(late, [whole.pop(slot) for slot in late], lanes)

        told = [had[slot] for slot in (*active, *idle)]
        return self.start(active, [whole.pop(slot) for slot in active], lanes, told, deliver)

    def _idle(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of ``slots`` that are left out until a rank has a gradient for them."""
        return [slot for slot in slots if self._absences[slot] >= IDLE_AFTER] if self._absences else []

    def _complete(self, slots: Sequence[Slot], gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """``gradients``, with zeros where there are none, if the user wants that."""
        if not self.options.zeros_for_unused:
            return gradients
        pairs = zip(slots, gradients, strict=True)
        return [self._zeros(slot, slot.buffer.dtype) if one is None else one for slot, one in pairs]

    def contribution(self, slots: Sequence[Slot], gradients: list[torch.Tensor | None]) -> Contribution | None:
        """``gradients`` of ``slots``, to be reduced together with those of others; None if they have to be alone."""
        options = self.options
        is_plain = options.all_reduce_hook is None and options.custom_reduce_scatter is None
        if not (is_plain and self._completes_sums()) or self.mesh.size == 1 or self._idle(slots):
            return None
        gradients = self._complete(slots, gradients)
        like = slots[0].buffer
        dtype = self._reduce_dtype(next((one.dtype for one in gradients if one is not None), like.dtype), like)
        route = self._route(dtype)
        shard = route.shard if route.shard.size > 1 else None
        alike = shard, route.replicate, route.scale, dtype, like.dtype, like.local.dtype, like.local.device
        return Contribution(self, slots, gradients, alike)

    def deliver_and_note(
        self, told: Sequence[Slot], shards: Sequence[torch.Tensor | None], exist: Sequence[bool]
    ) -> None:
        """Deliver the shards of the first of the reported slots, and count absences of all of them."""
        self._deliver(told[: len(shards)], shards)
        if all(exist) and not self._absences:
            return
        for slot, exists in zip(told, exist, strict=True):
            if not exists:
                self._absences[slot] += 1
            elif slot in self._absences:
                del self._absences[slot]

    def _completes_sums(self) -> bool:
        """Whether the next reduction is complete in itself: sums kept for a later all-reduce must all be alike."""
        return not (self._keeps_sums() or self._has_partial_sums())

    def _reduce_now(self, slots: Sequence[Slot], gradients: list[torch.Tensor | None], lanes: ReductionLanes) -> None:
        """Reduce ``gradients`` (emptied) of ``slots``, of each of which some rank has one."""
        exist = [True] * len(slots)
        reduction = self.start(slots, gradients, lanes, exist, lambda shards, _: self._deliver(slots, shards))
        reduction.release()
        reduction.finish()
        if reduction.lands:
            reduction.land()

    def start(
        self,
        slots: Sequence[Slot],
        gradients: list[torch.Tensor | None],
        lanes: ReductionLanes,
        present: Sequence[bool],
        deliver: Deliver,
        name: str = "",
    ) -> Reduction:
        """Reduce ``gradients`` (emptied) of ``slots``, zeros where there are none.

        Args:
            slots: of this group, or of several with the same route and dtypes.
            gradients: of each of them.
            lanes: that communicate.
            present: which of the reported parameters have a gradient on this rank.
            deliver: gets the result.
            name: of the units, for messages, if they are several.
        """
        like = (slots[0] if slots else self.slots[0]).buffer
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        dtype = self._reduce_dtype(next(iter(dtypes), like.dtype), like)
        filled = [
            self._zeros(slot, next(iter(dtypes), dtype)) if gradient is None else gradient
            for slot, gradient in zip(slots, gradients, strict=True)
        ]
        gradients.clear()
        if len(dtypes) > 1 or (dtypes != {dtype} and like.dtype == dtype):
            filled = [gradient.to(dtype) for gradient in filled]
        plan = self._plan(slots, len(present), dtype, of_several=bool(name))
        self._check_partial_sums(plan)
        route, device, name = self._route(dtype), self.mesh.device, name or self.shards.unit_name
        return Reduction(plan, route, filled, present, lanes, device, like.local, deliver, name)

    def _route(self, dtype: torch.dtype) -> Route:
        options, mesh = self.options, self.mesh
        size = mesh.size // mesh.shard.size
        if options.divisors is not None:
            scale = Scale(before=options.divisors[0], after=options.divisors[1])
        else:
            scale = gradient_scale(dtype, mesh.shard.size, size, self._divide_factor, options.force_sum)
        return Route(
            options.reduce_comm or mesh.shard,
            mesh.replicate,
            scale,
            stop_after_shard=self._keeps_sums(),
            hook=options.all_reduce_hook,
            custom=options.custom_reduce_scatter,
        )

    @property
    def _divide_factor(self) -> float | None:
        """That the user set: now, since a tensor may hold another one by the next time.

        Raises:
            ValueError: if it is not positive and finite.
        """
        if self.options.divide_factor is None:
            return None
        factor = float(self.options.divide_factor)
        if not 0 < factor < math.inf:
            raise ValueError(
                f"unit {self.shards.unit_name!r}: the gradient divide factor must be positive and finite, and the "
                f"tensor that was set holds {factor}"
            )
        return factor

    def _check_partial_sums(self, plan: GradientPlan) -> None:
        for other in self._plans.values():
            if other is not plan and other.partial is not None and other.dtype == plan.dtype:
                raise StateError(
                    f"unit {self.shards.unit_name!r}: other parameters require gradients now than in the backward "
                    "whose sums still wait for their all-reduce; change requires_grad only after a backward that "
                    "all-reduces"
                )

    def _zeros(self, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(slot.layout.shape, dtype=dtype, device=self.mesh.device)

    def _plan(self, slots: Sequence[Slot], flags: int, dtype: torch.dtype, of_several: bool) -> GradientPlan:
        shard = self.mesh.shard
        packs_all = shard.size == 1 or self.options.custom_reduce_scatter is not None
        known: tuple[object, ...] = tuple(slots)
        if of_several:  # weakly, and by buffers too, which other groups may make anew
            buffers = {slot.buffer: weakref.ref(slot.buffer) for slot in slots}
            known = tuple([(buffers[slot.buffer], slot.index) for slot in slots])
        key = (known, flags, dtype, packs_all)
        if (plan := self._plans.get(key)) is None:
            if len(self._plans) >= MOST_PLANS and all(plan.partial is None for plan in self._plans.values()):
                self._plans.clear()
            tensors = [slot.layout for slot in slots]
            # Not whether these gradients are cast: accumulated ones are not, and their partial sums must find the plan.
            is_cast = bool(slots) and slots[0].buffer.dtype != dtype
            plan = self._plans[key] = GradientPlan(tensors, shard, dtype, packs_all or is_cast, flags)
        return plan

    def _deliver_own(self, slots: Sequence[Slot], gradients: list[torch.Tensor | None]) -> None:
        """A world of one: the unsharded gradient is the shard, with the precision that a reduction would leave it."""
        factor, like = self._divide_factor, slots[0].buffer
        if self.options.divisors is not None:
            factor = self.options.divisors[0] * self.options.divisors[1]
        own = like.local.dtype
        reduced = {
            dtype: self._reduce_dtype(dtype, like) for dtype in {one.dtype for one in gradients if one is not None}
        }
        shards = gradients[:]
        if factor not in (None, 1) or any((dtype, wanted) != (own, own) for dtype, wanted in reduced.items()):
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    gradient = gradient.to(reduced[gradient.dtype])
                    if factor not in (None, 1):
                        gradient.div_(factor)
                    shards[index] = gradient.to(own)
        gradients.clear()
        self._deliver(slots, shards)

    def _deliver(self, slots: Sequence[Slot], shards: Sequence[torch.Tensor | None]) -> None:
        """Add ``shards`` to the sharded parameters' gradients."""
        new: list[torch.Tensor] = []
        old: list[torch.Tensor] = []
        parameters = [slot.sharded for slot, shard in zip(slots, shards, strict=True) if shard is not None]
        assert not torch.is_grad_enabled()
        shards = self.shards.gradients_as_registered(slots, shards)
        wrapped = wrap_gradients([shard for shard in shards if shard is not None], parameters)
        # Out here, since what hooks do to sharded parameters has to be noticed.
        gradients = run_tensor_hooks(parameters, wrapped)
        with without_torch_function():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if (own := get_gradient(parameter)) is None:
                    set_gradient(parameter, gradient)
                else:
                    old.append(_held_gradient(parameter, own))
                    new.append(local_of(gradient))
            if old:
                add_each(old, new)
        run_late_hooks(parameters)


def _presence(gradients: Sequence[torch.Tensor | None]) -> list[bool]:
    return [gradient is not None for gradient in gradients]


@dataclass(frozen=True)
class Contribution:
    """Unsharded gradients of one group that may be reduced together with those of others.

    Args:
        reducer: of the group.
        slots: the parameters.
        gradients: of each of them.
        alike: equal to that of all others with which they may be.
    """

    reducer: GradientReducer
    slots: Sequence[Slot]
    gradients: list[torch.Tensor | None]
    alike: tuple[object, ...]

    @property
    def nbytes(self) -> int:
        """Of all of the parameters' buffer, whichever of them are trained."""
        return self.slots[0].buffer.full_bytes


def reduce_together(members: Sequence[Contribution], lanes: ReductionLanes) -> Reduction:
    """Start one reduction of all gradients of ``members`` (emptied), which are alike."""
    slots = [*chain.from_iterable(member.slots for member in members)]
    gradients = [*chain.from_iterable(member.gradients for member in members)]
    for member in members:
        member.gradients.clear()

    def deliver(shards: Sequence[torch.Tensor | None], exist: Sequence[bool]) -> None:
        start = 0
        for member in members:
            own = slice(start, start + len(member.slots))
            member.reducer.deliver_and_note(member.slots, shards[own], exist[own])
            start = own.stop

    names = ", ".join(member.reducer.shards.unit_name for member in members)
    return members[0].reducer.start(slots, gradients, lanes, _presence(gradients), deliver, names)


def _held_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient that a parameter has; one that is cut otherwise than it is replaced."""
    if not isinstance(parameter, DTensor):
        return gradient
    held = local_gradient(parameter, gradient)
    if held is not local_of(gradient):
        parameter.grad = wrap_local(held, spec_of(parameter))
    return held

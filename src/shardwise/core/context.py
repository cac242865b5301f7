"""FSDPCommContext: what the units of one tree share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .agreement import check_alike, check_training, forget_failures, said_by, tell_failure
from .changing import changing
from .comm import Comm
from .device import backward_number, eager, in_compiled_autograd, label, queue_end_of_backward
from .errors import StateError, is_explained
from .gradient import ReductionLanes
from .iteration import Iteration
from .joint import JOINT_BYTES
from .lanes import Device, current_device, device_for
from .order import ExecutionOrder
from .pending import PendingReductions
from .replicas import compare_values

if TYPE_CHECKING:
    from .batch import Batch
    from .group import ParamGroup
    from .hooks import Unit

    _Turns = weakref.WeakKeyDictionary[ParamGroup, weakref.ref[Unit]]

AHEAD_BYTES = 4 * JOINT_BYTES
"""Of memory that holds small units gathered together, some of which have yet to run: as much as three lists of them
need, whose elements run in turn."""


class FSDPCommContext:
    """Streams, order and micro-batch state shared by units.

    Without one, the outermost wrapped module makes it at its first forward. Pass one to `fully_shard` for several
    modules that no common wrapped root contains. If the last that is given it contains all others, it is their root.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` …; where the units compute.

    Raises:
        TypeError: if ``device_type`` is not a string.
        ValueError: if this process cannot compute on devices of that type.
    """

    def __init__(self, device_type: str):
        self.use_device(device_for(_current_device(device_type)))
        self.order: ExecutionOrder[Unit] = ExecutionOrder()
        self.iteration = Iteration()
        self.reductions = PendingReductions()
        self.has_root = False
        self.trains_otherwise = False
        """Whether other ranks have yet to be told which parameters are trained."""
        self.joins_small = False
        """Whether units are communicated for together: many are small."""
        self.outermost: weakref.ref[Unit] | None = None
        """The unit that was given this context last, if all others are inside it: the root, once it runs."""
        self.forward_root: Unit | None = None
        self.passes = 0
        self._is_agreed = self._replicas_agree = self._is_failing = False
        self._largest_unit: int | None = None
        self._expected: list[weakref.ref[Unit]] = []
        """Gathered ahead of a forward that the order promises."""
        self.batches_ahead: list[Batch] = []
        """Those gathered last of which some units may have yet to run."""
        self._units: list[weakref.ref[Unit]] = []
        self._joined = 0
        """How many units ever joined: of which some are freed, by the garbage collector on each rank when it likes."""
        self._turns: _Turns | None = None
        """Whose reductions have yet to start in this backward, in the order in which all ranks start them. Weakly: one
        that an exception ends leaves them."""
        self._ready: weakref.WeakSet[ParamGroup] = weakref.WeakSet()
        self._queued_end: Callable[[], Any] | None = None
        """From the first unit that a backward comes to until its end; gives None if it failed before that."""
        self._backward = -1
        self._creates_graph = False

    def use_device(self, device: Device) -> None:
        """Run communication on lanes of ``device``; before anything ran."""
        self.device = device
        self.gather_lane, self.reduce_lanes = device.lane(), ReductionLanes(device.lane(), device.lane())

    @property
    def units(self) -> list[Unit]:
        """The units that use this context, in the order in which they joined."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of the units."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def largest_unit(self) -> int:
        """Bytes of the largest unit while it is gathered, roots aside: what may be gathered ahead of its use, so that
        nothing needs the memory of more than two units."""
        if self._largest_unit is None:
            sizes = [(unit.measure(), unit.is_root) for unit in self._units_in_model()]
            self._largest_unit = max((size for size, is_root in sizes if not is_root), default=0)
        return self._largest_unit

    def _units_in_model(self) -> list[Unit]:
        """The units that have not left the model: others live on, on each rank for another time."""
        units = self.units
        inside = [unit for unit in units if unit.is_in_model]
        if len(inside) == len(units):
            return inside
        for unit in units:
            if unit.is_root:
                unit.locate_inner()  # they may be elsewhere
        return [unit for unit in units if unit.is_in_model]

    def join(self, unit: Unit) -> None:
        """``unit`` shares this context from now on."""
        self._largest_unit = None
        self._units = [reference for reference in self._units if reference() is not None]
        if unit.reference not in self._units:
            self._units.append(unit.reference)
            self._joined += 1
            self.order.forget_freed()

    def leave(self, unit: Unit) -> None:
        """``unit`` shares another context: none of this one waits for its reductions."""
        self._largest_unit = None
        self._units = [reference for reference in self._units if reference() not in (None, unit)]

    def join_around(self, unit: Unit, inside: Iterable[Unit]) -> None:
        """``unit``, around those ``inside``, was given this context: it comes before them, as where a root tells the
        order, since backward is over for it after them."""
        inner, others = {one.reference for one in inside}, self._joined
        self.join(unit)
        places = [place for place, reference in enumerate(self._units) if reference in inner]
        if places:
            self._units.insert(places[0], self._units.pop())
        self.outermost = unit.reference if 0 < others == len(places) else None

    def take_over(self, other: FSDPCommContext) -> None:
        """Let all units of ``other`` use this context."""
        for unit in other.units:
            unit.join(self, is_root=unit.is_root, iteration=unit.iteration)

    # -- Forward

    def start_pass(self) -> None:
        """A forward pass through the tree begins.

        Raises:
            StateError: if it is the first that gathers, and another rank has other units.
        """
        with label("FSDP::root_pre_forward"):
            self._is_failing = False
            if not self._is_agreed:
                self._agree()
            self.passes += 1
            self._largest_unit = None  # parameters may have another dtype since
            self.order.start_pass()

    def _agree(self) -> None:
        # Where nothing is gathered a rank may run forward alone, or other models first.
        gathering = [group for group in self.groups if group.mesh.shard.size > 1]
        if not gathering or any(group.has_to_gather(self.gather_lane) for group in gathering):
            check_alike((group.mesh.shard, group) for group in gathering)
            self._is_agreed = True

    def note_failure(self, unit: Unit, error: BaseException) -> None:
        """The forward of ``unit`` raised: ranks that wait for this one in vain learn why."""
        if not (self._is_failing or is_explained(error)):
            tell_failure(f"in the forward of unit {unit.name or 'root'!r}: {said_by(error)}", self._comms())
        self._is_failing = True

    def note_success(self) -> None:
        """A forward came to its end. If it gathers, all ranks have come to it: none waits any more because an earlier
        one raised here, and this rank went on."""
        forget_failures(self._comms())

    def _comms(self) -> Iterator[Comm]:
        for group in self.groups:
            yield from group.mesh.comms
            if group.options.reduce_comm is not None:
                yield group.options.reduce_comm

    def gather_after(self, event: Any, first: Unit) -> None:
        """Let gathers start after ``event``. If the next one is that of ``first``, it does not wait for what is queued
        on the compute stream from now on."""
        self.gather_lane.wait_event(event)
        if self.gather_lane.is_stream:
            for group in first.groups:
                group.prepare_unshard(self.gather_lane, event, self.device.mark)

    def rest(self) -> None:
        """Nothing is communicated for a while."""
        for lane in (self.gather_lane, *self.reduce_lanes):
            lane.rest(keeps_little=self.joins_small)

    def expect(self, units: Sequence[Unit], running: Unit) -> None:
        """``units`` were gathered ahead of their forward, which should follow that of ``running``. What was gathered so
        before and did not come is freed once it takes more memory than the largest unit, the oldest first, so that no
        order gathers all of a model."""
        late: list[Unit] = []
        for reference in self._expected:
            unit = reference()
            if unit is not None and unit is not running and unit not in units and unit.is_gathered_alone:
                late.append(unit)
        excess = sum([unit.gathered_bytes for unit in late]) - self.largest_unit if late else 0
        while late and excess > 0:
            excess -= late[0].gathered_bytes
            late.pop(0).let_go()
        self._expected = [unit.reference for unit in (*late, *units)]

    def expect_no_more(self, unit: Unit) -> None:
        """``unit`` stays gathered as the user wants it, whatever was expected."""
        self._expected = [reference for reference in self._expected if reference is not unit.reference]

    def drop_prefetched(self) -> None:
        """Free what was gathered for units that then did not run."""
        self.batches_ahead.clear()
        for unit in self.units:
            unit.drop_prefetched()

    def has_room(self) -> bool:
        """Whether one more batch may be gathered ahead of the use of its units."""
        self.batches_ahead = [*dict.fromkeys(batch for batch in self.batches_ahead if batch.held_bytes)]
        return sum([batch.held_bytes for batch in self.batches_ahead]) <= AHEAD_BYTES - JOINT_BYTES

    def make_room(self, unit: Unit) -> None:
        """Let go of the batches that were gathered first, until one more may be; not of what ``unit`` needs."""
        while not self.has_room() and self.batches_ahead:
            self.batches_ahead.pop(0).let_go(but=unit)

    def part_batches(self) -> None:
        """Let units whose parameters are freed between uses be gathered one by one from now on."""
        for unit in self.units:
            if unit.batch is not None and not unit.batch.keeps:
                unit.batch.part()

    def drop_batches(self) -> None:
        """Free what was gathered with other units and did not run."""
        ahead, self.batches_ahead = self.batches_ahead, []
        for batch in ahead:
            batch.let_go()

    # -- Backward

    def queue_end_of_backward(self, *, creates_graph: bool = False) -> None:
        """Finish this backward pass when autograd has done everything else; any number of calls.

        Raises:
            StateError: under compiled autograd, which has no such end.
        """
        if self._queued_end is not None and self._queued_end() is None:
            self.reset()
        if self._queued_end is None:
            if in_compiled_autograd():
                raise StateError(
                    "backward of sharded modules runs under compiled autograd, which would leave gradients unreduced: "
                    "call backward() outside of it, with the compiler's option compiled_autograd=False; torch.compile "
                    "compiles the backward of what it compiled all the same"
                )
            self._queued_end = _failed  # should this be interrupted, that backward is
            self._backward = backward_number()
            self._queued_end = queue_end_of_backward(self._end_of_backward)
        # Not one inside the pass whose end is queued.
        if creates_graph and not self._creates_graph and backward_number() == self._backward:
            self._creates_graph = True
            for unit in self.units:
                unit.guard_gradients()

    def agree_on_replicas(self) -> None:
        """Gradients are about to be summed over replicas; if they are the first, warn if another has other parameters.

        Raises:
            StateError: if they are the first, and another replica has other units.
        """
        if not self._replicas_agree:
            sharing = [(comm, group) for group in self.groups for comm in group.mesh.replicate if comm.size > 1]
            check_alike(sharing)
            if not self.gather_lane.is_captured:  # which a sum's value would end
                compare_values(sharing)
            self._replicas_agree = True

    def agree_on_training(self, reduced: ParamGroup) -> None:
        """Gradients of the group ``reduced`` are about to be, and other parameters are trained than before.

        Raises:
            StateError: if another rank does not.
        """
        # Of others that were never gathered, which is so on all ranks or none, ranks may train what they like. And only
        # where a reduction follows do posts over the same ranks have numbers of their own.
        self.trains_otherwise = False
        known = [group for group in self.groups if group.is_whole_everywhere or group.shards.was_gathered]
        groups = [group for group in known if _same_ranks(group, reduced)]
        for group in groups:
            group.gradients.note_training()
        check_training(groups)

    def reduce_in_turn(self, unit: Unit, group: ParamGroup) -> None:
        """Start to reduce gradients of ``group`` once those before it have started: in one order on all ranks, whose
        backward passes may have come to other units."""
        if self._turns is None:
            self._turns = self._make_turns()
        self._turns.setdefault(group, unit.reference)  # what comes late is the last
        self._ready.add(group)
        while self._turns and (first := next(iter(self._turns))) in self._ready:
            if (next_unit := self._turns.pop(first)()) is not None:
                next_unit.start_reduction(first)
            self._ready.discard(first)

    def _make_turns(self) -> _Turns:
        inside = {*self._units_in_model()}
        return weakref.WeakKeyDictionary(
            {
                group: unit.reference
                for unit in self._as_backward_comes()
                for group in unit.groups
                if group.takes_turns and unit.reduces(group) and group.gradients.may_have_any()
                if unit in inside or group.gradients.has_any()
            }
        )

    def _finish_turns(self) -> None:
        """Reduce also what no backward of this rank came to: other ranks may have gradients of it."""
        turns = self._make_turns() if self._turns is None else self._turns
        self._turns = None
        self._ready.clear()
        for group, reference in [*turns.items()]:
            if (unit := reference()) is not None and not unit.runs_forward:
                group.show_once(self.gather_lane)
                unit.start_reduction(group)

    def _as_backward_comes(self) -> list[Unit]:
        """The units, as backward mostly comes to them: the last that joined first, and roots last; not as this rank's
        forwards went, which others may not have run."""
        latest_first = self.units[::-1]
        return sorted(latest_first, key=lambda unit: unit.is_root)

    @eager
    def _end_of_backward(self) -> None:
        with label("FSDP::root_post_backward_callback"), torch.no_grad(), self._ending():
            creates_graph, self._creates_graph = self._creates_graph, False
            self._queued_end = None
            if self.forward_root is not None and not self.forward_root.runs_forward:
                self.forward_root = None
            # In this order, since ranks on which a unit's inputs need gradients have reduced its own before.
            units = self._as_backward_comes()
            for unit in units:
                if creates_graph:
                    unit.end_of_differentiable_backward()
                else:
                    unit.end_of_backward()
            if self.forward_root is None:  # otherwise this backward is inside of a forward, which goes on
                self.drop_batches()
            if not creates_graph:
                self._finish_turns()
            # Before the last one too: who reads gradients between micro-batches finds all of them.
            self.reductions.finish(self.reduce_lanes)
            ended = [unit for unit in units if unit.iteration.ends]
            # Other forwards may wait for the backward that differentiates this one.
            if ended and not (creates_graph and any(unit.awaits_backward for unit in units)):
                self._end_iteration(ended)
            elif not ended:
                self.order.end_backward()
            self.rest()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """A backward or an iteration ends inside, where what users hooked on gradients may raise."""
        try:
            yield
        except BaseException:
            self._queued_end = _failed
            raise

    # -- The end of an iteration

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not come to its end."""
        return self._queued_end is not None

    def start_finishing(self, units: Collection[Unit]) -> None:
        """Reshard ``units``, and start to reduce what backward passes left of their gradients."""
        iterations = [*{unit.iteration for unit in units}]  # those that another root shares may be in its own
        with changing(iterations, "is_finishing", True), torch.no_grad(), self._ending():
            for unit in units:
                unit.end_of_backward()
            self._finish_turns()
            self.reductions.start_joint(self.reduce_lanes)

    def finish_iteration(self, units: Collection[Unit]) -> None:
        """Wait for the reductions under way, and end the iteration of ``units``."""
        with torch.no_grad(), self._ending():
            for context in dict.fromkeys(unit.context for unit in units):
                context.reductions.finish(context.reduce_lanes)
        self._end_iteration(units)
        self.rest()

    def _end_iteration(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.forget_calls()
        self.order.clear_backward()

    # -- After an exception

    def recover_from_aborted_backward(self) -> None:
        """A forward begins outside of backward: if a backward never came to its end, an exception stopped it."""
        if self.is_in_backward:
            self.reset()

    def recover_from_aborted_forward(self) -> None:
        """A pass through the tree begins: no unit is inside a forward, unless it was interrupted when an exception left
        it."""
        if any(unit.is_in_forward for unit in self.units):
            self.reset()

    def reset(self) -> None:
        """Back to the state between iterations: wait for what is under way, drop it and all unreduced gradients."""
        self._turns = None
        self._ready.clear()
        self.batches_ahead.clear()
        self.reductions.abandon()
        for unit in self.units:
            unit.reset()
            unit.iteration.finalization = None
        self.order.abandon()
        self.rest()
        self.forward_root, self._queued_end, self._creates_graph = None, None, False


def _same_ranks(one: ParamGroup, other: ParamGroup) -> bool:
    """Whether both communicate over the same ranks."""
    sharing = [[comm for comm in group.mesh.comms if comm.size > 1] for group in (one, other)]
    return sharing[0] == sharing[1]


def _failed() -> None:
    """In the place of the end of a backward that does not come to it."""


def _current_device(device_type: str) -> torch.device:
    if not isinstance(device_type, str):
        raise TypeError(f"FSDPCommContext(device_type={device_type!r}): must be a string, such as 'cpu' or 'cuda'")
    try:
        return current_device(device_type)
    except (TypeError, RuntimeError, AssertionError) as error:  # torch's, of which each version has others
        raise ValueError(
            f"FSDPCommContext(device_type={device_type!r}): must be a type of device that this process computes on, "
            f"such as 'cpu' or 'cuda' ({error})"
        ) from error

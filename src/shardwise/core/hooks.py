"""Unit: hooks and phase of one wrapped module (or several, as one). It decides when, never how."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

from .awaited import AwaitedCalls
from .batch import Batch
from .boundary import Call, announce_begin, announce_derivative
from .context import FSDPCommContext
from .device import (
    backward_number,
    eager,
    in_backward,
    is_watched,
    labelled,
    saved_may_be_written,
    watched,
)
from .errors import StateError
from .group import ParamGroup, kept
from .iteration import Iteration
from .joint import JointGather
from .lost import LostWrites
from .options import GroupOptions
from .parameter import owner_of
from .root import locate_units, make_root, unit_of, units_of, units_within
from .step import end_steps
from .tree import casting, hidden_tensors, is_flat, map_tensors, opaque_types, tensors_requiring_grad
from .weak import weakly

UNKNOWN_CALL = "a call"
"""Stands for a call's node where that is not known: only the end of the whole backward ends what waits for it."""


class Phase(Enum):
    """Where a unit is in an iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    """From its output's gradient until its input's: it computes backward, or recomputes forward for it."""
    POST_BACKWARD = auto()


class Unit:
    """The state of one call of `fully_shard`.

    Args:
        modules: the wrapped modules; several are gathered when the first of them runs and resharded after the last.
        groups: their parameters, one group per mesh.
        device: that they compute on.
        precision: casts at the unit's boundary.
        reshards_unless_root: whether the root does not reshard after forward by default.
        name: full name of the module, if the caller knows it.
        context: shared with other units; None to use that of the tree.
    """

    is_converted = False
    """Whether an `nn.Module._apply` goes on that will take over what it leaves."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        device: torch.device,
        precision: MixedPrecisionPolicy,
        reshards_unless_root: bool,
        name: str | None = None,
        context: FSDPCommContext | None = None,
    ):
        self.groups = tuple(groups)
        # A unit without parameters, as many a root is, remembers what was set on it all the same.
        self.options = [group.options for group in self.groups] or [GroupOptions()]
        self.device = device
        self.precision = precision
        self.given_name = name
        self.reshards_unless_root = reshards_unless_root
        self.reference: weakref.ref[Unit] = weakref.ref(self)
        self.phase = Phase.IDLE
        self.is_root = False
        self.gathered_bytes = 0
        self.is_small = False
        """Whether a message costs more than what it sends; known once the outermost unit is."""
        self.batch: Batch | None = None
        """With which others it is gathered, if many are small."""
        self._runs_with_all = False
        """Whether its last forward was the only one in a pass through the whole model that its batch is of."""
        self._last_pass = self._calls = self._calls_without_graph = 0
        """Number of the last pass that it ran in, how often it did, and how often it made no graph, as what reentrant
        checkpointing recomputes."""
        self.location: tuple[weakref.ref[nn.Module], Sequence[str]] | None = None
        """A module, and the names that lead from there to the unit's, once the outermost unit is known."""
        self.prefetch_forward: list[weakref.ref[Unit]] = []
        self.prefetch_backward: list[weakref.ref[Unit]] = []
        self._modules = [weakref.ref(module) for module in modules]
        self._to_run: set[int] = set()
        """Ids of the modules that have yet to run in the forward that goes on."""
        self._inside: list[Call] = []
        """Calls that have begun and not ended, the innermost last."""
        self._computes_backward = False
        """Whether backward has come to the unit, and has not reduced its gradients yet."""
        self._is_checked = False
        self._opaque = ""
        """Name of the type that the last forward returned, if tensors in it could not be found."""
        self._recomputes = False
        """Whether the last forward began inside of a backward, which it recomputed for."""
        self._positions: list[int] = []
        """In the order of execution, those of its forwards that will take part in backward."""
        self._awaited = AwaitedCalls()
        self._differentiated: set[Any] = set()
        """Calls whose first backward this one differentiates, and which it did not leave yet."""
        self._guards: list[RemovableHandle] = []
        self._lost_writes: LostWrites | None = LostWrites(self.groups)
        """None once it has looked often enough."""
        self.rename(name or "", is_known=False)
        self.iteration = Iteration()
        if context is not None:
            context.join_around(self, units_of(*modules))
            self.join(context, is_root=False, iteration=context.iteration)

    def join(self, context: FSDPCommContext, *, is_root: bool, iteration: Iteration) -> None:
        """Use ``context``, as the outermost unit of its tree or not."""
        self.is_root, self.iteration = is_root, iteration
        self._last_pass = 0  # each context counts its own
        context.join(self)
        if self.reshards_unless_root:
            for group in self.groups:
                group.options.reshard_after_forward = not is_root
        old = context if not self.has_context else self.context
        self.context = context  # by it the next forward knows that this was done, and not interrupted
        if old is not context:
            old.leave(self)

    @functools.cached_property
    def context(self) -> FSDPCommContext:
        """That of its tree, of which this becomes the root if there is none yet."""
        return self.become_root()

    def become_root(self) -> FSDPCommContext:
        """Make the context of the tree whose outermost unit this is."""
        return make_root(self)

    def settle_root(self) -> FSDPCommContext:
        """Its context, of which it becomes the root if it was given that, and all others of it are inside."""
        return self.become_root() if self.context.outermost is self.reference else self.context

    @property
    def has_context(self) -> bool:
        """Whether the root of its tree is known, or none is needed."""
        return "context" in self.__dict__

    @property
    def modules(self) -> list[nn.Module]:
        """The wrapped modules that still exist."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def rename(self, name: str, *, is_known: bool = True) -> None:
        """Set the name that labels show, and messages, in which the root has one too; ``is_known`` says whether one
        without a name is the root."""
        self.name = name
        self.title = name or type(self.modules[0]).__name__.removeprefix("FSDP") + " (root)" * is_known
        for group in self.groups:
            group.fqn, group.name = name, self.title

    def show_ranges(self) -> None:
        """Show a profiler or the log what is done from now on, also for units that are gathered ahead of their use."""
        if type(self) is not watched(type(self)):
            for unit in self.context.units:
                for one in (unit, *unit.groups):
                    one.__class__ = watched(type(one))

    def install_hooks(self) -> None:
        """Let the modules' forward call `pre_forward` and `post_forward`; where it does not, `run` does."""
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)

    # -- Forward

    @eager
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather, register for backward, wait, install, prefetch."""
        if is_watched():
            self.show_ranges()
        if torch.compiler.is_exporting():
            self._check_export()
        if not self.has_context and len(self._modules) == 1 and not self.modules:
            self._modules = [weakref.ref(module)]  # by `copy.copy`, of one that is gone
        context = self.context
        if self.phase is Phase.PRE_BACKWARD:
            if in_backward():  # recomputation of a checkpointed forward
                for group in self.groups:
                    group.unshard(context.gather_lane, for_backward=True)
                for group in self.groups:
                    group.wait_for_unshard()
                call = Call(id(module), args, kwargs)
                self._cast_inputs(call)
                return call.arguments
            context.recover_from_aborted_backward()
        if self._to_run and id(module) not in self._to_run and self._is_outermost and not self._inside:
            self._forget_forward()  # a module runs again: the forward before, of which not all modules ran, is over
            context.forward_root = None
        if self._opaque:
            self._refuse_unannounced()
        if not self._is_checked:
            self._check_unsharded()
        return self._enter_forward(module, args, kwargs)

    def _check_export(self) -> None:
        """
        Raises:
            StateError: a program that is exported has no place for gathers, and torch's own error names nothing.
        """
        for unit in units_within(*self.modules):  # this one may have been left unsharded by a forward
            if not all(group.is_unsharded for group in unit.groups):
                raise StateError(
                    f"unit {unit.title!r} is sharded, and cannot be exported by torch.export: call unshard() on it, "
                    "and on every other unit, or export an unsharded model with the values of "
                    "shardwise.full_state_dict(model)"
                )

    @labelled("FSDP::pre_forward ({name})")
    def _enter_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        context, is_first = self.context, self.phase is not Phase.FORWARD
        if not self.runs_forward:  # or a forward goes on, and it may recompute for an earlier one inside
            self._recomputes = backward_number() != -1
        if is_first and not self._recomputes and context.forward_root is None:
            args, kwargs = self._enter_pass(args, kwargs)
        if not self._to_run:
            self._to_run = {id(module)} if len(self._modules) == 1 else {*map(id, self.modules)}
        if is_first:
            self.phase = Phase.FORWARD
            if self._recomputes:
                # It runs before any other hook of this backward pass may have, in reentrant checkpointing.
                context.queue_end_of_backward()
        call = Call(id(module), args, kwargs)
        self._cast_inputs(call)
        batch = self._batch_in(backward=self._recomputes)
        if not self._recomputes:
            self._count_call(is_new_pass=self._last_pass != context.passes)
        if is_first and not self._recomputes:
            self._runs_with_all, self._last_pass = batch is not None, context.passes
        self._gather(self.groups, batch, for_backward=self._recomputes)
        self._inside.append(call)
        # A unit without parameters waits for nothing, and one more node would change the order in which autograd adds
        # up the gradients of its inputs.
        if is_first and self.groups and torch.is_grad_enabled():
            self._announce_end(call)
        call.watch()
        if is_first and not self._recomputes:
            # Before the wait, so that a link that all wait for is never idle.
            context.order.enter(self.reference)
            context.order.gathers = context.order.gathers or self.is_on_its_way
            if batch is None or not batch.keeps or self.prefetch_forward:
                self._prefetch("forward", self.prefetch_forward, context.order.ahead())
        for group in self.groups:
            group.wait_for_unshard()
        if self._lost_writes is not None and is_first:
            self._lost_writes.enter()
        return call.arguments

    def _count_call(self, is_new_pass: bool) -> None:
        if is_new_pass:
            self._calls = self._calls_without_graph = 0
        self._calls += 1
        self._calls_without_graph += not torch.is_grad_enabled()

    def _check_unsharded(self) -> None:
        """
        Raises:
            StateError: naming buffers, or parameters that no unit has, that are still on the meta device.
        """
        for module in self.modules:
            unsharded = {name: one for name, one in module.named_parameters() if owner_of(one) is None}
            for kind, tensors in (("buffers", dict(module.named_buffers())), ("unsharded parameters", unsharded)):
                names = [repr(name) for name, tensor in tensors.items() if tensor.is_meta]
                if names:
                    raise StateError(
                        f"unit {self.title!r}: {kind} {', '.join(names)} are still on the meta device, without values: "
                        "build the model under shardwise.init_on_meta(), which keeps buffers real, or call "
                        "shardwise.materialize(model) before the first forward"
                    )
        for unit in units_within(*self.modules):  # they were looked at too
            unit._is_checked = True

    def _enter_pass(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        context = self.settle_root()
        if self.iteration.finalization is not None:
            raise StateError(
                f"forward of unit {self.title!r}: call wait() before on what finalize_backward(async_op=True) gave"
            )
        if saved_may_be_written() and any(not unit.keeps_unsharded for unit in context.units):
            raise StateError(
                f"forward of unit {self.title!r} inside torch.autograd.graph.allow_mutation_on_saved_tensors, which "
                "knows saved tensors by their memory, and that of gathered parameters is freed: clone what you write "
                "in place"
            )
        end_steps()
        context.recover_from_aborted_backward()
        if context.has_root:
            context.recover_from_aborted_forward()
            context.forward_root = self
            context.start_pass()
        elif not context.passes or context.order.starts_again(self.reference):
            context.start_pass()
        moved: tuple[Any, Any] = context.device.move_inputs((args, kwargs))
        return moved

    def _prefetch(
        self, direction: str, chosen: Sequence[weakref.ref[Unit]], expected: Iterator[Unit], ahead: bool = False
    ) -> None:
        """Start gathering the units that the user chose, or else the expected ones, as many as take no more memory
        together than the largest unit: one if all are of one size, several if they are small."""
        if chosen:
            for reference in chosen:
                if (unit := reference()) is not None and unit.is_in_model:
                    unit.prefetch(direction, ahead)
                    self.context.expect_no_more(unit)
            return
        context, own = self.context, self._joint
        if own is not None and own.is_followed:
            return
        limit, is_forward = context.largest_unit, direction == "forward"
        gathered: list[Unit] = []
        for unit in expected if limit else ():
            if own is not None and unit._joint is own:
                continue
            limit -= unit.gathered_bytes
            # What comes after its own next use, for which it is gathered again, is not to be in the way of that.
            if unit is self or not unit.is_in_model:
                break
            batch = unit._batch_in(backward=not is_forward)
            goes_with_others = batch is not None and batch.takes(unit)
            if not goes_with_others and limit < 0:
                break
            # Hooks of the model run after the root's, which may write into what would be gathered long before its use.
            if goes_with_others and is_forward and self.is_root:
                break
            unit.prefetch(direction, ahead, is_hint=True)
            gathered.append(unit)
            if own is not None and unit.is_on_its_way:
                own.is_followed = True
            if goes_with_others or not limit:
                break
        if is_forward:
            context.expect(gathered, self)

    @property
    def _joint(self) -> JointGather | None:
        """That it is gathered by together with others, until it was waited for."""
        return self.groups[0].joint if self.groups else None

    @property
    def is_in_model(self) -> bool:
        """Whether it is where it was found: one that has left the model may live on, on each rank as long as the
        garbage collector lets it."""
        if self.location is None:
            return True
        reference, names = self.location
        module: Any = reference()
        try:
            for name in names:
                module = module._modules[name]
        except (AttributeError, KeyError):  # it is gone, or was replaced by none
            return False
        return module is not None and unit_of(module) is self

    def choose_prefetched(self, direction: str, units: Sequence[Unit]) -> None:
        """Gather ``units``, and no others, when this one starts its forward or backward."""
        chosen = [unit.reference for unit in units]
        if direction == "forward":
            self.prefetch_forward = chosen
        else:
            self.prefetch_backward = chosen
        if self.has_context:
            self.context.part_batches()

    def locate_inner(self) -> None:
        """Note anew where the units inside of it are."""
        locate_units(self)

    @property
    def is_on_its_way(self) -> bool:
        """Whether any of its parameters are being communicated."""
        return any(group.is_on_its_way for group in self.groups)

    @property
    def is_gathered_alone(self) -> bool:
        """Whether parameters are gathered, without those of other units, that nothing waited for nor asked for."""
        return self._joint is None and any(group.is_gathering and not group.is_asked_for for group in self.groups)

    def measure(self) -> int:
        """Note how many bytes its parameters take on this rank while they are gathered, and give them."""
        self.gathered_bytes = sum([buffer.gathered_bytes for group in self.groups for buffer in group.shards.buffers])
        return self.gathered_bytes

    @property
    def whole_bytes(self) -> int:
        """Of its parameters, gathered or not."""
        return sum([buffer.full_bytes for group in self.groups for buffer in group.shards.buffers])

    @property
    def keeps_unsharded(self) -> bool:
        """Whether no strategy frees its parameters between uses."""
        return all(group.mesh.strategy.keeps_unsharded for group in self.groups)

    @property
    def frees_alike(self) -> bool:
        """Whether its parameters are cut, and freed between uses, for good: then they may be gathered with others."""
        return all(
            not (group.mesh.strategy.keeps_unsharded or group.policy.offload or group.policy.reshard_to is not None)
            and group.mesh.shard.size > 1
            and group.shards.sees_writes
            for group in self.groups
        )

    def _batch_in(self, *, backward: bool) -> Batch | None:
        """Its batch, if this belongs to a pass through the whole model: ranks may have let go of that at different
        times, and of less than that, others may not be needed."""
        if (batch := self.batch) is None or self.context.gather_lane.is_captured:
            return None
        if backward:
            return batch if self._runs_with_all and not batch.keeps else None
        if self.context.forward_root is not batch.root():
            return None
        # Where it runs again in a pass, as a cell does in each time step, the others of its batch may not.
        return batch if batch.keeps or self._last_pass != self.context.passes else None

    def _gather(
        self,
        groups: Sequence[ParamGroup],
        batch: Batch | None,
        *,
        for_backward: bool,
        ahead: bool = False,
        is_hint: bool = False,
    ) -> None:
        """Start gathering ``groups``, and with them what its ``batch`` says."""
        lane = self.context.gather_lane
        needing = [group for group in groups if group.prepare_gather(lane, for_backward=for_backward)]
        if batch is not None and batch.takes(self):
            if needing or batch.keeps:
                batch.gather(self, needing, for_backward=for_backward, is_hint=is_hint)
            return
        if needing and batch is not None and not for_backward:
            batch.note_alone(self)
        for group in needing:
            group.start_gather(lane, ahead=ahead)

    def gather_as_asked(self) -> None:
        """Start gathering because the user asks for it: with others if its forward would, for which ranks may have
        started that already."""
        batch = self._batch_in(backward=False)
        self._gather(self.groups, None if batch is None or batch.keeps else batch, for_backward=False)
        for group in self.groups:
            group.note_asked()
            group.stays_registered = group.mesh.strategy.keeps_unsharded

    @labelled("FSDP::forward_prefetch for {name}")
    def join_gather(self, joint: JointGather) -> None:
        """Gather with others, unless it is in use."""
        if self.is_in_forward or self.phase is Phase.PRE_BACKWARD:
            return
        for group in self.groups:
            group.join_changed(joint)

    @labelled("FSDP::{0}_prefetch for {name}")
    def prefetch(self, direction: str, ahead: bool = False, is_hint: bool = False) -> None:
        """Start gathering for a use that comes soon, or is only expected to (``is_hint``); ``ahead`` as in
        `ParamGroup.start_gather`."""
        if direction == "forward":
            self._gather(self.groups, self._batch_in(backward=False), for_backward=False, is_hint=is_hint)
        else:
            groups = [one for one in self.groups if one.options.unshard_in_backward and not one.is_unsharded]
            self._gather(groups, self._batch_in(backward=True), for_backward=True, ahead=ahead, is_hint=is_hint)

    @eager
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard, let the output announce backward."""
        if self.phase is Phase.PRE_BACKWARD:
            return self._cast_output(output)
        call = self._leave_call(module)
        self._to_run.discard(id(module))
        if self._to_run or self._inside:  # others of the unit's modules have yet to run, or it called itself
            # Backward may come to it first, or alone; and the other modules may not run, or not announce theirs.
            output, _ = announce_begin(self, output, call, marks_leaves=bool(self._to_run))
            return self._cast_output(output)
        context = self.context
        output = self._leave_forward(output, call)
        if context.forward_root is self:
            for unit in reversed(context.units):
                output = unit.complete_forward(output)
            context.forward_root = None
            context.drop_batches()
            if not context.order.matches:
                context.drop_prefetched()
            context.order.end_pass()
        if context.forward_root is None:
            context.rest()
            context.note_success()
        return self._cast_output(output)

    @property
    def _is_outermost(self) -> bool:
        """Whether no other unit's forward is around its own."""
        return self.context.forward_root in (None, self)

    def _leave_call(self, module: nn.Module) -> Call | None:
        for call in reversed(self._inside):
            if call.module == id(module):
                self._inside.remove(call)
                call.leave(self)
                return call
        return None

    @labelled("FSDP::post_forward ({name})")
    def _leave_forward(self, output: Any, call: Call | None = None) -> Any:
        if self._lost_writes is not None and self._lost_writes.leave():
            self._lost_writes = None
        output = self.lasting(output)
        hidden = self._hidden_in(output, call)
        for group in self.groups:
            if group.options.reshard_after_forward and not (self._recomputes or group.stays_registered):
                group.reshard_after_use(after_forward=True)
        output, announces = announce_begin(self, output, call, hidden)
        if announces and not self._recomputes:
            self._positions.append(self.context.order.record_for_backward(self.reference))
        if torch.is_grad_enabled() and not announces:
            self._refuse_opaque(output)
        for group in () if announces else self.groups:
            # The root kept its parameters for a backward that will not come: they serve the next forward.
            stayed = group.stays_registered and group.options.reshard_after_forward
            if self.reshards_unless_root or stayed or not group.shards.sees_writes:
                group.reshard_after_use(keep=not group.options.reshard_after_forward)
        self.phase = Phase.IDLE
        return output

    def lasting(self, output: Any) -> Any:
        """``output``, with copies of unsharded parameters, whose memory is gone after forward, or after backward."""
        if self._recomputes:
            return output
        # The root may hand out those of units within, which stay gathered until their backward.
        units = self.context.units if self.context.forward_root is self else (self,)
        groups = [group for unit in units for group in unit.groups if group.is_unsharded]
        return map_tensors(output, lambda tensor: kept(tensor, groups)) if groups else output

    def _hidden_in(self, output: Any, call: Call | None) -> list[torch.Tensor]:
        """Tensors that ``call`` has made and put into attributes of plain objects, if all of those can be found and
        last longer than its parameters are gathered."""
        if call is None or isinstance(output, torch.Tensor) or is_flat(output) or not torch.is_grad_enabled():
            return []
        if tensors_requiring_grad(output):
            return []  # those tell
        found = hidden_tensors(output) or []
        lasts = all(self.lasting(one) is one for one in found)
        # An object may have been filled by other units before.
        return [one for one in found if call.made(one)] if lasts else []

    def _refuse_opaque(self, output: Any) -> None:
        """Refuse an output whose tensors cannot be found to announce backward, which would lack the parameters."""
        found = opaque_types(output)
        self._opaque = found[0].__name__ if found else ""
        resharded = any(group.gradients.trains() and group.options.reshard_after_forward for group in self.groups)
        if found and resharded:
            raise TypeError(
                f"the forward of unit {self.title!r} returned a {found[0].__name__}, whose tensors cannot be found, so "
                "its parameters would not be gathered for backward: return tensors in a dict, list or dataclass, "
                "or pass reshard_after_forward=False to fully_shard"
            )

    def _refuse_unannounced(self) -> None:
        """Refuse it where parameters were kept too, once backward has gone through it: nothing reduced gradients."""
        name, self._opaque = self._opaque, ""
        if any(group.gradients.has_any() and group.options.reduce_gradients for group in self.groups):
            raise TypeError(
                f"the forward of unit {self.title!r} returned a {name}, whose tensors cannot be found, and backward "
                "went through it, so its gradients are not reduced: return tensors in a dict, list or dataclass"
            )

    def run(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``function`` gives, as if it were the forward of ``module``."""
        try:
            args, kwargs = self.pre_forward(module, args, kwargs)
            return self.post_forward(module, args, function(*args, **kwargs))
        except BaseException as error:
            self.leave_by_exception(module, error)
            raise

    @eager
    def leave_by_exception(self, module: nn.Module, error: BaseException) -> None:
        """Forward raised ``error``: what it began is over, so that the next one starts anew."""
        if self.phase is Phase.PRE_BACKWARD:
            return  # checkpointing stops a recomputation by an exception when it has what it needs
        if not self.has_context:
            return  # it failed before it began
        try:
            self.context.note_failure(self, error)
        finally:
            self._end_failed_call(module)

    def _end_failed_call(self, module: nn.Module) -> None:
        try:
            self._leave_call(module)
        finally:
            if not (self._inside or self._awaits_others_of_forward):
                self._end_failed_forward()

    def _end_failed_forward(self) -> None:
        self._forget_forward()
        if not in_backward():
            for group in self.groups:
                group.reshard_after_use()
        if self.context.forward_root is self:
            self.context.forward_root = None
            self.context.order.end_pass(failed=True)
            self.context.drop_prefetched()
            self.context.rest()
        else:
            self.context.order.note_failure()

    @property
    def _awaits_others_of_forward(self) -> bool:
        """Whether some of its modules ran, but not all, inside of a forward that may catch what another one raised and
        go on: backward has yet to be announced for those that ran."""
        return not self._is_outermost and not self._recomputes and 0 < len(self._to_run) < len(self._modules)

    def complete_forward(self, output: Any) -> Any:
        """Finish the forward of a unit of several modules of which not all ran; ``output`` is the root's."""
        if self._to_run and self.phase is Phase.FORWARD:
            self._to_run, self._inside = set(), []
            output = self._leave_forward(output)
        return output

    def drop_prefetched(self) -> None:
        """Free parameters that were gathered for a forward that did not come, or did not run all of the modules."""
        if self._to_run and not self._inside:
            self._forget_forward()
            for group in self.groups:
                group.reshard()
        elif self.phase is Phase.IDLE:
            self.let_go()

    def let_go(self) -> None:
        """Free parameters that were gathered and that nothing waited for, unless the user asked for them."""
        for group in self.groups:
            if group.is_gathering and not group.is_asked_for:
                group.reshard()

    def _cast_inputs(self, call: Call) -> None:
        dtype = self.precision.param_dtype
        if dtype is not None and self.precision.cast_forward_inputs:
            self._cast_inputs_to(dtype, call)

    @labelled("FSDP::cast_forward_inputs ({name})")
    def _cast_inputs_to(self, dtype: torch.dtype, call: Call) -> None:
        call.replace(casting(dtype))

    def _cast_output(self, output: Any) -> Any:
        dtype = self.precision.output_dtype
        return output if dtype is None else self._cast_output_to(dtype, output)

    @labelled("FSDP::cast_forward_outputs ({name})")
    def _cast_output_to(self, dtype: torch.dtype, output: Any) -> Any:
        return map_tensors(output, casting(dtype))

    def _announce_end(self, call: Call) -> None:
        forward_pass = self._awaited.number_recomputation() if self._recomputes else self.context.passes
        self._awaited.add(forward_pass, call.announce_end(self, forward_pass))

    # -- Backward

    @eager
    def pre_backward_hook(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Backward has come to an output, whose ``gradient`` this is."""
        if is_watched():
            self.show_ranges()
        self.pre_backward()
        return self.announce_around(gradient)[0] if gradient is not None and torch.is_grad_enabled() else None

    def announce_around(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``gradients``, whose own backward tells the units around this one that theirs is differentiated too: it may
        not come to their inputs, and does not come to their outputs. A unit of several modules is around each of them.
        """
        around = [unit for unit in self.context.units if unit.phase is Phase.PRE_BACKWARD]
        if self in around and len(self._modules) == 1:
            around.remove(self)
        for unit in reversed(around):  # the one announced last is told first
            gradients = announce_derivative(unit, UNKNOWN_CALL, *gradients)
        return gradients

    def pre_backward(self, call: Any = None) -> None:
        """Gather unless prefetched, prefetch the unit expected next.

        Args:
            call: if the first backward of a call is differentiated, its node, which `post_backward` is given at the end
                of that; `UNKNOWN_CALL` if it is not known which call's it is.
        """
        context = self.context
        begins = not context.is_in_backward
        context.queue_end_of_backward(creates_graph=torch.is_grad_enabled())
        if call is not None:
            self._differentiated.add(call)
        if self.runs_forward:  # which keeps its parameters
            self._computes_backward = self._computes_backward or not torch.is_grad_enabled()
        elif self.phase is not Phase.PRE_BACKWARD:
            self._enter_backward(begins)

    @labelled("FSDP::pre_backward ({name})")
    def _enter_backward(self, begins: bool) -> None:
        context = self.context
        self.phase = Phase.PRE_BACKWARD
        self._computes_backward = True
        if self._lost_writes is not None:
            self._lost_writes.check()
            self._lost_writes = None
        for group in self.groups:
            group.refuse_lost()
        groups = [group for group in self.groups if group.options.unshard_in_backward]
        # Where the pass begins, the last unit's forward and the loss are queued still, and the link is idle.
        self._gather(groups, self._batch_in(backward=True), for_backward=True, ahead=begins)
        position = self._positions.pop() if self._positions else 0
        self._prefetch("backward", self.prefetch_backward, context.order.behind(position), ahead=begins)
        for group in self.groups:
            group.wait_for_unshard()

    def post_backward(self, forward_pass: int, call: Any) -> None:
        """The gradients of the inputs of one forward ``call`` are complete."""
        creates_graph = torch.is_grad_enabled()
        # Nothing announced this backward if only some of the unit's modules ran.
        self.context.queue_end_of_backward(creates_graph=creates_graph)
        goes_on = self._awaited.end(forward_pass)
        if self._differentiated:
            self._differentiated.discard(call)
            if self._differentiated:
                return  # gradients flow into the middle of those calls, which no output announces
        if not self.runs_forward:
            self.phase = Phase.POST_BACKWARD
        # Nothing tells of calls that are yet to be recomputed, and a recomputation is not told of others.
        is_alone = len(self._modules) == 1 and self._calls <= 1
        is_last = is_alone if forward_pass < 0 else not self._calls_without_graph
        self._reduce(is_complete=not (creates_graph or goes_on), is_last=is_last)

    def _reduce(self, is_complete: bool, is_last: bool = True) -> None:
        """Reshard; once the unit's backward is complete, reduce or keep its gradients.

        Where ranks reduce in turn they do so once: if it may not be the last call's, when the whole backward is over.
        """
        for group in self.groups:
            group.gradients.note_frozen()
            self._reshard_after_backward(group)
            if is_complete and (is_last or not (group.takes_turns and self.reduces(group))):
                self._reduce_group(group)
        if is_complete:
            self._computes_backward = False

    @labelled("FSDP::post_backward_reshard ({name})")
    def _reshard_after_backward(self, group: ParamGroup) -> None:
        if group.options.reshard_after_backward and not self.runs_forward:
            group.reshard_after_use()

    def _reduce_group(self, group: ParamGroup) -> None:
        if not self.reduces(group):
            group.gradients.accumulate()
        elif group.takes_turns:
            self.context.reduce_in_turn(self, group)
        else:
            self.start_reduction(group)

    def reduces(self, group: ParamGroup) -> bool:
        """Whether gradients of ``group`` are reduced after the backward that runs, and not kept for a later one."""
        reduces_now = self.iteration.ends or group.mesh.strategy.reduces_every_backward
        return group.options.reduce_gradients and reduces_now

    @labelled("FSDP::post_backward_reduce ({name})")
    def start_reduction(self, group: ParamGroup) -> None:
        """Reduce what ``group`` has of gradients, and zeros for those that it has not."""
        context = self.context
        taken = group.gradients.take()
        if group.gradients.trains_otherwise:
            context.trains_otherwise = True
            group.gradients.note_training()
        if taken and context.trains_otherwise:
            context.agree_on_training(group)
        for comm in group.mesh.comms if taken else ():
            comm.reductions += 1
        for slots, gradients in taken:
            if group.mesh.replicate and group.options.all_reduce_gradients:
                context.agree_on_replicas()
            joins = context.joins_small and self.is_small
            context.reductions.start(group.gradients, slots, gradients, context.reduce_lanes, joins)

    def end_of_backward(self) -> None:
        """Do what no gradient triggered: inputs without gradients, parameters unused, calls that took no part."""
        if self.runs_forward:  # backward was called inside this forward
            if self._computes_backward:
                self._reduce(is_complete=True)
            return
        took_part = self.phase is Phase.POST_BACKWARD and not self._to_run
        if self._computes_backward or (
            not took_part and any(group.gradients.awaits_reduction() for group in self.groups)
        ):
            self._reduce(is_complete=True)
        else:
            for group in self.groups:
                # What the user gathers, or has for a backward to come, while another stage of a pipeline is in its own.
                stays = group.is_asked_for if group.is_gathering else group.stays_registered and not took_part
                if group.options.reshard_after_backward and not stays:
                    group.reshard_after_use()
                # An earlier forward may have made something of a parameter that this one used again, as autocast caches
                # casts. It is older than the inputs of this one, so its gradient comes after theirs.
                if took_part and group.gradients.has_any():
                    self._reduce_group(group)
                elif group.is_whole_everywhere and not (took_part or self.reduces(group)) and self.is_in_model:
                    group.gradients.note_left_out()
        self._forget_forward()

    def end_of_differentiable_backward(self) -> None:
        """A backward that creates a graph is over: it reduces nothing, and where no input told that it was over for the
        unit, the parameters stay gathered for its own backward, which no input will announce."""
        if self.runs_forward:
            return
        if self.phase is Phase.PRE_BACKWARD:
            for group in self.groups:
                group.shards.watch()
        self._computes_backward = False
        self._forget_forward()

    def guard_gradients(self) -> None:
        """A backward creates a graph: `check_arrival` from now on, whenever a parameter gets its gradient."""
        for guard in self._guards:
            guard.remove()
        hook = weakly(self.check_arrival)
        faces = [face for group in self.groups for slot in group.slots for face in slot.faces]
        self._guards = [face.register_post_accumulate_grad_hook(hook) for face in faces if face.requires_grad]

    def check_arrival(self, _: torch.Tensor) -> None:
        """
        Raises:
            StateError: if the gradient has a graph, which its shard would lose, or was computed without parameters.
        """
        if torch.is_grad_enabled():
            raise StateError(
                f"unit {self.title!r}: backward(create_graph=True) reached its parameters, whose gradients are reduced "
                "to shards without their graph: take the gradients to be differentiated by torch.autograd.grad(output, "
                "inputs, create_graph=True) and call backward() on a loss that is made of them"
            )
        if self.phase is not Phase.IDLE:
            return
        if any(group.options.unshard_in_backward and not group.is_unsharded for group in self.groups):
            raise StateError(
                f"unit {self.title!r}: backward differentiated gradients of tensors inside of it after another one had "
                "resharded its parameters: run both as one backward, take gradients of the unit's inputs, or keep "
                "the parameters by set_reshard_after_backward(False)"
            )
        self.context.queue_end_of_backward()
        self._computes_backward = True

    def _forget_forward(self) -> None:
        self._differentiated.clear()
        self._to_run, self._inside, self.phase = set(), [], Phase.IDLE

    def forget_calls(self) -> None:
        """The iteration's last backward is over."""
        self._awaited.forget()
        self._positions.clear()

    # -- Anywhere

    @property
    def runs_forward(self) -> bool:
        """Whether a forward of it goes on, apart from a recomputed one."""
        return bool(self._inside) and not self._recomputes

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of it has begun that did not come to its end, nor did an exception end it."""
        return self.phase is Phase.FORWARD or bool(self._inside)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward of it, as far as is known, was not followed by a backward yet that anything waits for."""
        return bool(self.groups and self._positions)

    def watch_writes(self) -> None:
        """The user gathered its parameters, or they were gathered already: what is written to those is lost."""
        if self._lost_writes is None:
            self._lost_writes = LostWrites(self.groups)
        self._lost_writes.enter()

    def reshard(self) -> None:
        """Register the sharded parameters, as the user asked for, unless a forward goes on that would keep them."""
        if self._lost_writes is not None:
            self._lost_writes.check()
        for group in self.groups:
            if group.options.reshard_after_forward or not self.runs_forward:
                group.reshard()

    def reset(self) -> None:
        """Drop everything of an iteration that failed."""
        for group in self.groups:
            group.reshard()
            group.gradients.drop()
        self._computes_backward = False
        self._forget_forward()
        self._awaited.clear()
        self._positions.clear()

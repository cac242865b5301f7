"""Recording a constructor: its tensors have no memory, and what it does to them is written down.

Inside the context every new tensor is *hollow*: of the device, dtype, shape and strides that it would have, over a
storage of no bytes. So a constructor sees what it always sees (on the meta device `torch.nn.init` itself skips work,
and ``.to("cpu")`` is an error). Where it needs values (``.item()``, masks, ``.numpy()``), they are computed from the
record up to there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..core.changing import changing
from ..core.device import OperatorMode
from ..core.tree import map_tensors, tensors_in
from ..core.whole import has_repeats
from .hollow import Storages
from .operators import FRESH, OVERWRITE, UNDEFINED, Call, has_operators, has_plain_memory, on_meta
from .record import Constant, Explicit, Op, Record, View, leaves_of, replace_leaves
from .replay import Replay, Sink, States, as_recorded, clear
from .streams import Position, default_generator, default_generators, leave_mark, marked_position, position_of


class _UnrecordableError(Exception):
    """The operator cannot be recorded, since its result depends on values."""


class Recorder(OperatorMode):
    """Writes down what is done to hollow tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import the compiler, which takes seconds

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self.is_paused = False
        self.marked_devices: set[torch.device] = set()
        """Devices whose default generators were marked before the constructor could seed them."""
        self._storages = Storages(self.record)
        self._states = States()

    def paused(self) -> AbstractContextManager[None]:
        """What happens inside is not recorded."""
        return changing([self], "is_paused", True)

    # -- What is hollow

    def number_of(self, tensor: Any) -> int | None:
        """The number of a hollow tensor's storage."""
        with self.paused():
            return self._storages.number_of(tensor)

    def birth_of(self, tensor: Any) -> int | None:
        """How many storages were born before this tensor's; None if its storage was not born."""
        with self.paused():
            return self._storages.birth_of(tensor)

    def view_of(self, tensor: torch.Tensor) -> View:
        """The geometry of a hollow tensor."""
        with self.paused():
            return self._storages.view_of(tensor)

    def hollow_numbers(self) -> set[int]:
        """The numbers of all hollow storages that something still refers to."""
        return set(self._storages.numbers())

    # -- Values

    def _evaluate(self, sinks: Mapping[int, Sink]) -> bool:
        """Hand over storages with the values that they have now; return whether any of them is random."""
        with self.paused():
            return Replay(self.record, self._states).run(sinks)

    def peek(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a hollow tensor, with its values."""
        view = self.view_of(tensor)
        found: list[torch.Tensor] = []
        self.record.values_were_used |= self._evaluate({view.storage: lambda memory: found.append(view.on(memory))})
        return found[0]

    def expose(self, tensor: torch.Tensor) -> None:
        """Give a tensor memory and values, in place, if it is hollow: other code is about to have its address."""
        self._fill([tensor])
        with self.paused():
            self._storages.expose(tensor.untyped_storage())

    def _fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the hollow ones of ``tensors`` memory and values, in place; all that shares their storages has them."""
        numbers = {number for tensor in tensors if (number := self.number_of(tensor)) is not None}
        self.record.values_were_used |= self.fill(numbers)

    def fill(self, numbers: Iterable[int]) -> bool:
        """Give hollow storages memory and values, in place; return whether any of them is random."""
        storages = self._storages.numbers()
        return self._evaluate({number: functools.partial(self._move, storages[number]) for number in numbers})

    def _move(self, storage: torch.UntypedStorage, memory: torch.UntypedStorage) -> None:
        self._storages.give_memory(storage, memory.nbytes())
        storage.copy_(memory)

    def abandon(self) -> None:
        """Give everything hollow memory of zeros, so that it can be used after an exception."""
        with self.paused():
            for number, storage in self._storages.numbers().items():
                self._storages.give_memory(storage, self.record.memory[number].nbytes)
                clear(storage)

    def settle(self) -> None:
        """Nothing that was recorded waits for its values: put the generators where the constructor leaves them, unless
        what an earlier context recorded does."""
        if any(position.previous is not None for position in self.record.entry):
            return
        generators = [*default_generators(), *self.record.generators.values()]
        with as_recorded():
            positions = [(generator, marked_position(generator)) for generator in generators]
            states = [(generator, self._states.at(one)) for generator, one in positions if one is not None]
        for generator, state in states:
            generator.set_state(state)

    def constant(self, tensor: torch.Tensor) -> int:
        """The number of a new storage that has what is in the memory of ``tensor``."""
        with self.paused():
            storage = tensor.untyped_storage()
            whole = View(0, tensor.dtype, (storage.nbytes() // tensor.itemsize,), (1,), 0).on(storage)
            number = self.record.new_storage(storage.nbytes(), tensor.device)
            clone, view, nothing = torch.ops.aten.clone.default, View.of(whole, number), frozenset[int]()
            value = self._storages.constant(whole)
            self.record.add(Op(clone, (value,), {}, (view,), nothing, nothing, False, torch.get_default_dtype()))
        return number

    # -- Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if any(has_operators(kind) for kind in types):
            return NotImplemented  # the operators that theirs consist of come here
        with self:
            # Operators of inference tensors come whole, even those that may be views or copies, such as `to`.
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        with self.paused():
            return self._handle(Call(func, args, kwargs or {}))

    def _handle(self, call: Call) -> Any:
        if call.is_reshaping:
            return self._reshape(call)
        if call.name in UNDEFINED and call.makes_memory:
            args = map_tensors(call.args, on_meta)
            like = call.function(*args, **{**call.kwargs, "device": torch.device("meta")})
            return self._storages.hollow(like, call.device)
        is_any_hollow = any(self._storages.number_of(tensor) is not None for tensor in call.tensors)
        if not (is_any_hollow or call.makes_memory or call.is_random):
            return self._run(call)
        for tensor in call.written:
            if self._storages.can_be_emptied(tensor):
                number = self.constant(tensor)
                self._storages.empty(tensor.untyped_storage(), number)
        try:
            return self._write_down(call)
        except _UnrecordableError:
            return self._run_by_value(call)

    def _reshape(self, call: Call) -> Any:
        held = self._storages.lend_memory(call.storages)  # torch checks that views fit into it
        try:
            result = call.run()
        finally:
            self._storages.take_back(held)
        if call.name in FRESH and not held:
            for storage in call.storages:
                self._storages.note_birth(storage)
        return result

    def _write_down(self, call: Call) -> Any:
        """Record one operator; its results are hollow, shaped as the operator on the meta device says."""
        if call.depends_on_values or any(map(self._is_refused, call.written)):
            raise _UnrecordableError
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        results = self._shapes(call, twins)
        if call.device.type == "meta":
            return results
        originals = {id(twin): tensor for tensor, twin in twins.values()}
        found = leaves_of(results)
        old = [originals.get(id(result)) for result in found]
        made = [
            self._storages.hollow(result, call.device) if result is not None and before is None else None
            for result, before in zip(found, old, strict=True)
        ]
        self.record.add(self._describe(call, made))
        finals = {id(result): made[i] if old[i] is None else old[i] for i, result in enumerate(found)}
        return map_tensors(results, lambda result: finals[id(result)])  # type: ignore[arg-type, return-value]

    def _is_refused(self, tensor: torch.Tensor) -> bool:
        """Whether writing to ``tensor`` cannot be recorded, or is an error, as where elements share memory, of which
        the meta device knows nothing."""
        return has_repeats(tensor) or self._storages.number_of(tensor) is None

    def _shapes(self, call: Call, twins: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """What an operator gives on meta twins of its tensors, which are added to ``twins``."""

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            if not has_plain_memory(tensor) or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
                raise _UnrecordableError
            return twins.setdefault(id(tensor), (tensor, on_meta(tensor)))[1]

        args, kwargs = map_tensors((call.args, call.kwargs), twin)
        args, kwargs = replace_leaves((args, kwargs), torch.Generator, lambda _: None)
        if not twins or kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        try:
            results = call.function(*args, **kwargs)
        except Exception as error:  # no meta kernel; or an invalid call, whose own message is the best
            raise _UnrecordableError from error
        is_resized = any(twin.size() != tensor.size() for tensor, twin in twins.values())
        if is_resized or not all(leaf is None or has_plain_memory(leaf) for leaf in leaves_of(results)):
            raise _UnrecordableError
        return results

    def _describe(self, call: Call, made: list[torch.Tensor | None]) -> Op:
        views = [self._storages.view_of(tensor) for tensor in call.written]
        numbers = map(self._storages.number_of, call.read)
        reads = frozenset(number for number in numbers if number is not None)
        writes = frozenset(view.storage for view in views)
        covers = all(view.covers(self.record.memory[view.storage].nbytes) for view in views)
        overwrites = call.name in OVERWRITE and covers and not writes & reads
        args, kwargs = replace_leaves((call.args, call.kwargs), torch.Tensor, self._operand)
        args, kwargs = replace_leaves((args, kwargs), torch.Generator, lambda _: Explicit())
        outputs = tuple(None if tensor is None else self._storages.view_of(tensor) for tensor in made)
        op = Op(call.function, args, kwargs, outputs, reads, writes, overwrites, torch.get_default_dtype())
        if call.is_random:
            self._draw(op, call.generators, call.device)
        return op

    def _operand(self, tensor: torch.Tensor) -> View | Constant:
        if self._storages.number_of(tensor) is not None:
            return self._storages.view_of(tensor)
        return self._storages.constant(tensor)

    def record_whole(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, generator: Any) -> None:
        """Record a random function that overwrites a hollow tensor as one operator."""
        view = self.view_of(tensor)
        overwrites = view.covers(self.record.memory[view.storage].nbytes)
        kwargs = {"generator": None if generator is None else Explicit()}
        reads, writes, dtype = frozenset[int](), frozenset({view.storage}), torch.get_default_dtype()
        op = Op(function, (view, *args), kwargs, (None,), reads, writes, overwrites, dtype)
        self._draw(op, [] if generator is None else [generator], tensor.device)
        self.record.add(op)

    def _draw(self, op: Op, given: list[torch.Generator], device: torch.device) -> None:
        """``op`` draws from the generator that it was given, or from the default one of ``device``."""
        generator = given[0] if given else default_generator(device)
        op.before = position_of(generator, is_entry=not given and generator.device not in self.marked_devices)
        self._go_on(generator, Position(generator.device, previous=op.before, draw=op), is_given=bool(given))
        if given:
            self.record.generators[op.before.start] = generator
        else:
            self.marked_devices.add(generator.device)

    # -- What cannot be written down

    def _run(self, call: Call) -> Any:
        """Run an operator on tensors with memory."""
        for tensor in call.written:
            if has_plain_memory(tensor):
                self._storages.will_change(tensor.untyped_storage())
        with self._at_values(call.generators) if call.may_draw else nullcontext():
            result = call.run()
        self._note_born(result, call.storages)
        return result

    def _run_by_value(self, call: Call) -> Any:
        """Run an operator for real: what it writes gets memory, what it reads is computed for it."""
        self._fill(call.written)
        hollow = self._storages.number_of
        return self._run(call.replaced(lambda tensor: self.peek(tensor) if hollow(tensor) is not None else tensor))

    def run_with_memory(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what reads memory without an operator, as `torch.tensor` of a list of tensors does."""
        given = tensors_in((args, kwargs))
        self._fill(given)
        with self._at_values([]), self.paused():
            result = function(*args, **kwargs)
            self._note_born(result, [tensor.untyped_storage() for tensor in given if has_plain_memory(tensor)])
        return result

    @contextmanager
    def _at_values(self, given: list[torch.Generator]) -> Iterator[None]:
        """Inside, the generators that something may draw from are where the constructor would have them."""
        generators = given or default_generators()
        marks = [generator.get_state() for generator in generators]
        positions = [marked_position(generator) for generator in generators]
        for generator, position in zip(generators, positions, strict=True):
            if position is not None:
                with self.paused():
                    state = self._states.at(position)
                generator.set_state(state)
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, position, state, mark in zip(generators, positions, states, marks, strict=True):
                if torch.equal(generator.get_state(), state):  # nothing was drawn
                    generator.set_state(mark)
                else:
                    self.record.values_were_used = True
                    if position is not None:
                        # The stream goes on: its start tells of another seed, for which the numbers would be others.
                        after = Position(generator.device, state=generator.get_state(), previous=position)
                        self._go_on(generator, after, is_given=bool(given))

    def _go_on(self, generator: torch.Generator, after: Position, *, is_given: bool) -> None:
        """Numbers were drawn from ``generator``, which is at ``after`` now."""
        assert after.previous is not None
        # Of generators that were passed there may be many, and they may outlive this record.
        leave_mark(generator, after, len(self.record.positions), self.record.serial if is_given else None)
        self.record.positions += [after.previous, after]

    def _note_born(self, result: Any, known: list[torch.UntypedStorage]) -> None:
        for tensor in tensors_in(result):
            if has_plain_memory(tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if not any(storage is other for other in known):
                    self._storages.note_birth(storage)

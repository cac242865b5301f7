"""Recording a constructor: its tensors have no memory, and what it does to them is written down.

Inside the context every new tensor is *hollow*: of the device, dtype, shape and strides that it would have, over a
storage of no bytes. So a constructor sees what it always sees (on the meta device `torch.nn.init` itself skips work,
and ``.to("cpu")`` is an error). Where it needs values (``.item()``, masks, ``.numpy()``), they are computed from the
record up to there.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..core.device import schema_of
from ..core.tree import map_tensors, tensors_in
from .record import Constant, Explicit, Op, Record, View, leaves_of, replace_leaves
from .replay import Replay, States, clear
from .streams import Position, default_generator, default_generators, leave_mark, marked_position, position_of

_OVERWRITE = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_"} | {
    "cauchy_",
    "log_normal_",
    "geometric_",
    "bernoulli_",
}
"""Operators that leave nothing of the values before."""

_DRAWS_BY_SHAPE = {"normal", "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like", "native_dropout"}
"""Random operators on values that draw equally many numbers whatever the values are."""

_UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operators that make memory without values: there is nothing to record."""

_ALIASES = {"_unsafe_view", "lift_fresh", "lift"}


class _UnrecordableError(Exception):
    """An operator whose result is known from values only."""


class Recorder(TorchDispatchMode):
    """Writes down what is done to hollow tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import the compiler, which takes seconds

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """From each hollow storage to its number."""
        self._born: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Storages with memory that torch made inside the context, numbered in the order in which it did."""
        self._births = itertools.count()
        self._captured: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """From storages with memory to the constants that refer to them."""
        self._states = States()
        self.is_paused = False
        self.entry_devices: set[torch.device] = set()
        """Whose default generators were marked before the constructor could seed them."""

    # -- What is hollow

    def number_of(self, tensor: Any) -> int | None:
        """The number of a hollow tensor's storage."""
        number: int | None = self._numbers.get(self._storage_of(tensor)) if _has_plain_memory(tensor) else None
        return number

    def birth_of(self, tensor: torch.Tensor) -> int | None:
        """How many tensors with memory torch had made inside the context when it made this one, if it did."""
        birth: int | None = self._born.get(self._storage_of(tensor)) if _has_plain_memory(tensor) else None
        return birth

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        if self.is_paused:
            return tensor.untyped_storage()
        with self.paused():  # or the look at it would give it memory
            return tensor.untyped_storage()

    def hollow_storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Storages without memory that something still refers to."""
        return list(self._numbers.items())

    def view_of(self, tensor: torch.Tensor) -> View:
        """``tensor`` as geometry; it is hollow."""
        return View.of(tensor, self._numbers[self._storage_of(tensor)])

    def hollow(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new hollow tensor on ``device`` with the size, strides and dtype of ``like``."""
        tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
        storage = tensor.untyped_storage()
        self._numbers[storage] = self.record.new_storage(storage.nbytes(), tensor.device)
        storage.resize_(0)
        return tensor

    # -- Values

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not recorded."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def evaluate(self, sinks: dict[int, Callable[[torch.UntypedStorage], None]]) -> bool:
        """Hand over storages with the values that they have now; gives whether any of them is random."""
        with self.paused():
            return Replay(self.record, self._states).run(sinks)

    def peek(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a hollow tensor, with its values."""
        view, found = self.view_of(tensor), []
        self.record.values_were_used |= self.evaluate({view.storage: lambda memory: found.append(view.on(memory))})
        value: torch.Tensor = found[0].conj() if tensor.is_conj() else found[0]
        return value.neg() if tensor.is_neg() else value

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Give a hollow storage memory and values, in place: all that refers to it has them."""
        number = self._numbers[storage]
        self.record.values_were_used |= self.evaluate({number: lambda memory: _move(memory, storage)})
        del self._numbers[storage]
        self._born[storage] = next(self._births)

    def fill_all(self, storages: list[tuple[torch.UntypedStorage, int]]) -> None:
        """`fill` many; the record may hold for other seeds none the less."""
        targets = {number: storage for storage, number in storages}
        self.evaluate({number: functools.partial(_move, to=storage) for number, storage in targets.items()})

    def abandon(self) -> None:
        """Give whatever is hollow memory of zeros, so that nobody stumbles over it after an exception."""
        with self.paused():
            for storage, number in self.hollow_storages():
                storage.resize_(self.record.memory[number].nbytes)
                clear(storage)

    def constant(self, tensor: torch.Tensor) -> int:
        """The number of a new storage that has what is in the memory of ``tensor``."""
        storage = self._storage_of(tensor)
        with self.paused():
            whole = View(0, tensor.dtype, (storage.nbytes() // tensor.itemsize,), (1,), 0).on(storage)
            number = self.record.new_storage(storage.nbytes(), tensor.device)
            view = View(number, tensor.dtype, tuple(whole.size()), (1,), 0)
            clone, nothing = torch.ops.aten.clone.default, frozenset[int]()
            op = Op(clone, (Constant(whole),), {}, (view,), nothing, nothing, False, torch.get_default_dtype())
        self.record.add(op)
        return number

    def _absorb(self, tensor: torch.Tensor) -> None:
        """Make a tensor that was born with memory hollow."""
        storage = tensor.untyped_storage()
        number = self.constant(tensor.clone())
        self._release_captured(storage)
        storage.resize_(0)
        del self._born[storage]
        self._numbers[storage] = number

    # -- Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if any(_has_operators(kind) for kind in types):
            return NotImplemented  # they come here one by one
        with self.paused():
            return self._handle(func, args, kwargs or {})

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if func.is_view or torch.Tag.inplace_view in func.tags or func.overloadpacket.__name__ in _ALIASES:
            return self._reshape(func, args, kwargs)
        if func.overloadpacket.__name__ in _UNDEFINED:
            return self._undefined(func, args, kwargs, tensors)
        is_any_hollow = any(self.number_of(tensor) is not None for tensor in tensors)
        if not is_any_hollow and not self._makes_hollow(func, tensors, kwargs):
            return self._run(func, args, kwargs)
        written = _written(func, args, kwargs)
        for tensor in written:
            if self.birth_of(tensor) is not None and tensor.untyped_storage().resizable():
                self._absorb(tensor)
        try:
            return self._write_down(func, args, kwargs, written)
        except _UnrecordableError:
            return self._run_by_value(func, args, kwargs, written)

    def _undefined(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        device = kwargs.get("device") or _device_of(tensors)
        usual = kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
        if device.type == "meta" or not usual or not all(map(_has_plain_memory, tensors)):
            return func(*args, **kwargs)
        args = map_tensors(args, _on_meta)
        return self.hollow(func(*args, **{**kwargs, "device": torch.device("meta")}), device)

    def _makes_hollow(self, func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether an operator without hollow arguments makes hollow tensors: if it makes them of nothing, or draws."""
        if _is_on_meta(tensors, kwargs) or func.namespace != "aten" or not _returns_tensors(func):
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return True
        return not tensors and not kwargs.get("pin_memory") and kwargs.get("layout") in (None, torch.strided)

    def _reshape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Views and changes of geometry: nothing happens to values. Torch checks that they fit into memory."""
        held: list[torch.UntypedStorage] = []
        for leaf in _storages_in((args, kwargs)):
            if leaf in self._numbers and not any(leaf is other for other in held):
                held.append(leaf)
                leaf.resize_(self.record.memory[self._numbers[leaf]].nbytes)
        try:
            result = func(*args, **kwargs)
        finally:
            for storage in held:
                self.record.grow(self._numbers[storage], storage.nbytes())
                storage.resize_(0)
        if not held:
            self._note_born((args, kwargs) if func.overloadpacket.__name__ in _ALIASES else result, ())
        return result

    def _write_down(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Record one operator; its results are hollow, shaped as the operator on the meta device says."""
        if not all(self.number_of(tensor) is not None for tensor in written):
            raise _UnrecordableError  # memory from elsewhere
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        results = self._shapes(func, args, kwargs, twins)
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            return results
        originals = {id(twin): tensor for tensor, twin in twins.values()}
        found = leaves_of(results)
        device = device if device is not None else _device_of([tensor for tensor, _ in twins.values()])
        old = [originals.get(id(result)) for result in found]
        made = [
            self.hollow(result, device) if result is not None and before is None else None
            for result, before in zip(found, old, strict=True)
        ]
        self.record.add(self._describe(func, args, kwargs, written, made))
        finals = {id(result): made[i] if old[i] is None else old[i] for i, result in enumerate(found)}
        return map_tensors(results, lambda result: finals[id(result)])  # type: ignore[arg-type, return-value]

    def _shapes(self, func: Any, args: Any, kwargs: Any, twins: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """What ``func`` gives on meta twins of its tensors, which are added to ``twins``."""
        is_quantizing = func.overloadpacket.__name__.startswith("quantize_per")
        if func.namespace != "aten" or is_quantizing or _depends_on_values(func, args, kwargs):
            raise _UnrecordableError

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            if not _has_plain_memory(tensor) or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
                raise _UnrecordableError
            return twins.setdefault(id(tensor), (tensor, _on_meta(tensor)))[1]

        args, kwargs = map_tensors((args, kwargs), twin)
        args, kwargs = replace_leaves((args, kwargs), torch.Generator, lambda _: None)
        if not twins or kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            results = func(*args, **kwargs)
        except Exception as error:  # no meta kernel, or not possible at all: then its own message is the best
            raise _UnrecordableError from error
        is_resized = any(twin.size() != tensor.size() for tensor, twin in twins.values())
        if is_resized or not all(leaf is None or _has_plain_memory(leaf) for leaf in leaves_of(results)):
            raise _UnrecordableError
        return results

    def _describe(
        self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor], made: list[torch.Tensor | None]
    ) -> Op:
        hollow = [tensor for tensor in tensors_in((args, kwargs)) if self.number_of(tensor) is not None]
        is_written = {id(tensor) for tensor in written}
        reads = frozenset(self.view_of(tensor).storage for tensor in hollow if id(tensor) not in is_written)
        views = [self.view_of(tensor) for tensor in written]
        writes = frozenset(view.storage for view in views)
        overwrites = (
            func.overloadpacket.__name__ in _OVERWRITE
            and not writes & reads
            and views[0].covers(self.record.memory[views[0].storage].nbytes)
        )
        args_, kwargs_ = replace_leaves((args, kwargs), torch.Tensor, self._operand)
        args_, kwargs_ = replace_leaves((args_, kwargs_), torch.Generator, lambda _: Explicit())
        outputs = tuple(None if tensor is None else self.view_of(tensor) for tensor in made)
        op = Op(func, args_, kwargs_, outputs, reads, writes, overwrites, torch.get_default_dtype())
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(op, args, kwargs, written + [tensor for tensor in made if tensor is not None])
        return op

    def _operand(self, tensor: torch.Tensor) -> View | Constant:
        if self.number_of(tensor) is not None:
            return self.view_of(tensor)
        constant = Constant(tensor)
        self._captured.setdefault(tensor.untyped_storage(), []).append(constant)
        return constant

    def call(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, generator: Any) -> None:
        """Record a random function that overwrites ``tensor`` as one operator."""
        view = self.view_of(tensor)
        overwrites = view.covers(self.record.memory[view.storage].nbytes)
        kwargs = {"generator": None if generator is None else Explicit()}
        reads, writes, dtype = frozenset[int](), frozenset({view.storage}), torch.get_default_dtype()
        op = Op(function, (view, *args), kwargs, (None,), reads, writes, overwrites, dtype)
        self._draw(op, (generator,), {}, [tensor])
        self.record.add(op)

    def _draw(self, op: Op, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """``op`` draws from the generator that it was given, or from the default one of where its results are."""
        given: list[torch.Generator] = []
        replace_leaves((args, kwargs), torch.Generator, given.append)
        generator = given[0] if given else default_generator(results[0].device)
        seen_before = given or generator.device in self.entry_devices
        op.before = position_of(generator, is_entry=not seen_before)
        self.entry_devices.add(generator.device)
        after = Position(generator.device, previous=op.before, draw=op)
        self.record.positions += [op.before, after]
        if given:
            self.record.generators[after.start] = generator
        leave_mark(generator, after)

    # -- What cannot be written down

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors with memory."""
        for tensor in _written(func, args, kwargs):
            self._release_captured(tensor.untyped_storage() if _has_plain_memory(tensor) else None)
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_on_meta(args, kwargs):
            self._stand_at_values(args, kwargs)
        result = func(*args, **kwargs)
        self._note_born(result, tensors_in((args, kwargs)))
        return result

    def _run_by_value(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Run an operator for real: what it writes gets memory, what it reads is computed for it."""
        for tensor in written:
            if self.number_of(tensor) is not None:
                self.fill(tensor.untyped_storage())

        def value(tensor: torch.Tensor) -> torch.Tensor:
            return self.peek(tensor) if self.number_of(tensor) is not None else tensor

        args, kwargs = map_tensors((args, kwargs), value)
        return self._run(func, args, kwargs)

    def run_with_memory(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what reads memory without an operator, as `torch.tensor` of a list of tensors does."""
        for tensor in tensors_in((args, kwargs)):
            if self.number_of(tensor) is not None:
                self.fill(tensor.untyped_storage())
        marks, were_used = [(g, g.get_state()) for g in default_generators()], self.record.values_were_used
        self._stand_at_values(args, kwargs)
        states = [generator.get_state() for generator, _ in marks]
        with self.paused():
            result = func(*args, **kwargs)
        if all(torch.equal(g.get_state(), state) for (g, _), state in zip(marks, states, strict=True)):
            for generator, mark in marks:  # it drew nothing
                generator.set_state(mark)
            self.record.values_were_used = were_used
        self._note_born(result, tensors_in((args, kwargs)))
        return result

    def _stand_at_values(self, args: Any, kwargs: Any) -> None:
        """An operator draws for real: the generators that it may use have to be where it would find them."""
        given: list[torch.Generator] = []
        replace_leaves((args, kwargs), torch.Generator, given.append)
        for generator in given or default_generators():
            if (position := marked_position(generator)) is not None:
                with self.paused():
                    state = self._states.at(position)
                generator.set_state(state)
        self.record.values_were_used = True

    def _note_born(self, result: Any, inputs: Any) -> None:
        known = {id(tensor.untyped_storage()) for tensor in inputs if _has_plain_memory(tensor)}
        for tensor in tensors_in(result):
            if _has_plain_memory(tensor) and not tensor.is_meta and id(tensor.untyped_storage()) not in known:
                self._born[tensor.untyped_storage()] = next(self._births)

    def _release_captured(self, storage: torch.UntypedStorage | None) -> None:
        """``storage`` is about to change: constants in it become copies."""
        if storage is not None:
            with self.paused():
                for constant in self._captured.pop(storage, ()):
                    constant.detach()


class MemoryAccess(TorchFunctionMode):
    """Catches what would look past the operators into the memory of a hollow tensor."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if recorder.is_paused:
            return func(*args, **kwargs)
        if func in _LOOKS_INTO_MEMORY and recorder.number_of(args[0]) is not None:
            return _LOOKS_INTO_MEMORY[func](recorder, func, *args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            hollow = [tensor for tensor in tensors_in((args, kwargs)) if recorder.number_of(tensor) is not None]
            if "not allocated yet" not in str(error) or not hollow:
                raise
        return recorder.run_with_memory(func, args, kwargs)


def _with_memory(recorder: Recorder, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    recorder.fill(tensor.untyped_storage())
    return func(tensor, *args, **kwargs)


def _with_values(recorder: Recorder, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(recorder.peek(tensor), *args, **kwargs)


def _address(recorder: Recorder, func: Any, tensor: torch.Tensor) -> int:
    """Different for different memory, as whoever looks for tied tensors expects."""
    view = recorder.view_of(tensor)
    return ((view.storage + 1) << 48) + view.offset * view.dtype.itemsize


def _copied(recorder: Recorder, func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """`copy.deepcopy` of a tensor copies memory; of a hollow one it is an operator."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copy.__class__ = type(tensor)
        copy.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = copy
    copied: torch.Tensor = memo[id(tensor)]
    return copied


def _is_meta(recorder: Recorder, func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    """Torch's truncated normal samples until it likes the values, so it is recorded as a whole. It asks at its
    beginning whether there are values at all, and does nothing if not."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # other modes above this one
        frame = frame.f_back
    truncated_normal = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if truncated_normal is None or frame.f_code is not truncated_normal.__code__:
        return False
    given = frame.f_locals
    arguments = [given[name] for name in ("mean", "std", "a", "b")]
    recorder.call(torch.nn.init.trunc_normal_, tensor, *arguments, generator=given["generator"])
    return True


_LOOKS_INTO_MEMORY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.numpy: _with_memory,
    torch.Tensor.__array__: _with_memory,
    torch.Tensor.__dlpack__: _with_memory,
    torch.Tensor.__reduce_ex__: _with_memory,
    torch.Tensor.share_memory_: _with_memory,
    torch.Tensor.tolist: _with_values,
    torch.Tensor.__repr__: _with_values,
    torch.Tensor.__format__: _with_values,
    torch.Tensor.storage: _with_memory,
    torch.Tensor.untyped_storage: _with_memory,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.is_meta.__get__: _is_meta,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: _copied,
}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_on_meta(args: Any, kwargs: Any) -> bool:
    """Whether an operator is asked for meta tensors, which draw nothing."""
    device = kwargs.get("device")
    return device.type == "meta" if device is not None else any(tensor.is_meta for tensor in tensors_in((args, kwargs)))


def _has_operators(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class have operators of their own."""
    return kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def _has_plain_memory(value: Any) -> bool:
    """Whether ``value`` is a tensor with one storage, in which its elements are."""
    if not isinstance(value, torch.Tensor) or _has_operators(type(value)):
        return False
    return value.layout is torch.strided and not value.is_quantized


def _move(memory: torch.UntypedStorage, to: torch.UntypedStorage) -> None:
    to.resize_(memory.nbytes())
    to.copy_(memory)


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    """Of an operator's results: numbers (tensors without dims) may be elsewhere than what they are combined with."""
    ranked = sorted(tensors, key=lambda tensor: tensor.ndim == 0)
    return ranked[0].device if ranked else torch.device("cpu")


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator changes."""
    schema = schema_of(func)
    names = [argument.name for argument in schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    changed = [argument.name for argument in schema.arguments if argument.is_write]
    if func.overloadpacket.__name__.endswith("_batch_norm"):  # whose schemas do not say so
        changed = ["running_mean", "running_var"]
    found = tensors_in([values[name] for name in changed if name in values])
    return list({id(tensor): tensor for tensor in found}.values())


def _returns_tensors(func: Any) -> bool:
    returns = schema_of(func).returns
    return bool(returns) and all("Tensor" in str(value.type) for value in returns)


def _depends_on_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether shapes, results that are no tensors, or how much is drawn, depend on the values of tensors."""
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return True
    if torch.Tag.nondeterministic_seeded not in tags or func.overloadpacket.__name__ in _DRAWS_BY_SHAPE:
        return False
    return len(tensors_in((args, kwargs))) > len(_written(func, args, kwargs))


def _storages_in(value: Any) -> list[torch.UntypedStorage]:
    """Memory that tensors and storages in an operator's arguments refer to."""
    found: list[torch.UntypedStorage] = []
    replace_leaves(value, torch.UntypedStorage, found.append)
    tensors = [tensor for tensor in tensors_in(value) if _has_plain_memory(tensor)]
    return [*found, *(tensor.untyped_storage() for tensor in tensors)]

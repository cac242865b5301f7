"""Running recorded operators for real: one storage at a time, drawing in the order of the constructor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch

from ..core.device import not_inference
from .record import Constant, Explicit, Op, Record, View, leaves_of, replace_leaves
from .streams import Position, default_generator, preserved_generators

Sink = Callable[[torch.UntypedStorage], None]
"""Takes the final memory of one storage; it is freed when this returns, unless it is kept."""

Values = dict[int, torch.UntypedStorage]


class States:
    """States of generators at the positions of recorded draws.

    Args:
        starts: states at the origins of what is replayed.
        origins: from each replayed position to its origin, from which nothing that is replayed has drawn yet.
        replaced: the origins whose state is not the one that was recorded.
    """

    def __init__(
        self,
        starts: Mapping[Position, torch.Tensor] | None = None,
        origins: Mapping[Position, Position] | None = None,
        replaced: Collection[Position] = (),
    ):
        self._starts, self._origins, self._replaced = starts or {}, origins or {}, replaced
        self._after: dict[Op, torch.Tensor] = {}
        self._newest: dict[Position, Op] = {}
        self._kept: set[Op] = set()

    @property
    def are_replaced(self) -> bool:
        """Whether any stream starts from another state than was recorded."""
        return bool(self._replaced)

    def is_replaced(self, origin: Position) -> bool:
        """Whether the stream starts from another state than was recorded."""
        return origin in self._replaced

    def keep(self, op: Op) -> None:
        """Keep the state before ``op``, which will be asked for once more, out of order."""
        if op.before is not None and op.before.draw is not None:
            self._kept.add(op.before.draw)

    def origin_of(self, position: Position) -> Position:
        """Where the stream of ``position`` comes from."""
        return position.followed(self._origins) or position.start

    def at(self, position: Position) -> torch.Tensor:
        """The state at ``position``. Draws since the last known state are made only to get there."""
        missing: list[Op] = []
        while (state := self._known(position)) is None:
            assert position.draw is not None
            assert position.previous is not None
            missing.append(position.draw)
            position = position.previous
        for op in reversed(missing):
            state = draw_only(op, state)
            self.reached(op, state)
        return state

    def _known(self, position: Position) -> torch.Tensor | None:
        if (state := self._starts.get(position, position.state)) is None and position.draw is not None:
            state = self._after.get(position.draw)
        return state

    def before(self, op: Op) -> torch.Tensor | None:
        """The state that ``op`` draws from, if it draws."""
        return self.at(op.before) if op.before is not None else None

    def reached(self, op: Op, state: torch.Tensor) -> None:
        """Note that ``op`` left its generator at ``state``."""
        assert op.before is not None
        start = op.before.start
        newest = self._newest.get(start)
        if newest is None or newest.before is None or newest.before.draws < op.before.draws:
            self._newest[start] = op
            if newest is not None and newest not in self._kept:
                del self._after[newest]
        elif op not in self._kept and op is not newest:
            return
        self._after[op] = state


def _call(op: Op, tensor_of: Callable[[View], torch.Tensor], state: torch.Tensor | None) -> tuple[Any, Any]:
    """The operator's result, and the state of its generator afterwards, if it draws from ``state``."""
    generator: torch.Generator | None = None
    if op.before is not None and state is not None:
        device = op.before.device
        generator = torch.Generator(device) if op.is_given_generator else default_generator(device)
        generator.set_state(state)
    args, kwargs = replace_leaves((op.args, op.kwargs), View, tensor_of)
    args, kwargs = replace_leaves((args, kwargs), Constant, lambda constant: constant.value())
    args, kwargs = replace_leaves((args, kwargs), Explicit, lambda _: generator)
    with default_dtype(op.default_dtype):
        result = op.function(*args, **kwargs)
    return result, generator.get_state() if generator is not None else None


def clear(storage: torch.UntypedStorage) -> None:
    """Fill memory with zeros."""
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch's default dtype is ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw_only(op: Op, state: torch.Tensor) -> torch.Tensor:
    """The state that ``op`` leaves behind when it draws from ``state``; what it draws is dropped.

    Operators whose draws depend on values are never recorded.
    """
    assert op.before is not None
    device = op.before.device

    def scratch(view: View) -> torch.Tensor:
        # Ones, since not all operators take chances of zero.
        make = torch.empty if view.storage in op.writes else torch.ones
        return make(view.extent, dtype=view.dtype, device=device).as_strided(view.size, view.stride)

    after: torch.Tensor = _call(op, scratch, state)[1]
    return after


@contextmanager
def as_recorded() -> Iterator[None]:
    """Inside, no autograd, inference mode or autocast changes what operators do; generators are restored at the end."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(not_inference())
        stack.enter_context(preserved_generators())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Replay:
    """Gives storages of a record their values.

    Each storage's operators run together, at the point where the last random numbers that it depends on are drawn.
    Where it depends on earlier draws too, these are drawn once more, from states that were saved: nothing has to be
    held while other storages are made.

    Args:
        record: what to run.
        states: of the generators.
        names: of what the storages are, by number, for messages.
    """

    def __init__(self, record: Record, states: States, names: Mapping[int, str] = MappingProxyType({})):
        self._record, self._states, self._names = record, states, names

    def run(self, sinks: Mapping[int, Sink]) -> bool:
        """Make each storage of ``sinks``, by its number, and hand it over.

        Returns:
            Whether any of them depends on random numbers.
        """
        due: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        drawing = set(self._record.draws)
        for storage in sinks:
            indices = self._record.slice(storage)
            random = [index for index in indices if index in drawing]
            due[random[-1] if random else -1].append((indices, storage))
            for index in random[:-1]:
                self._states.keep(self._record.ops[index])
        with as_recorded():
            for last in sorted(due):
                for indices, storage in due[last]:
                    self.make(indices, storage, sinks[storage])
        return any(last >= 0 for last in due)

    def make(self, indices: Iterable[int], storage: int, sink: Sink) -> None:
        """Run the operators of one storage, freeing each other one after its last use."""
        ops = [self._record.ops[index] for index in indices]
        last = {touched: position for position, op in enumerate(ops) for touched in op.touches}
        values: Values = {}
        for position, op in enumerate(ops):
            try:
                self._run(op, values, {storage, *(number for number in op.creates if last[number] > position)})
            except Exception as error:
                what = repr(self._names[storage]) if storage in self._names else "a tensor"
                error.add_note(
                    f"shardwise: this happened in {op.name}, by which the constructor gave {what} its values"
                )
                raise
            for touched in op.touches:
                if last[touched] == position and touched != storage:
                    values.pop(touched, None)
        sink(values.pop(storage) if storage in values else self._undefined(storage))

    def _run(self, op: Op, values: Values, wanted: Collection[int]) -> None:
        for storage in {*op.reads, *op.writes}:
            if storage not in values:
                values[storage] = self._undefined(storage)
        inputs = {values[storage].data_ptr() for storage in {*op.reads, *op.writes}}
        state = self._states.before(op)
        result, state = _call(op, lambda view: view.on(values[view.storage]), state)
        if op.before is not None and state is not None:
            self._states.reached(op, state)
        for view, tensor in zip(op.outputs, leaves_of(result), strict=True):
            # Others may have another shape than torch says on the meta device, as a batch norm's in evaluation.
            if view is not None and tensor is not None and view.storage in wanted:
                values[view.storage] = self._adopt(tensor, view, inputs)

    def _undefined(self, storage: int) -> torch.UntypedStorage:
        """Memory without values: zeros rather than what was there, so that all ranks have the same."""
        memory = self._record.memory[storage]
        return torch.zeros(memory.nbytes, dtype=torch.uint8, device=memory.device).untyped_storage()

    def _adopt(self, tensor: torch.Tensor, view: View, inputs: set[int]) -> torch.UntypedStorage:
        """The memory of ``tensor``, laid out as the constructor saw it."""
        storage, nbytes = tensor.untyped_storage(), self._record.memory[view.storage].nbytes
        same = tuple(tensor.stride()) == view.stride and tensor.storage_offset() == view.offset
        if same and storage.nbytes() >= nbytes and storage.data_ptr() not in inputs:
            return storage
        copy = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device).untyped_storage()
        view.on(copy).copy_(tensor)
        return copy

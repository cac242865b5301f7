"""What a constructor did to its tensors: operators on storages, in order.

Tensors are geometry on numbered storages, as in torch itself, so views, detached aliases, parameters made of tensors
and ``.data`` need no entries of their own: what is written through one of them is seen through all.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import heapq
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from ..core.device import local_of, negative_view, schema_of
from ..core.errors import StateError
from ..core.tree import all_in
from .streams import Position

COPIED_BELOW_BYTES = 2**20
"""Values that a constructor took from elsewhere are copied below this size, and held by reference above."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as geometry on a storage.

    Args:
        storage: its number.
        dtype: of the elements.
        size: shape of the tensor.
        stride: of each dim, in elements.
        offset: of the first element, in elements.
        is_conj: whether it is the complex conjugate of what is there.
        is_neg: whether it is the negative of what is there.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> View:
        """The geometry of ``tensor``, whose storage has that number."""
        offset = int(tensor.storage_offset())
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return cls(storage, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor itself, in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        there = empty.set_(storage, self.offset, self.size, self.stride)
        there = there.conj() if self.is_conj else there
        return negative_view(there) if self.is_neg else there

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()

    @property
    def extent(self) -> int:
        """Elements of the storage from its first element to its last, both included."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    def covers(self, nbytes: int) -> bool:
        """Whether this is every byte of a storage of ``nbytes`` bytes, each once."""
        return self.offset == 0 and self.extent == self.numel and self.numel * self.dtype.itemsize == nbytes


class Constant:
    """Values that a constructor took from elsewhere: a tensor that torch did not make inside the context.

    Args:
        tensor: with memory; it may only change as long as `detach` is called before.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._is_own = tensor.detach(), False
        self.checksum = _checksum(self._tensor)
        if tensor.numel() * tensor.itemsize < COPIED_BELOW_BYTES:
            self.detach()

    def detach(self) -> None:
        """Keep a copy of the values, so that the tensor may change."""
        if not self._is_own:
            self._tensor, self._is_own = self._tensor.clone(), True

    def is_intact(self) -> bool:
        """Whether the values are still there."""
        return self._is_own or _checksum(self._tensor) == self.checksum

    def value(self) -> torch.Tensor:
        """The values as they were.

        Raises:
            StateError: if they were changed meanwhile.
        """
        if not self.is_intact():
            raise StateError(
                f"a tensor of shape {tuple(self._tensor.shape)} that was copied into a parameter under init_on_meta "
                "was changed before materialize: pass a copy, or materialize before it changes"
            )
        return self._tensor


def _checksum(tensor: torch.Tensor) -> int:
    dense = tensor.detach().cpu().contiguous()
    nbytes = dense.numel() * dense.itemsize
    # By address: a storage that was given to numpy can never be emptied.
    return zlib.crc32((ctypes.c_ubyte * nbytes).from_address(dense.data_ptr())) if nbytes else 0


class Explicit:
    """Stands in an operator's arguments for the generator that the constructor passed."""


@dataclass(eq=False, slots=True)
class Op:
    """One operator as it was called.

    Args:
        function: the operator, or a function of `torch.nn.init` as a whole.
        args: its positional arguments, with `View`, `Constant` and `Explicit` in place of what they stand for.
        kwargs: its keyword arguments, likewise.
        outputs: for each value that it returns, its view if it is a tensor on a new storage, else None.
        reads: storages whose values it uses.
        writes: storages, made before, that it changes.
        overwrites: whether nothing is left of what was in the one storage that it writes.
        default_dtype: torch's default dtype at the call.
        before: the position that it draws from; None if it draws nothing.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: bool
    default_dtype: torch.dtype
    before: Position | None = None

    @property
    def creates(self) -> set[int]:
        """Storages that it makes."""
        return {view.storage for view in self.outputs if view is not None}

    @property
    def touches(self) -> set[int]:
        """Storages that must be there to run it, or that it makes."""
        return {*self.reads, *self.writes, *self.creates}

    @property
    def name(self) -> str:
        """Its name without namespace and overload."""
        name: str = getattr(self.function, "overloadpacket", self.function).__name__
        return name

    @property
    def is_given_generator(self) -> bool:
        """Whether the constructor passed a generator."""
        return bool(all_in((self.args, self.kwargs), Explicit))

    @property
    def argument_names(self) -> list[str]:
        """The names of the arguments in its schema."""
        schema = schema_of(self.function)
        return [argument.name for argument in schema.arguments] if schema is not None else []


@dataclass(frozen=True)
class Memory:
    """What a storage is when it has memory: bytes, and where."""

    nbytes: int
    device: torch.device


@dataclass(eq=False)
class Record:
    """Operators in the order of their calls, and the storages that they work on."""

    ops: list[Op] = field(default_factory=list)
    memory: dict[int, Memory] = field(default_factory=dict)
    generators: dict[Position, torch.Generator] = field(default_factory=dict)
    """Generators that the constructor passed to operators, by where it began to draw from them."""
    entry: list[Position] = field(default_factory=list)
    """Where default generators were when recording began, the host's first."""
    positions: list[Position] = field(default_factory=list)
    """All positions that the constructor may have saved and come back to."""
    exit: Position | None = None
    """Where the host's default generator was when recording ended."""
    values_were_used: bool = False
    """Whether the constructor looked at random values, so that what it did is right for one seed only."""
    is_of_constructor: bool = True
    serial: int = field(default_factory=itertools.count().__next__)
    """Counts the program's records in the order in which they began."""
    _writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def new_storage(self, nbytes: int, device: torch.device) -> int:
        """The number of one more storage."""
        number = len(self.memory)
        self.memory[number] = Memory(nbytes, device)
        return number

    def grow(self, storage: int, nbytes: int) -> None:
        """Note that ``storage`` has at least ``nbytes`` bytes."""
        memory = self.memory[storage]
        self.memory[storage] = Memory(max(nbytes, memory.nbytes), memory.device)

    def add(self, op: Op) -> None:
        """Append ``op``."""
        for storage in {*op.writes, *op.creates}:
            self._writers[storage].append(len(self.ops))
        self.ops.append(op)

    @property
    def draws(self) -> list[int]:
        """Indices of the operators that draw random numbers."""
        return [index for index, op in enumerate(self.ops) if op.before is not None]

    def slice(self, storage: int) -> list[int]:
        """Indices of the operators that the values of ``storage`` depend on, in order."""
        live, chosen = {storage}, []
        todo: list[int] = []
        seen: set[int] = set()

        def want(number: int, before: int) -> None:
            writers = self._writers.get(number, [])
            position = bisect.bisect_left(writers, before)
            if position and writers[position - 1] not in seen:
                seen.add(writers[position - 1])
                heapq.heappush(todo, -writers[position - 1])

        want(storage, len(self.ops))
        while todo:
            index = -heapq.heappop(todo)
            op = self.ops[index]
            # It is the last that wrote something live, which nothing after it has overwritten, or it would not be here.
            chosen.append(index)
            live -= op.creates
            for written in op.writes:
                if written in live and not op.overwrites:
                    want(written, index)
            if op.overwrites:
                live -= op.writes
            for read in op.reads:
                live.add(read)
                want(read, index)
        return chosen[::-1]

    def is_written(self, storage: int) -> bool:
        """Whether anything was ever put into ``storage``."""
        return storage in self._writers or not self.memory[storage].nbytes

    def check_constants(self) -> None:
        """
        Raises:
            StateError: if values that were taken from elsewhere have changed.
        """
        for op in self.ops:
            for constant in all_in((op.args, op.kwargs), Constant):
                constant.value()

    def keep(self, storages: Iterable[int]) -> None:
        """Forget what none of ``storages`` depends on, except for the draws, which move their generators."""
        needed = {index for storage in storages for index in self.slice(storage)}
        ops = [op for index, op in enumerate(self.ops) if index in needed or op.before is not None]
        self.ops, self._writers = [], defaultdict(list)
        for op in ops:
            self.add(op)

    def digest(self) -> bytes:
        """Equal on all ranks that recorded the same."""
        state = hashlib.blake2b(digest_size=8)
        for op in self.ops:
            function = op.name if isinstance(op.function, FunctionType) else str(op.function)
            described = (function, _plain(op.args), _plain(op.kwargs), op.outputs, op.default_dtype)
            state.update(repr(described).encode())
            start = op.before.start if op.before is not None else None
            if start is not None and not start.is_entry and start.state is not None:
                state.update(start.state.numpy().tobytes())
        return state.digest()


def _plain(value: Any) -> Any:
    """``value`` with what differs between ranks that record the same taken out."""
    value = replace_leaves(value, Constant, lambda constant: constant.checksum)
    value = replace_leaves(value, Explicit, lambda _: "generator")
    return replace_leaves(value, torch.device, lambda device: device.type)


def replace_leaves(value: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """``value`` (nested dicts, lists and tuples) with ``function`` of each ``kind`` in it."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: replace_leaves(item, kind, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(replace_leaves(item, kind, function) for item in value)
    return value


def leaves_of(value: Any) -> list[Any]:
    """What an operator returns, as a flat list."""
    return [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, (list, tuple)) else [value]


class Origin:
    """Where a parameter or buffer got its values: a view in a record.

    Args:
        record: of the constructor.
        view: of the tensor, as it was when the record ended.
        values: of a buffer, at that time; by them a later write is noticed.
    """

    def __init__(self, record: Record, view: View, values: Constant | None = None):
        self.record, self.view, self.values = record, view, values

    def has_values_of(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` (maybe a copy, or converted) still has the values that the constructor gave it."""
        local = local_of(buffer)
        if self.values is None or local.is_meta:
            return False
        return self.values.is_intact() and torch.equal(self.values.value().to(local), local)

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is pickled before it has values leaves its history behind.
        return (type(None), ())

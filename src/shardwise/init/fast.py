"""The fast way: each draw has a stream of random numbers of its own, so a rank makes only what it keeps.

Where all that is done to a tensor is done to each element alone (as almost every initializer does), it is made in
blocks of its elements, each from a stream of its own. The blocks do not depend on the number of ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..core.tree import all_in
from .record import Constant, Explicit, Op, Record, View, leaves_of, replace_leaves
from .replay import Replay, States, as_recorded, default_dtype
from .streams import default_generator, derived_seed, digest, seeded_state
from .targets import Target, write_each

BLOCK = 2**16
"""Elements; large enough that seeding a stream costs little compared with drawing from it."""

_OF_ELEMENTS = {
    *("fill_", "zero_", "copy_", "_to_copy", "clone"),
    *("normal_", "trunc_normal_", "uniform_", "exponential_", "bernoulli_", "cauchy_", "log_normal_"),
    *("zeros", "ones", "full", "randn", "rand", "new_zeros", "new_ones", "new_full"),
    *("zeros_like", "ones_like", "full_like", "randn_like", "rand_like"),
}
"""Operators that treat each element alone, in addition to those that torch tags as pointwise."""


class FastReplay:
    """Gives storages of a record values from streams of their own.

    Args:
        record: what to run.
        states: from which the streams are derived.
    """

    def __init__(self, record: Record, states: States):
        self._record, self._states = record, states

    def run(self, members: Sequence[tuple[Target, View]]) -> None:
        """Give each target what this rank keeps of it."""
        with as_recorded():
            whole: list[tuple[Target, View]] = []
            for target, view in members:
                indices = self._record.slice(view.storage)
                if self._is_of_elements(indices, view):
                    self._make_blocks([self._record.ops[index] for index in indices], target, view)
                else:
                    whole.append((target, view))
            named = {view.storage: target.name for target, view in whole}
            replay = Replay(self._record, _OwnStreams(self._states), named)
            for storage, sink in write_each(whole).items():
                replay.make(self._record.slice(storage), storage, sink)

    def _is_of_elements(self, indices: Sequence[int], target: View) -> bool:
        dense = torch.empty(target.size, device="meta").stride() == target.stride
        is_as_stored = dense and not (target.is_conj or target.is_neg)
        return is_as_stored and all(self._treats_elements(self._record.ops[index], target) for index in indices)

    def _treats_elements(self, op: Op, target: View) -> bool:
        views: list[View] = [view for view in op.outputs if view is not None]
        views += all_in((op.args, op.kwargs), View)
        memory = self._record.memory
        return (
            (op.name in _OF_ELEMENTS or torch.Tag.pointwise in op.function.tags)
            and not all_in((op.args, op.kwargs), Constant)
            and all(view.size == target.size and view.stride == target.stride for view in views)
            and all(view.covers(memory[view.storage].nbytes) for view in views)
        )

    def _make_blocks(self, ops: Sequence[Op], target: Target, view: View) -> None:
        device = target.device or self._record.memory[view.storage].device

        def blocks(start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
            return self._blocks(ops, view, device, start, stop)

        target.write_elements(blocks)

    def _blocks(
        self, ops: Sequence[Op], view: View, device: torch.device, start: int, stop: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(start // BLOCK * BLOCK, stop, BLOCK):
            size = min(BLOCK, view.numel - first)
            block = self._make_block(ops, view, first // BLOCK, size, device)
            low, high = max(first, start), min(first + size, stop)
            yield low - start, block[low - first : high - first]

    def _make_block(self, ops: Sequence[Op], target: View, block: int, size: int, device: torch.device) -> torch.Tensor:
        values: dict[int, torch.Tensor] = {}

        def tensor_of(view: View) -> torch.Tensor:
            if view.storage not in values:
                values[view.storage] = torch.zeros(size, dtype=view.dtype, device=device)
            return values[view.storage].view(view.dtype)  # the same bytes, as other numbers

        for op in ops:
            generator = default_generator(device)
            args, kwargs = _sized(op, size)
            if op.before is not None:
                if op.is_given_generator:
                    generator = torch.Generator(device)
                generator.manual_seed(_stream_seed(self._states, op, block))
            args, kwargs = replace_leaves((args, kwargs), View, tensor_of)
            args, kwargs = replace_leaves((args, kwargs), Explicit, functools.partial(_given, generator))
            args, kwargs = replace_leaves((args, kwargs), torch.device, lambda _: device)
            with default_dtype(op.default_dtype):
                result = op.function(*args, **kwargs)
            for view, tensor in zip(op.outputs, leaves_of(result), strict=True):
                if view is not None:
                    values[view.storage] = tensor
        return tensor_of(target)


class _OwnStreams(States):
    """A stream for each draw, whatever was drawn before."""

    def __init__(self, states: States):
        super().__init__()
        self._from = states

    def before(self, op: Op) -> torch.Tensor | None:
        if op.before is None:
            return None
        return seeded_state(op.before.device, _stream_seed(self._from, op, None))

    def reached(self, op: Op, state: torch.Tensor) -> None:
        pass


def _stream_seed(states: States, op: Op, block: int | None) -> int:
    """Differs between draws of one model, and between blocks; the same on every rank."""
    assert op.before is not None
    origin = states.origin_of(op.before)
    return derived_seed(digest(states.at(origin)), op.before.draws - origin.draws, block)


def _given(generator: torch.Generator, _: Explicit) -> torch.Generator:
    return generator


def _sized(op: Op, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator that makes ``size`` elements instead of a whole tensor."""
    names = op.argument_names
    given = itertools.zip_longest(names[: len(op.args)], op.args)
    args = tuple([size] if name == "size" else value for name, value in given)
    return args, {name: [size] if name == "size" else value for name, value in op.kwargs.items()}

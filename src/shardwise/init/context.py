"""`init_on_meta`: a constructor runs, and its parameters end up on the meta device with their history."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.device import not_inference
from ..sites import Site, become
from .access import MemoryAccess
from .record import Constant, Origin, View
from .recorder import Recorder
from .streams import Position, default_generators, leave_mark, marked_position, position_of

MARK = "shardwise_origin"
"""Attribute of a parameter with its `Origin`; under this name `fully_shard` hands it on to the sharded parameter."""

MARKS = "_shardwise_origins"
"""Attribute of a module with the origins of its parameters and random buffers, in case the tensors are replaced."""

_thread = threading.local()


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Build a model without memory for its parameters: ``with init_on_meta(): model = Model()``.

    Afterwards the model's parameters are on the meta device, and its buffers and all other tensors are real. Call
    `fully_shard` and then `materialize`, which gives the parameters the values that the constructor would have
    given them, or load a checkpoint.

    The constructor runs as always: it sees tensors on the devices that it asks for, may initialize them in any way,
    draw random numbers, read values. What it does to tensors is recorded, and done when values are needed. Nothing
    is drawn from random generators meanwhile; those that it would have drawn from are left in another state than
    before, and `materialize` puts them where the constructor would have left them.

    Only this thread is recorded. A context inside of another one is part of it.
    """
    if getattr(_thread, "recorder", None) is not None:
        yield
        return
    recorder = Recorder()
    try:
        with recording(recorder):
            yield
        seal(recorder)
    except BaseException:
        try:
            _release(recorder, modules_alive())
        finally:
            recorder.abandon()
        raise


@contextmanager
def recording(recorder: Recorder, entry: Position | None = None) -> Iterator[None]:
    """Let ``recorder`` write down what this thread does.

    Args:
        recorder: a new one.
        entry: where the host's generator is to stand at the beginning, if not where it is.
    """
    generators = [(generator, generator.get_state()) for generator in default_generators()]
    for generator, _ in generators:
        position = position_of(generator, is_entry=True)
        if entry is not None and generator is torch.default_generator:
            position = entry
        recorder.record.entry.append(position)
        recorder.marked_devices.add(generator.device)
        leave_mark(generator, position, str(generator.device))
    _thread.recorder = recorder
    is_complete = False
    try:
        with MemoryAccess(recorder), recorder:
            yield
        is_complete = True
        recorder.record.exit = position_of(torch.default_generator)
    finally:
        _thread.recorder = None
        for (generator, state), position in zip(generators, recorder.record.entry, strict=True):
            if not is_complete or marked_position(generator) is position:
                generator.set_state(state)


def modules_alive() -> list[nn.Module]:
    """Every module that exists: constructors copy modules and register parameters in ways that nothing announces."""
    # One call into C, during which no other thread runs: a tuple that one is making must not be referred to when that
    # goes on, or CPython raises SystemError there. Modules are callable, tuples are not.
    callables: list[Any] = list(filter(callable, chain.from_iterable(map(gc.get_objects, (None,)))))
    return [
        found
        for found in callables
        if issubclass(type(found), nn.Module) and isinstance(found.__dict__.get("_parameters"), dict)
    ]


def seal(recorder: Recorder) -> None:
    """End the recording of a constructor: registered parameters go to the meta device, all other hollow tensors get
    values."""
    modules = modules_alive()
    kept = _release(recorder, modules)
    left = recorder.hollow_numbers()
    buffers: list[tuple[nn.Module, str, torch.Tensor, View]] = []
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and recorder.number_of(buffer) in left:
                buffers.append((module, name, buffer, recorder.view_of(buffer)))
    random = finish(recorder, kept, {view.storage for *_, view in buffers})
    if not kept:
        recorder.settle()
    for module, name, buffer, view in buffers:
        if view.storage in random:
            _marks(module)[name] = Origin(recorder.record, view, Constant(buffer))


def finish(recorder: Recorder, kept: AbstractSet[int], replaceable: AbstractSet[int] = frozenset()) -> set[int]:
    """End any recording: give values to what is still hollow, and drop from the record what no replay needs.

    Args:
        recorder: whose recording is over.
        kept: storages that will be replayed.
        replaceable: storages that will be replayed if another seed is chosen.

    Returns:
        Those of ``replaceable`` that depend on random numbers.
    """
    record, left = recorder.record, recorder.hollow_numbers()
    draws = set(record.draws)
    random = {number for number in left if not draws.isdisjoint(record.slice(number))}
    if random - replaceable:
        # Random values outside of parameters and buffers, where another seed could not replace them.
        record.values_were_used = True
    recorder.fill(left)
    record.keep({*kept, *(random & replaceable)})
    return random & replaceable


def _release(recorder: Recorder, modules: list[nn.Module]) -> set[int]:
    """Put the recorded parameters of ``modules`` on the meta device; return the numbers of their storages."""
    sites: dict[int, list[Site]] = defaultdict(list)
    parameters: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter) and _is_recorded(recorder, parameter):
                sites[id(parameter)].append(Site(module, name))
                parameters[id(parameter)] = parameter
    constants: dict[int, int] = {}
    for parameter in sorted(parameters.values(), key=lambda parameter: recorder.birth_of(parameter) or 0):
        if (birth := recorder.birth_of(parameter)) is not None and birth not in constants:
            constants[birth] = recorder.constant(parameter)
    kept = set()
    for key, parameter in parameters.items():
        birth = recorder.birth_of(parameter)
        view = recorder.view_of(parameter) if birth is None else View.of(parameter, constants[birth])
        origin = Origin(recorder.record, view)
        kept.add(view.storage)
        _put_on_meta(parameter, origin, sites[key])
    return kept


def _is_recorded(recorder: Recorder, parameter: nn.Parameter) -> bool:
    return recorder.number_of(parameter) is not None or recorder.birth_of(parameter) is not None


def _put_on_meta(parameter: nn.Parameter, origin: Origin, sites: list[Site]) -> None:
    with not_inference():
        meta = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
        replacement = nn.Parameter(meta, parameter.requires_grad)
    become(parameter, replacement, sites).__dict__[MARK] = origin
    for site in sites:
        _marks(site.module)[site.name] = origin


def _marks(module: nn.Module) -> dict[str, Origin]:
    marks: dict[str, Origin] = module.__dict__.setdefault(MARKS, {})
    return marks

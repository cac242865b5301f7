"""The verb `materialize`: values for everything in a model that has none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..arguments import check_flag, is_whole_number
from ..checkpoint.interrupts import held
from ..checkpoint.peers import Peers
from ..core.errors import StateError
from ..core.shards import Shards
from .agreement import failing_together, require_same, share_states
from .fast import FastReplay
from .initializers import InitFn, record_initializers
from .record import Record, View
from .replay import Replay, States, as_recorded
from .streams import Position, default_generators, derived_seed, digest, leave_mark, marked_position, seeded_state
from .targets import (
    SlotTarget,
    Target,
    find_meshes,
    find_random_buffers,
    find_shards,
    find_targets,
    names_of_modules,
    write_each,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Work = dict[Record, list[tuple[Target, View]]]


@held()
def materialize(
    model: AnyModule, *, seed: int | None = None, init_fn: InitFn | None = None, fast: bool = False
) -> AnyModule:
    """Give every parameter and buffer of ``model`` that is on the meta device memory and values, in place.

    Of a model built under `init_on_meta` the values are, bit for bit, those of ``torch.manual_seed(seed); Model()``
    in one process, at any world size. A model that others put on the meta device, and tensors that the constructor
    left uninitialized, get theirs from ``init_fn``, or from the modules' own ``reset_parameters()`` (or
    ``_reset_parameters()``) and ``_init_weights(module)`` or ``_init_weights()``: inner modules before outer ones,
    drawing on the host, alike at any world size. What has values already (say, from a checkpoint) stays. Memory: the
    shards and one tensor with what its own initializer needs.

    A collective: all ranks of the model's meshes call it, and end with parts of one model.

    Args:
        model: sharded or not, or a part of a model.
        seed: by default the first rank's generators as they were when the context was entered (without recorded
            history: as they are now).
        init_fn: called with each module whose own parameters or buffers have no recorded history; writes them in
            place, whole. What it leaves is initialized by the module itself.
        fast: draw each tensor from a stream of random numbers of its own, of which each rank makes only its part.
            The values are then the same at any world size, but not those of the plain constructor.

    Without ``seed`` the program's generators end where the constructor would have left them, if nothing was drawn from
    them since; with a seed, or ``fast``, they end where they were before the constructor.

    Returns:
        ``model``.

    Raises:
        TypeError: for an argument of a wrong type.
        ValueError: for a seed of more than 64 bits, or naming a tensor on the meta device of a lazy module that has
            not run.
        StateError: naming what nothing initializes, or why the recorded history does not hold; nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"materialize takes a module, not {type(model).__name__}")
    shards = find_shards(model)
    names = names_of_modules(model, shards)
    # Also where this rank lacks nothing: others might, which all have to know.
    peers = [Peers(mesh) for mesh in find_meshes(names, shards)]
    with _Generators() as generators:
        with failing_together(peers):
            _check_arguments(seed, init_fn, fast)
            seed = None if seed is None else int(seed)  # NumPy's would be compared with other ranks' by its name
            targets = find_targets(names, shards)
            work = _work(names, targets, init_fn, seed)
            generators.find_followers(list(work), seed)
        states = _states(work, peers, seed, fast)
        if not targets:
            return model
        _give_values(work, states, names, fast, shards, peers)
        for owner in shards:
            owner.mark_stale()
        for target in targets:
            target.forget_history()
        generators.settle(states, is_continued=seed is None and not fast)
    return model


def _check_arguments(seed: int | None, init_fn: object, fast: object) -> None:
    check_flag("materialize", "fast", fast)
    if seed is not None and not is_whole_number(seed):
        raise TypeError(f"seed must be an int or None, not {seed!r}")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed}: torch's generators take seeds of 64 bits")
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init_fn must be a function of a module, not {type(init_fn).__name__}")


def _work(names: Mapping[nn.Module, str], targets: Sequence[Target], init_fn: InitFn | None, seed: int | None) -> Work:
    """Each record that has to be replayed, in the order of their contexts, and what it gives values to."""
    by_record: Work = defaultdict(list)
    without: list[Target] = []
    for target in targets:
        if (origin := target.origin()) is None:
            without.append(target)
        else:
            by_record[origin.record].append((target, origin.view))
    work = dict(sorted(by_record.items(), key=lambda item: item[0].serial))
    if without:
        # As if the initializers ran right after the last constructor, or after seeding.
        entry = list(work)[-1].exit if work else None
        if entry is None and seed is not None:
            host = torch.device("cpu")
            entry = Position(host, state=seeded_state(host, seed), is_entry=True)
        record, views = record_initializers(names, without, init_fn, entry)
        work[record] = list(zip(without, views, strict=True))
    for record in work:
        record.check_constants()
    return work


def _states(work: Work, peers: Sequence[Peers], seed: int | None, fast: bool) -> States:
    """The states of the program's generators from which the constructors are replayed, the same on all ranks."""
    records = list(work)
    lacking = [
        (target.name, target.mesh, (number, view))
        for number, members in enumerate(work.values())
        for target, view in members
    ]
    origins = _origins(records)
    drawn = [(record, origins[position]) for record in records for position in record.positions]
    own = [origin for origin in dict.fromkeys(origin for _, origin in drawn) if origin.is_of_program]
    seeded = _seeded(own, seed) if seed is not None else {}
    used = dict.fromkeys(origin for record, origin in drawn if record.values_were_used and origin.is_of_program)
    with as_recorded():
        recorded = {origin: States().at(origin) for origin in own if seed is None or origin.state is not None}
    known = [digest(recorded[origin]) for origin in used if origin in recorded]
    streams = _places(records, origins, own), [digest(state) for state in seeded.values()]
    require_same(peers, lacking, records, (seed, fast, known, *streams))
    starts = share_states(peers, recorded) if seed is None else seeded
    replaced = {o for o in own if o not in recorded or not torch.equal(starts[o], recorded[o])}
    if not fast and not replaced.isdisjoint(used):
        raise StateError(
            f"materialize(seed={seed}): the constructor used values of random tensors (by item(), masks or numpy, "
            "or kept them outside of parameters and buffers), so what it did is right only for the seed that it "
            "ran with: call torch.manual_seed(seed) before init_on_meta, and materialize without seed"
        )
    return States(starts, origins, replaced)


def _origins(records: Iterable[Record]) -> dict[Position, Position]:
    """The origin of each position of ``records``: where the program's generator was before the first record that draws
    from its stream, or the start of a stream that a constructor seeded."""
    origins: dict[Position, Position] = {}
    for record in records:
        for position in record.entry:
            origins[position] = position.followed(origins) or position
        for position in record.positions:
            origins[position] = position.followed(origins) or position.start
    return origins


def _places(
    records: Iterable[Record], origins: Mapping[Position, Position], own: Sequence[Position]
) -> list[tuple[int | None, int]]:
    """For each draw the number of its origin among the program's ``own``, and how many draws came in between. Ranks
    differ in it if one of them seeded, drew or recorded something else between two contexts."""
    numbers = {origin: number for number, origin in enumerate(own)}
    positions = [op.before for record in records for op in record.ops if op.before is not None]
    return [(numbers.get(origins[one]), one.draws - origins[one].draws) for one in positions]


def _seeded(origins: Iterable[Position], seed: int) -> dict[Position, torch.Tensor]:
    """The states that ``torch.manual_seed(seed)`` gives. If the program changed a generator between constructors, these
    get different states."""
    found: dict[tuple[torch.device, bytes, int], int] = {}
    starts: dict[Position, torch.Tensor] = {}
    for origin in origins:
        assert origin.start.state is not None
        key = origin.device, digest(origin.start.state), origin.draws
        number = found.setdefault(key, sum(device == origin.device for device, *_ in found))
        starts[origin] = seeded_state(origin.device, seed if not number else derived_seed(seed, number))
    return starts


def _give_values(
    work: Work,
    states: States,
    names: Mapping[nn.Module, str],
    fast: bool,
    shards: Sequence[Shards],
    peers: Sequence[Peers],
) -> None:
    """Give the targets memory and values; if that fails on any rank, the sharded ones have none on all."""
    try:
        with failing_together(peers):
            for owner in shards:
                owner.leave_meta()
            _replay(work, states, names, fast)
    except BaseException as error:
        if peers:
            error.add_note("shardwise: sharded parameters that had no values still have none: call materialize again")
        for target, _ in (member for members in work.values() for member in members):
            if isinstance(target, SlotTarget):
                target.slot.has_values = False
        raise


def _replay(work: Work, states: States, names: Mapping[nn.Module, str], fast: bool) -> None:
    """Give the targets their values, with the generators at ``states``."""
    for record, members in work.items():
        buffers = find_random_buffers(names, record) if fast or states.are_replaced else []
        if fast:
            FastReplay(record, states).run([*members, *buffers])
        else:
            named = {view.storage: target.name for target, view in members}
            Replay(record, states, named).run(write_each([*members, *buffers]))


class _Generators:
    """The program's generators. Those that still stand where a recorded constructor left them, the followers, are moved
    to where it would really have left them. The others are not touched."""

    def __init__(self) -> None:
        self._saved = [(generator, generator.get_state()) for generator in default_generators()]
        self._before = [marked_position(generator) for generator, _ in self._saved]
        self._followers: list[torch.Generator] = []

    def __enter__(self) -> _Generators:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Restore all but the followers; after an error, all."""
        for generator, state in self._saved:
            if error is not None or generator not in self._followers:
                generator.set_state(state)

    def find_followers(self, records: Sequence[Record], seed: int | None) -> None:
        """Find the generators that ``records`` drew from, and nothing else since."""
        starts = {position.start for record in records for position in record.entry}
        known = {position for record in records for position in record.positions}
        continues = seed is None and not any(record.is_of_constructor for record in records)
        for (generator, _), position in zip(self._saved, self._before, strict=True):
            if continues or (position is not None and (position.start in starts or position in known)):
                self._followers.append(generator)
        self._followers += [generator for record in records for generator in record.generators.values()]

    def settle(self, states: States, *, is_continued: bool) -> None:
        """Move the followers on, or back to where they were before the constructors."""
        ends: list[tuple[torch.Generator, Position, torch.Tensor | None]] = []
        with as_recorded():
            positions = [(generator, marked_position(generator)) for generator in self._followers]
            for generator, position in positions:
                if position is not None:
                    origin = states.origin_of(position)
                    is_back = origin.is_of_program and not (is_continued and not states.is_replaced(origin))
                    # To find a state may take draws from a generator that was found before.
                    ends.append((generator, origin, origin.state if is_back else states.at(position)))
        for generator, origin, state in ends:
            if state is None:  # the end of an earlier constructor
                leave_mark(generator, origin)
            else:
                generator.set_state(state)

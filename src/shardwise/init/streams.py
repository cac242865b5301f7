"""Streams of random numbers from which nothing is drawn yet.

A draw that is only recorded leaves a mark in its generator: a state by which whatever comes next (another draw,
another context, `torch.set_rng_state` of a state that was saved in between) is known to follow that draw. So a
constructor may seed, save and restore generators as it likes.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .record import Op


class Position:
    """A point in a stream: its start, or after numbers were drawn.

    Args:
        state: of the generator at the start, and where numbers were drawn for real; None after a draw that is recorded.
        device: of the generator.
        is_entry: whether this start is the state that the program had when recording began, which another seed
            replaces; the constructor's own ``torch.manual_seed`` makes a start that stays.
        previous: the position from which numbers were drawn last.
        draw: the operator that drew them, if it is recorded.
    """

    __slots__ = ("__weakref__", "_start", "device", "draw", "draws", "is_entry", "previous", "state")

    def __init__(
        self,
        device: torch.device,
        *,
        state: torch.Tensor | None = None,
        is_entry: bool = False,
        previous: Position | None = None,
        draw: Op | None = None,
    ):
        self.device, self.state, self.is_entry, self.previous, self.draw = device, state, is_entry, previous, draw
        self._start = previous.start if previous is not None else None
        self.draws: int = previous.draws + 1 if previous is not None else 0

    @property
    def start(self) -> Position:
        """Where this position's stream starts."""
        return self._start or self

    @property
    def is_of_program(self) -> bool:
        """As an origin (see `States`): whether another seed replaces it; if not, the constructor itself seeded it."""
        return self.is_entry or self.previous is not None

    def followed(self, origins: Mapping[Position, Position]) -> Position | None:
        """What ``origins`` has for this position, or for the last one before it that is in there; None if none is."""
        position: Position | None = self
        while position is not None and position not in origins:
            position = position.previous
        return origins[position] if position is not None else None


_marked: weakref.WeakValueDictionary[bytes, Position] = weakref.WeakValueDictionary()
"""From the digest of a mark's state to the position that it stands for."""

_newest: dict[torch.device, Position] = {}
"""Keeps alive the position at which a default generator was left, even when the model that drew last is gone."""


def digest(state: torch.Tensor) -> bytes:
    """A hash of a generator's state (1-D, bytes), or of any tensor on the host."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of ``device`` that operators without one draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator


def default_generators() -> list[torch.Generator]:
    """The default generators of the host and of the accelerators in use."""
    used = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *used]


def position_of(generator: torch.Generator, *, is_entry: bool = False) -> Position:
    """Where ``generator`` is: at a mark, or at the start of a stream of its own."""
    state = generator.get_state()
    return _marked.get(digest(state)) or Position(generator.device, state=state, is_entry=is_entry)


def marked_position(generator: torch.Generator) -> Position | None:
    """The position whose mark ``generator`` is at, if it is at one."""
    return _marked.get(digest(generator.get_state()))


def leave_mark(generator: torch.Generator, position: Position, *parts: object) -> None:
    """Put ``generator`` into a state of its own that stands for ``position``, without drawing anything.

    Args:
        generator: any.
        position: where it is from now on.
        parts: what tells the mark from those of other generators that were in the same state (seeded alike, or copied).
    """
    # The same on every rank and in every run where the states before are the same.
    before = generator.get_state()
    mark = seeded_state(generator.device, derived_seed(digest(before), *parts))
    if generator.device.type == "cpu":
        mark[:8] = before[:8]  # what `torch.initial_seed` tells
    generator.set_state(mark)
    _marked[digest(generator.get_state())] = position
    if generator is torch.default_generator or generator.device.type != "cpu":
        _newest[generator.device] = position


def seeded_state(device: torch.device, seed: int) -> torch.Tensor:
    """The state that ``torch.manual_seed(seed)`` gives the generators of ``device``."""
    return torch.Generator(device).manual_seed(seed).get_state()


def derived_seed(*parts: object) -> int:
    """A seed that depends on all of ``parts``."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the default generators at the end."""
    states = [(generator, generator.get_state()) for generator in default_generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)

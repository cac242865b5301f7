"""States of the random number generators of one process."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class _Generator(NamedTuple):
    """How to read a generator's state, to set it, and to seed it."""

    state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[int], object]


def _generators() -> dict[str, _Generator]:
    """The generators of this process, by name: torch's on the CPU and on the current accelerator device, Python's, and
    numpy's if numpy is imported."""
    found = {
        "torch": _Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        "python": _Generator(random.getstate, random.setstate, random.seed),
    }
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module = torch.get_device_module(accelerator)
        found["accelerator"] = _Generator(module.get_rng_state, module.set_rng_state, module.manual_seed)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found["numpy"] = _Generator(lambda: _plain(*numpy.get_state()), numpy.set_state, numpy.seed)
    return found


def _plain(kind: str, keys: Any, *rest: Any) -> tuple[Any, ...]:
    """A state of numpy's, without an array."""
    return kind, keys.tolist(), *rest


def random_states() -> dict[str, Any]:
    """The state of each generator, by name."""
    return {name: generator.state() for name, generator in _generators().items()}


def set_random_state(name: str, state: Any) -> None:
    """Continue with a state that `random_states` gave; nothing if this process has no such generator."""
    if (generator := _generators().get(name)) is not None:
        generator.set_state(state)


def seed_from(name: str, state: Any, rank: int) -> None:
    """Seed the generator of a rank that the saved run did not have, from its number and the saved state of another."""
    data = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    if (generator := _generators().get(name)) is not None:
        generator.seed((zlib.crc32(data) + rank) % 2**32)

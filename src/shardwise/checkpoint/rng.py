"""States of the random number generators of one process."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """The state of each generator, by name: torch's on the CPU and on the current accelerator device, Python's, and
    numpy's if numpy is imported."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (module := _accelerator()) is not None:
        states["accelerator"] = module.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def set_random_state(name: str, state: Any) -> None:
    """Continue with a state that `random_states` gave; nothing if this process has no such generator."""
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        random.setstate(state)
    elif name == "accelerator" and (module := _accelerator()) is not None:
        module.set_rng_state(state)
    elif name == "numpy" and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state)


def seed_from(name: str, state: Any, rank: int) -> None:
    """Seed the generator of a rank that the saved run did not have, from its number and the saved state of another."""
    data = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    seed = (zlib.crc32(data) + rank) % 2**32
    if name == "torch":
        torch.default_generator.manual_seed(seed)
    elif name == "python":
        random.seed(seed)
    elif name == "accelerator" and (module := _accelerator()) is not None:
        module.manual_seed(seed)
    elif name == "numpy" and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _accelerator() -> Any:
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return torch.get_device_module(accelerator) if accelerator is not None else None

"""Interleaved runs and their medians."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)


def interleave(actions: Mapping[Name, Callable[[], T]], warm_up: int, rounds: int) -> dict[Name, list[T]]:
    """Run every action once per round, in another order each round, the same on all ranks; gives the results after
    ``warm_up``.

    What disturbs the machine for a while then disturbs all of them, and none has the same predecessor each time.
    """
    names = list(actions)
    results: dict[Name, list[T]] = {name: [] for name in names}
    for round_ in range(warm_up + rounds):
        for name in random.Random(round_).sample(names, len(names)):
            result = actions[name]()
            if round_ >= warm_up:
                results[name].append(result)
    return results


def median(values: Sequence[float]) -> float:
    """The middle value, in the unit of ``values``."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, in the unit of ``values``."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2

"""The table of strategies."""

from __future__ import annotations

import pytest

from shardwise import Placements
from shardwise.placements import PRESETS


def test_table() -> None:
    table = {name: (p.parameter, p.gradient, p.optimizer) for name, p in PRESETS.items()}
    assert table == {
        "ddp": ("replicate", "replicate", "replicate"),
        "zero1": ("replicate", "partial", "shard"),
        "zero2": ("replicate", "shard", "shard"),
        "zero3": ("shard", "shard", "shard"),
        "hsdp": ("shard", "shard", "shard"),
    }
    assert all(getattr(Placements, name) is preset for name, preset in PRESETS.items())
    assert Placements() == Placements.zero3
    assert Placements.hsdp.mesh_ndim == 2


def test_values_compare_and_hash() -> None:
    assert Placements("replicate", "shard", "shard") == Placements.zero2
    assert len({Placements.zero2, Placements("replicate", "shard", "shard")}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameter": "partial"}, "parameter must be one of replicate, shard"),
        ({"gradient": "shared"}, "gradient must be one of replicate, partial, shard"),
        ({"gradient": "replicate"}, "set gradient and optimizer both to 'replicate'"),
        ({"optimizer": "replicate", "gradient": "replicate"}, "sharded parameters need optimizer='shard'"),
        ({"mesh_ndim": 3}, "must be None, 1 or 2"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placements(**arguments)  # type: ignore[arg-type]

"""What the ranks of all tests run on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .harness import on_ranks


@on_ranks(2)
def test_gloo_groups_have_one_thread() -> None:
    """Two free one string at once: see `harness._use_one_gloo_thread`."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    for group in (dist.group.WORLD, mesh.get_group("a"), mesh.get_group("b"), dist.new_group([0, 1])):
        backend: Any = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._threads == 1

"""Loads whole values into models, sharded or not, with memory or on the meta device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..adapters.wrapping import LOADED
from ..checkpoint.full_state import refuse_untied, sort_state
from ..checkpoint.matching import IncompatibleKeys, Match, match
from ..checkpoint.tensor_files import read_stored
from ..checkpoint.weights import weights_of
from ..core.device import not_inference
from ..sites import become


@torch.no_grad()
def load_values(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> IncompatibleKeys:
    """Load a state dict with whole plain tensors that every rank has, without communication, into a model that may
    not be sharded yet.

    Of tensors that are mapped from a file a rank reads its part. Where a model that is not sharded yet is on the meta
    device, its parameters become the mapped tensors themselves, so that sharding it reads this rank's part.

    Args:
        model: sharded or not; parameters on the meta device stay the same objects.
        state: by the names of ``model.state_dict()``.
        strict: whether missing and unexpected names are errors.

    Returns:
        The missing and the unexpected names.

    Raises:
        ValueError: (also a RuntimeError) listing all that does not fit; nothing is changed then.
    """
    loading = weights_of(model).with_extra_as_objects()
    tensors, objects, problems = sort_state(loading, state)
    matches, incompatible = match(loading, tensors, "the state dict", strict=strict, objects=objects, problems=problems)
    refuse_untied(matches, tensors)
    with not_inference():
        for found in matches:
            value = tensors[found.stored[0]]
            if not _became(found, value):
                found.weight.prepare_memory(loading.device)
                found.weight.write_rows(value, 0)
                found.weight.accept_values()
    loading.set_extra_state(objects, strict=strict)
    return incompatible


def mapped_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, an index or a directory, on the host, and read from the disk only when used.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: for files that are damaged, or of a dtype that torch does not have.
    """
    files: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in read_stored(path).items():
        if stored.dtype is None:
            raise ValueError(f"{stored.file}: {name!r} is {stored.label}, a dtype that torch does not have")
        if stored.file not in files:
            size = Path(stored.file).stat().st_size
            # Not shared: writes to the tensors do not reach the file.
            files[stored.file] = torch.from_file(stored.file, shared=False, size=size, dtype=torch.uint8)
        length = math.prod(stored.shape) * stored.dtype.itemsize
        part = files[stored.file][stored.start : stored.start + length]
        aligned = part if not stored.start % stored.dtype.itemsize else part.clone()
        tensors[name] = aligned.view(stored.dtype).view(stored.shape)
    return tensors


def _became(found: Match, value: torch.Tensor) -> bool:
    """Replace a parameter on the meta device by ``value`` itself, if possible; return whether it was."""
    parameter = found.weight.tensor
    if found.weight.slot is not None or not isinstance(parameter, nn.Parameter) or isinstance(parameter, DTensor):
        return False
    if not parameter.is_meta or value.dtype != parameter.dtype or not value.is_contiguous():
        return False
    registered = become(parameter, nn.Parameter(value.detach(), parameter.requires_grad), found.weight.sites)
    registered.__dict__[LOADED] = True
    return True

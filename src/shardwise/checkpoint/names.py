"""Names of a model's tensors in checkpoints: as the model was written, without wrappers around its modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names under which compiled and activation-checkpointed modules keep the original one."""

SHOWN = 10
"""Names that a message lists at most."""


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    ordered = list(names)
    return ", ".join(map(repr, ordered[:SHOWN])) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")


def plain_name(model: nn.Module, name: str) -> str:
    """``name`` (of a parameter, buffer or extra state of ``model``) as torch's checkpoint functions write it."""
    module: Any = model
    parts = []
    for part in name.split("."):
        if part not in _WRAPPERS and not (part == "module" and isinstance(module, DistributedDataParallel)):
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Plain names of the registered parameters; a tied one has several, the first of which counts."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(plain_name(model, name))
    return names

"""Names of a model's tensors in checkpoints: as the model was written, without wrappers around its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names under which compiled and activation-checkpointed modules keep the original one."""


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

"""The table of the wrapper's arguments, and what their values mean."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from mmengine.device import get_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from ..arguments import Argument, Support, refuse_outside
from ..fairscale.batch_norm import BATCH_NORMS
from ..placements import PRESETS, Placements
from .policies import imported, registered_function
from .processes import init_process_group

ACCEPTED, REFUSED = Support.ACCEPTED, Support.REFUSED

WRAPPER_ARGUMENTS = {
    "module": Argument("the model, changed in place: its registered parameters become DTensors"),
    "process_group": Argument(
        "the ranks to shard over; None for all; for HYBRID_SHARD two groups, to shard over and to replicate over"
    ),
    "cpu_offload": Argument(
        "True, CPUOffload(offload_params=True) or a CPUOffloadPolicy keeps shards, gradients and optimizer state on "
        "the host"
    ),
    "fsdp_auto_wrap_policy": Argument("auto_wrap_policy, as MMEngine before 0.8 called it"),
    "auto_wrap_policy": Argument(
        "chooses the units beside the model itself: a name in FSDP_WRAP_POLICIES, dict(type=name, options), or a "
        "function (module, recurse, unwrapped_params); None for the model as one unit"
    ),
    "backward_prefetch": Argument(
        '"pre" or "BACKWARD_PRE" (as None) gathers the next unit while one computes its gradients; "post" or '
        '"BACKWARD_POST" gathers each unit when its backward begins, which needs the least memory'
    ),
    "sharding_strategy": Argument(
        "a ShardingStrategy or its name: FULL_SHARD (as None), SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, "
        "_HYBRID_SHARD_ZERO2; or a Placements or the name of a preset: ddp, zero1, zero2, zero3, hsdp"
    ),
    "mixed_precision": Argument(
        "a MixedPrecisionPolicy for each unit, a MixedPrecision, or a dict of what either takes: dtypes by name or as "
        "torch.dtype, output_dtype that of the model"
    ),
    "param_init_fn": Argument(
        "gives values to modules on the meta device: a function of a module, its name in FUNCTIONS, or dict(type=...)"
    ),
    "use_orig_params": Argument("parameters stay registered one by one, whatever this says", ACCEPTED),
    "ignored_modules": Argument("modules, or their names, whose parameters stay whole, with gradients of each rank"),
    "ignored_parameters": Argument("the same for parameters"),
    "ignored_states": Argument("torch's newer name for both, instead of them"),
    "device_mesh": Argument("ranks to shard over, or (replicate, shard) for HYBRID_SHARD, instead of process_group"),
    "sync_module_states": Argument("all ranks begin with the values of the first, whatever this says", ACCEPTED),
    "forward_prefetch": Argument("the next unit is always gathered while one computes", ACCEPTED),
    "limit_all_gathers": Argument("no more is gathered ahead than the bytes of the largest unit", ACCEPTED),
    "device_id": Argument("the device is that of MMEngine, get_device(), in every case", ACCEPTED),
    "device_ids": Argument(
        "MMEngine's DDPStrategy passes it, which saves on one rank only: use strategy=dict(type='ShardwiseStrategy')",
        REFUSED,
    ),
}


def wrong_type(name: str, given: Any, takes: str) -> TypeError:
    """An error for an argument of a wrong type."""
    return TypeError(f"{name} should be {takes}, but has type {type(given).__name__}: {given!r}")


def check_device(device: Any) -> None:
    """Check ``device_id``, which has no effect.

    Raises:
        TypeError: for a wrong type.
        ValueError: for what names no device.
    """
    if isinstance(device, bool) or not (device is None or isinstance(device, (int, str, torch.device))):
        raise wrong_type("device_id", device, "None, an int, a str or a torch.device")
    try:
        # An index alone would mean the accelerator, which there may be none of.
        torch.device(f"cuda:{device}" if isinstance(device, int) else "cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device_id={device!r} is no device of torch; the names are such as 'cuda:0'") from error


# -- Where parameters are


@dataclass(frozen=True)
class Strategy:
    """What a sharding strategy means.

    Args:
        placements: of the three kinds of state.
        reshard_after_forward: whether units but the root free their parameters between forward and backward.
        replicates: whether it needs a second mesh axis.
    """

    placements: Placements = Placements.zero3
    reshard_after_forward: bool = True
    replicates: bool = False


STRATEGIES = {
    "FULL_SHARD": Strategy(),
    "SHARD_GRAD_OP": Strategy(reshard_after_forward=False),
    "NO_SHARD": Strategy(Placements.ddp),
    "HYBRID_SHARD": Strategy(replicates=True),
    "_HYBRID_SHARD_ZERO2": Strategy(reshard_after_forward=False, replicates=True),
}


def find_strategy(given: Any) -> Strategy:
    """
    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else that is not a strategy.
    """
    if given is None:
        return Strategy()
    if isinstance(given, ShardingStrategy):
        return STRATEGIES[given.name]
    if isinstance(given, Placements):
        return Strategy(given, replicates=given.mesh_ndim == 2)
    if not isinstance(given, str):
        raise wrong_type("sharding_strategy", given, "None, a str, a ShardingStrategy or a Placements")
    if given in STRATEGIES:
        return STRATEGIES[given]
    if given not in PRESETS:
        raise ValueError(f"sharding_strategy={given!r} is unknown: it takes {', '.join([*STRATEGIES, *PRESETS])}")
    return find_strategy(PRESETS[given])


def find_mesh(strategy: Strategy, process_group: Any, device_mesh: Any) -> DeviceMesh:
    """The ranks to shard over; joins the process group of the launcher if the program has not.

    Raises:
        TypeError: for arguments of a wrong type.
        ValueError: if both are given, ranks do not divide into nodes, or this process is not in a group.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh both say which ranks to shard over: pass one of them")
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise wrong_type("device_mesh", device_mesh, "None or a DeviceMesh")
        return device_mesh
    if process_group is not None:
        return _mesh_of(process_group, strategy)
    init_process_group()
    device = torch.device(get_device()).type
    world = dist.get_world_size()
    if not strategy.replicates:
        return init_device_mesh(device, (world,))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", torch.accelerator.device_count() or world))
    if world % per_node:
        raise ValueError(f"{world} ranks do not divide into nodes of {per_node}: pass device_mesh")
    return init_device_mesh(device, (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))


def _mesh_of(process_group: Any, strategy: Strategy) -> DeviceMesh:
    """The mesh of one process group, or of two: to shard over, and to replicate over."""
    groups = tuple(process_group) if isinstance(process_group, (tuple, list)) else (process_group,)
    for group in groups:
        refuse_outside("process_group", group)
    if len(groups) not in (1, 2) or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        takes = "None, a ProcessGroup, or for HYBRID_SHARD two of them, to shard over and to replicate over"
        raise wrong_type("process_group", process_group, takes)
    if (len(groups) == 2) is not strategy.replicates:
        has, needs = ("two axes", "one") if len(groups) == 2 else ("one axis", "two")
        raise ValueError(f"process_group is {has} of ranks, and the sharding_strategy needs {needs}")
    device = torch.device(get_device()).type
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device)
    shard, replicate = groups
    rows: list[list[int]] = [[] for _ in range(replicate.size())]
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    if [row[shard.rank()] for row in rows if len(row) == shard.size()] != dist.get_process_group_ranks(replicate):
        raise ValueError(f"process_group is two groups that form no mesh: the ranks {rows} do not line up in columns")
    return DeviceMesh.from_group([replicate, shard], device, rows, mesh_dim_names=("replicate", "shard"))


def find_offload(given: Any) -> OffloadPolicy:
    """
    Raises:
        TypeError: for an argument of a wrong type.
    """
    if isinstance(given, OffloadPolicy):
        return given
    if given is not None and not isinstance(given, (bool, CPUOffload)):
        raise wrong_type("cpu_offload", given, "None, a bool, a CPUOffload or a CPUOffloadPolicy")
    offloads = given.offload_params if isinstance(given, CPUOffload) else given
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offloads else OffloadPolicy()


PREFETCHES = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    **BackwardPrefetch.__members__,
}


def find_prefetch(given: Any) -> BackwardPrefetch:
    """
    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else.
    """
    if given is None or isinstance(given, BackwardPrefetch):
        return given or BackwardPrefetch.BACKWARD_PRE
    if not isinstance(given, str):
        raise wrong_type("backward_prefetch", given, "None, a str or a BackwardPrefetch")
    if given not in PREFETCHES:
        raise ValueError(f"backward_prefetch={given!r} is unknown: it takes {', '.join(map(repr, PREFETCHES))}")
    return PREFETCHES[given]


# -- Dtypes


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model.

    Args:
        policy: of the units but the root.
        root: of the root.
        buffers: of floating-point buffers; None as they are.
        exempt: classes of modules that compute in their own dtype: batch normalization's statistics need it.
    """

    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009  (frozen)
    root: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009
    buffers: torch.dtype | None = None
    exempt: tuple[type[nn.Module], ...] = BATCH_NORMS

    def exempts(self, module: nn.Module) -> bool:
        """Whether ``module`` has parameters and computes in their dtype."""
        return isinstance(module, self.exempt) and next(module.parameters(), None) is not None


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
_EXEMPT = "_module_classes_to_ignore"
_FLAGS = ("cast_forward_inputs", "cast_root_forward_inputs", "keep_low_precision_grads")


def find_precision(given: Any) -> Precision:
    """
    Raises:
        ValueError: for an unknown key or dtype, or ``keep_low_precision_grads``.
        TypeError: for anything else than dtypes.
    """
    if given is None:
        return Precision()
    if isinstance(given, MixedPrecisionPolicy):
        return Precision(given, given)
    if isinstance(given, MixedPrecision):
        given = {key: getattr(given, key) for key in (*_DTYPES, _EXEMPT, *_FLAGS) if hasattr(given, key)}
        # Where it is False by default: what comes from a unit has the dtype that the next one computes in.
        given.pop("cast_forward_inputs")
    if not isinstance(given, Mapping):
        raise wrong_type("mixed_precision", given, "None, a dict, a MixedPrecisionPolicy or a MixedPrecision")
    if unknown := given.keys() - {*_DTYPES, *_FLAGS, _EXEMPT}:
        keys = ", ".join((*_DTYPES, *_FLAGS, _EXEMPT))
        raise ValueError(f"mixed_precision has {', '.join(sorted(map(repr, unknown)))}; it takes {keys}")
    dtypes = {key: _dtype(f"mixed_precision[{key!r}]", given.get(key)) for key in _DTYPES}
    flags = {key: _flag(f"mixed_precision[{key!r}]", given[key]) for key in _FLAGS if key in given}
    if flags.get("keep_low_precision_grads"):
        raise ValueError(
            "mixed_precision['keep_low_precision_grads']=True is not supported: gradients have the dtype of their "
            "shards; convert the model before it is wrapped"
        )
    buffers, outputs = dtypes.pop("buffer_dtype"), dtypes.pop("output_dtype")
    # As in FSDP1; what FSDP2 takes for None depends on the version of torch.
    dtypes["reduce_dtype"] = dtypes["reduce_dtype"] or dtypes["param_dtype"]
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=flags.get("cast_forward_inputs", True))
    casts = flags.get("cast_root_forward_inputs", policy.cast_forward_inputs)
    root = replace(policy, cast_forward_inputs=casts, output_dtype=outputs)
    return Precision(policy, root, buffers, _exempt(given.get(_EXEMPT, BATCH_NORMS)))


def _dtype(name: str, given: Any) -> torch.dtype | None:
    if given is None:
        return None
    if isinstance(given, torch.dtype):
        return _floating(name, given)
    if not isinstance(given, str):
        raise wrong_type(name, given, "None, a str or a torch.dtype")
    found = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}={given!r} is no dtype of torch; it takes names such as 'float16' and 'bfloat16'")
    return _floating(name, found)


def _floating(name: str, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"{name}={dtype} is no dtype of floating-point numbers, which parameters and gradients are")
    return dtype


def _exempt(given: Any) -> tuple[type[nn.Module], ...]:
    classes = tuple(imported(given if isinstance(given, Iterable) else (given,)))
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise wrong_type(f"mixed_precision[{_EXEMPT!r}]", given, "classes of modules")
    return classes


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise wrong_type(name, given, "a bool")
    return given


# -- Functions and modules


def find_function(name: str, given: Any) -> Any:
    """A function of a module, registered in FUNCTIONS or itself.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else.
    """
    if isinstance(given, Mapping) and "type" in given:
        options = dict(given)
        if (function := find_function(name, options.pop("type"))) is None:
            raise TypeError(f"{name}['type'] should be a name in FUNCTIONS or a callable, but is None")
        return lambda module: function(module, **options)
    if isinstance(given, str):
        found = registered_function(given)
        if found is None:
            raise ValueError(f"{name}={given!r} is not registered in FUNCTIONS")
        given = found
    if given is not None and not callable(given):
        raise wrong_type(name, given, "None, a str (a name in FUNCTIONS), a dict with 'type', or a callable")
    return given


def find_ignored(
    module: nn.Module, modules: Any, parameters: Any, states: Any = None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Modules (with all inside them) and parameters that are not to be sharded.

    Raises:
        ValueError: for an unknown name, an item that is not the model's, or ``states`` beside the others.
        TypeError: for anything else.
    """
    if states is not None and (modules is not None or parameters is not None):
        raise ValueError("ignored_states means ignored_modules and ignored_parameters: pass it, or them")
    known = dict(module.named_modules(remove_duplicate=False))
    named = dict(module.named_parameters(remove_duplicate=False))
    either = _named("ignored_states", states, {**known, **named}, (nn.Module, nn.Parameter))
    chosen = _named("ignored_modules", modules, known, (nn.Module,))
    chosen += [item for item in either if isinstance(item, nn.Module)]
    alone = set(_named("ignored_parameters", parameters, named, (nn.Parameter,)))
    alone |= {item for item in either if isinstance(item, nn.Parameter)}
    inside = {child for found in chosen for child in found.modules()}
    return inside, alone | {parameter for found in inside for parameter in found.parameters()}


def _named(name: str, given: Any, known: Mapping[str, Any], kinds: tuple[type, ...]) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, (str, nn.Module, torch.Tensor)) or not isinstance(given, Iterable):
        raise wrong_type(name, given, f"None, names, or {' or '.join(f'{kind.__name__}s' for kind in kinds)}")
    own = {id(value) for value in known.values()}
    found = []
    for item in given:
        if isinstance(item, str):
            if item not in known:
                raise ValueError(f"{name} has {item!r}, which the model does not have")
            item = known[item]
        if not isinstance(item, kinds):
            raise wrong_type(f"an item of {name}", item, " or a ".join(["a name", *(kind.__name__ for kind in kinds)]))
        if id(item) not in own:
            raise ValueError(f"{name} has a {type(item).__name__} that is not the model's")
        found.append(item)
    return found

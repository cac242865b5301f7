"""The verb: wrap a module so that its parameters, gradients and optimizer state are sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from .arguments import check_flag
from .core.annotated import describe
from .core.context import FSDPCommContext
from .core.device import local_of, tell_libraries
from .core.errors import UnsupportedShardError
from .core.extension import PRE, check_extension, is_extended
from .core.group import ParamGroup
from .core.hooks import Unit
from .core.mesh import DataParallelMesh, data_parallel_mesh, smaller_mesh
from .core.module import FSDPModule, become_fsdp_module, wrapped_class
from .core.options import GroupPolicy
from .core.parameter import alias_of, owner_of, refuse_lazy
from .core.place import Place
from .core.replaced import successor_of
from .core.root import is_never_called, managed_modules, modules_in, unit_of
from .core.shards import ParameterShards
from .core.slot import ManagedParameter
from .core.weak import weakly
from .placements import PRESETS, Placements

PlacementFn = Callable[[nn.Parameter], Any]


class _Options(TypedDict, total=False):
    """The further arguments of `fully_shard`, for those who check types."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: Any
    placements: Placements | str | None
    comm_ctx: FSDPCommContext | None
    module_fqn: str | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> FSDPModule: ...


@overload
def fully_shard(module: list[nn.Module], **options: Unpack[_Options]) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  (only read)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    placements: Placements | str | None = None,
    comm_ctx: FSDPCommContext | None = None,
    module_fqn: str | None = None,
) -> Any:
    """Shard ``module``'s parameters, gradients and optimizer state, in place, as one unit.

    The unit has all parameters of ``module`` that no earlier call on a submodule took: wrap from the bottom up, say
    each transformer block and then the root. Afterwards its registered parameters are DTensors, of which each rank
    holds a chunk; inside its forward they are the plain whole tensors. The first eight arguments are torch FSDP2's
    (`torch.distributed.fsdp.fully_shard`).

    Args:
        module: a module with a forward, or several that are gathered together.
        mesh: one axis to shard over, or two (replicate, shard); by default all ranks.
        reshard_after_forward: False keeps parameters gathered between forward and backward; an int reshards them
            to groups of that many ranks; None means True, but False for the root.
        shard_placement_fn: gives for each parameter the ``Shard`` to cut it on instead of ``Shard(0)``, or torch's
            ``ShardPlacementResult`` for another mesh too, or None.
        mp_policy: dtypes of gathered parameters, reductions and outputs.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and optimizer state on the host; None, on the device.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: which axes of a mesh with other parallelisms are data-parallel.
        placements: the strategy, a preset such as ``Placements.zero2`` or its name; by default ``zero3``.
        comm_ctx: shared by units that no common wrapped root contains, unless that is given it too, as the last.
        module_fqn: full name of the module, for messages and profiler labels.

    Returns:
        ``module`` itself, now an `FSDPModule`.

    Raises:
        ValueError: for a container without forward, a module wrapped already, a mesh, dim or size that does not
            fit, a parameter that cannot be cut; the message names it.
        TypeError: for an argument of a wrong type.
    """
    modules = _root_modules(module)
    _check_kinds(mesh, comm_ctx, module_fqn, shard_placement_fn, dp_mesh_dims)
    strategy = _strategy(placements)
    data_parallel = data_parallel_mesh(mesh if mesh is not None else _default_mesh(), strategy, dp_mesh_dims)
    _check_device(comm_ctx, data_parallel.device)
    managed = managed_modules(modules)
    policy = _policy(mp_policy, offload_policy, reshard_after_forward, data_parallel)
    parameters = _managed_parameters(modules, managed, _ignored(ignored_params), module_fqn)
    groups = _make_groups(parameters, data_parallel, policy, shard_placement_fn)
    _move_buffers(managed, data_parallel.device)
    # The root's parameters are needed at once in backward; where they are kept anyway, resharding costs nothing.
    reshards_unless_root = reshard_after_forward is None and not strategy.keeps_unsharded
    unit = Unit(modules, groups, data_parallel.device, mp_policy, reshards_unless_root, module_fqn, comm_ctx)
    _install(unit, modules, managed, reshard_after_forward)
    return module


def _check_kinds(
    mesh: object, comm_ctx: object, module_fqn: object, shard_placement_fn: object, dp_mesh_dims: object
) -> None:
    kinds = (("mesh", mesh, DeviceMesh), ("comm_ctx", comm_ctx, FSDPCommContext), ("module_fqn", module_fqn, str))
    for name, value, kind in kinds:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be a function, not {type(shard_placement_fn).__name__}")
    if dp_mesh_dims is not None and not hasattr(dp_mesh_dims, "shard_names"):
        raise TypeError(f"dp_mesh_dims must be a DataParallelMeshDims, not {type(dp_mesh_dims).__name__}")


def _check_device(comm_ctx: FSDPCommContext | None, device: torch.device) -> None:
    if comm_ctx is not None and comm_ctx.device.torch_device.type != device.type:
        raise ValueError(f"comm_ctx is for {comm_ctx.device.torch_device.type}, the mesh is on {device}")


def _install(
    unit: Unit,
    modules: Sequence[nn.Module],
    managed: Sequence[tuple[str, nn.Module]],
    reshard_after_forward: bool | int | None,
) -> None:
    # 1, for groups of one rank, means that they are not resharded; True, which equals it, that they are.
    reshards = reshard_after_forward is True or reshard_after_forward not in (False, 1)
    for group in unit.groups:
        group.options.reshard_after_forward = reshards
        _install_state_dict_hooks(group, modules)
    unit.install_hooks()
    for module in modules:
        become_fsdp_module(module, unit)
    for _, module in managed:
        tell_libraries(module)
        if isinstance(module, nn.TransformerEncoder):
            module.register_forward_pre_hook(_gather_first_layer)  # after the unit's own, which may make the root


def _gather_first_layer(encoder: nn.Module, args: Any) -> None:
    """torch's encoder leaves out padding in evaluation only if its first layer's parameters are plain tensors: they are
    when that layer runs, so they are gathered before the encoder looks at them."""
    first = cast(nn.TransformerEncoder, encoder).layers[0]
    if not first.training and (unit := unit_of(first)) is not None:
        cast(FSDPModule, first).unshard()
        for group in unit.groups:
            group.stays_registered = False  # the user did not ask for them


# -- Arguments


def _root_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The given modules, without those inside others of them."""
    if not isinstance(module, (nn.Module, list, tuple)):
        raise TypeError(f"fully_shard takes a module or a list of modules, not {type(module).__name__}")
    given = [module] if isinstance(module, nn.Module) else list(module)
    if not given:
        raise ValueError("fully_shard got an empty list of modules")
    for member in given:
        if not isinstance(member, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, not {type(member).__name__}")
        if is_never_called(member):
            raise ValueError(
                f"{type(member).__name__} has no forward, so nothing would tell when to gather its parameters: "
                f"call fully_shard on each module in it, or on a list of them"
            )
        if (unit := unit_of(member)) is not None:
            raise ValueError(f"{type(member).__name__} {unit.title!r} was wrapped by fully_shard already; wrap it once")
        wrapped_class(type(member))  # a class that refuses does so before anything is changed
    if len(given) == 1:
        return given
    inside = {id(child) for member in given for child in member.modules() if child is not member}
    return [member for member in dict.fromkeys(given) if id(member) not in inside]


def _strategy(placements: Placements | str | None) -> Placements:
    if placements is None:
        return Placements.zero3
    if isinstance(placements, str):
        if placements not in PRESETS:
            raise ValueError(f"placements={placements!r}: the presets are {', '.join(PRESETS)}")
        return PRESETS[placements]
    if not isinstance(placements, Placements):
        raise TypeError(f"placements must be a Placements or the name of a preset, not {type(placements).__name__}")
    return placements


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    # A build with CUDA names it also where there is no GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


def _policy(
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    reshard_after_forward: bool | int | None,
    mesh: DataParallelMesh,
) -> GroupPolicy:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, not {type(mp_policy).__name__}")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"mp_policy: {name} must be a torch.dtype, not {dtype!r}")
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"mp_policy: {name} must be a floating-point dtype, not {dtype}")
    check_flag("mp_policy", "cast_forward_inputs", mp_policy.cast_forward_inputs)
    override = _dtype_override(mp_policy)
    if override is not None and not callable(override):
        raise TypeError(f"mp_policy: param_dtype_override_fn must be a function, not {type(override).__name__}")
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise TypeError(f"offload_policy must be an OffloadPolicy, not {type(offload_policy).__name__}")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(f"reshard_after_forward must be a bool, an int or None, not {reshard_after_forward!r}")
    policy = GroupPolicy(mp_policy)
    if isinstance(offload_policy, CPUOffloadPolicy):
        check_flag("offload_policy", "pin_memory", offload_policy.pin_memory)
        policy.offload, policy.pin_memory = True, offload_policy.pin_memory
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        if mesh.strategy.keeps_unsharded:
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward}: {mesh.strategy} keeps parameters unsharded; "
                "resharding to a smaller world needs parameter='shard'"
            )
        policy.reshard_to = smaller_mesh(mesh, reshard_after_forward)
    return policy


# -- What belongs to the unit


def _managed_parameters(
    roots: Sequence[nn.Module],
    managed: Sequence[tuple[str, nn.Module]],
    ignored: Iterable[nn.Parameter],
    module_fqn: str | None,
) -> list[ManagedParameter]:
    ignored_ids = {id(parameter) for parameter in ignored}
    by_id: dict[int, ManagedParameter] = {}
    for prefix, module in managed:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            full = ".".join(part for part in (module_fqn, prefix, name) if part)
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"parameter {full!r} belongs to a {type(module).__name__}, and compiled TorchScript would not see "
                    "what takes its place: shard the module that it was made of, and use torch.compile"
                )
            if id(parameter) not in by_id:
                _check_parameter(full, parameter, Place(module, name))
                by_id[id(parameter)] = ManagedParameter(parameter, full, [])
            by_id[id(parameter)].places.append(Place(module, name))
    _add_places_inside(roots, managed, by_id)
    return list(by_id.values())


def _add_places_inside(
    roots: Sequence[nn.Module], managed: Sequence[tuple[str, nn.Module]], by_id: Mapping[int, ManagedParameter]
) -> None:
    """Note where parameters are registered in units inside, which were told to ignore them or came before them."""
    own = {id(module) for _, module in managed}
    for module in modules_in(roots):
        for name, parameter in module._parameters.items() if id(module) not in own else ():
            if (found := by_id.get(id(parameter))) is not None:
                found.places.append(Place(module, name))


def _dtype_override(mp_policy: MixedPrecisionPolicy) -> Any:
    return getattr(mp_policy, "param_dtype_override_fn", None)  # a field from torch 2.15 on


def _keeps_dtype(parameter: ManagedParameter, mp_policy: MixedPrecisionPolicy) -> bool:
    """Whether the policy's override gives the parameter its own dtype.

    Raises:
        ValueError: naming the parameter, if it gives one that is neither that nor the default.
    """
    if (override := _dtype_override(mp_policy)) is None:
        return False
    default, own, wanted = mp_policy.param_dtype, parameter.value.dtype, override(parameter.value)
    if wanted not in (None, default, own):
        raise ValueError(
            f"mp_policy: param_dtype_override_fn gave {wanted!r} for parameter {parameter.name!r}; it may give "
            f"None, param_dtype ({default}) or the parameter's own dtype ({own})"
        )
    return bool(wanted == own != default)


def _ignored(parameters: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    """
    Raises:
        TypeError: for names or modules, which would ignore nothing.
    """
    if isinstance(parameters, (torch.Tensor, nn.Module)) or not isinstance(parameters, Iterable | None):
        raise TypeError(f"ignored_params must be a set of parameters, not {type(parameters).__name__}")
    given = list(parameters or ())
    for parameter in given:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"ignored_params has {parameter!r:.80}: it takes the parameters themselves")
    return given


def check_cuttable(name: str, parameter: nn.Parameter) -> None:
    """
    Raises:
        ValueError: naming a parameter that cannot be sharded, whatever the mesh.
    """
    refuse_lazy(f"parameter {name!r}", parameter)
    if parameter.ndim == 0:
        raise ValueError(f"parameter {name!r} is a scalar, which cannot be cut: make it a 1-D tensor of one element")


def _check_parameter(name: str, parameter: nn.Parameter, place: Place) -> None:
    check_cuttable(name, parameter)
    if parameter.grad_dtype not in (None, parameter.dtype):
        raise ValueError(
            f"parameter {name!r} of {parameter.dtype} has grad_dtype={parameter.grad_dtype}, and gradients of sharded "
            "parameters are of their own dtype: set grad_dtype to None, and MixedPrecisionPolicy(reduce_dtype=...) to "
            "have gradients accumulated and reduced in another one"
        )
    owner = owner_of(parameter)
    if owner is not None and owner.manages(place):
        raise ValueError(
            f"parameter {name!r} belongs to unit {owner.name_of(parameter)[1]!r} already, wrapped before: wrap "
            "inner modules before the modules that contain them, and modules that share an inner module as one unit, "
            "fully_shard([module_a, module_b])"
        )
    if owner is not None or successor_of(parameter) is not None:
        raise ValueError(
            f"parameter {name!r} is tied to a parameter that another unit has sharded already: one shard cannot be "
            "gathered by two units, so put the modules that share it into one unit, fully_shard([module_a, module_b])"
        )


def _make_groups(
    parameters: Sequence[ManagedParameter],
    mesh: DataParallelMesh,
    policy: GroupPolicy,
    placement_fn: PlacementFn | None,
) -> list[ParamGroup]:
    """One group per mesh, in the order in which parameters ask for them. Raises before any parameter is replaced."""
    meshes = {(id(mesh.mesh), ()): mesh, (id(mesh.whole), mesh.axis_names): mesh}
    by_mesh: dict[DataParallelMesh, list[ManagedParameter]] = {}
    for parameter in parameters:
        own, chosen = mesh, placement_fn(parameter.value) if placement_fn is not None else None
        info = getattr(chosen, "mesh_info", None)
        if chosen is not None and info is not None:
            chosen, own = chosen.placement, _mesh_of(info, meshes, mesh.strategy)
        parameter.dim = _shard_dim(parameter, chosen, own)
        parameter.keeps_dtype = _keeps_dtype(parameter, policy.precision)
        if is_extended(local := local_of(parameter.value)):
            # Methods that are hung on a tensor are not on its parts, which are then cut again as others are.
            is_cut_again = policy.reshard_to is not None and hasattr(type(local), PRE)
            check_extension(parameter.name, local, reshards_to_smaller=is_cut_again)
        if policy.reshard_to is not None and isinstance(parameter.value, DTensor):
            raise ValueError(
                f"parameter {parameter.name!r} is a DTensor, which cannot be resharded to a smaller world: pass a bool "
                "for reshard_after_forward"
            )
        parameter.parallel = describe(parameter.name, parameter.value, parameter.dim, own)
        by_mesh.setdefault(own, []).append(parameter)
    policies = dict.fromkeys(by_mesh, policy)
    if policy.reshard_to is not None:
        size = policy.reshard_to.shard.size
        policies |= {own: replace(policy, reshard_to=smaller_mesh(own, size)) for own in by_mesh if own is not mesh}
    return [ParamGroup(ParameterShards(members, own, policies[own])) for own, members in by_mesh.items()]


def _mesh_of(
    info: Any, known: dict[tuple[int, tuple[str, ...]], DataParallelMesh], strategy: Placements
) -> DataParallelMesh:
    """The ranks that the ``mesh_info`` of a ShardPlacementResult names; those of other parameters if they are
    ``known``, by the identity of the mesh (equal ones may have other process groups) and the names of its axes."""
    axes = getattr(info, "dp_mesh_dims", None)
    mesh = info.mesh if axes is None else info.spmd_mesh
    key = id(mesh), () if axes is None else (*axes.replicate_names, *axes.shard_names)
    if key not in known:
        known[key] = data_parallel_mesh(mesh, strategy, axes)
    return known[key]


def _shard_dim(parameter: ManagedParameter, chosen: Any, mesh: DataParallelMesh) -> int:
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard):
        raise ValueError(
            f"shard_placement_fn gave {chosen!r} for parameter {parameter.name!r}: give a Shard(dim), "
            "a ShardPlacementResult or None"
        )
    shape = tuple(parameter.local.shape)
    dim = chosen.dim + len(shape) if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < len(shape):
        raise ValueError(f"parameter {parameter.name!r} of shape {shape} has no dim {chosen.dim} to be sharded on")
    if dim and shape[dim] % mesh.shard.size:
        raise UnsupportedShardError(
            f"parameter {parameter.name!r} of shape {shape} cannot be sharded on dim {dim}: its size {shape[dim]} does "
            f"not divide evenly over {mesh.shard.size} ranks; only dim 0 may be uneven"
        )
    return dim


def _move_buffers(managed: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    for _, module in managed:
        for buffer in module.buffers(recurse=False):
            if buffer.device.type not in (device.type, "meta"):
                buffer.data = buffer.to(device)


def _install_state_dict_hooks(group: ParamGroup, roots: Sequence[nn.Module]) -> None:
    """Let state dicts see sharded parameters, and adopt what loading puts in the place of one: once for all that is
    loaded into one of ``roots``, the unit's modules, since it looks at all parameters of the unit."""
    reshard, adopt, shards = weakly(group.reshard), weakly(group.adopt_registered), group.shards.reference
    tops, loading = weakref.WeakSet(roots), weakref.WeakSet[nn.Module]()

    def before(*_: Any) -> None:
        # Gathered ones are kept: if one rank alone takes its state dict, others would not gather again with it.
        reshard(keep=True)

    def before_load(module: nn.Module, *_: Any) -> None:
        before()
        if module in tops:
            loading.add(module)

    def after_load(module: nn.Module, _: Any) -> None:
        loading.discard(module)
        if not loading:
            adopt(is_loading=True)

    def alias(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name in module._parameters:
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and owner_of(value) is shards():
                state_dict[prefix + name] = alias_of(value, shards)

    holders = dict.fromkeys(place.module() for slot in group.slots for place in slot.places)
    for module in holders:
        assert module is not None
        module.register_state_dict_pre_hook(before)
        module.register_state_dict_post_hook(alias)
    for module in dict.fromkeys((*roots, *holders)):
        assert module is not None
        module.register_load_state_dict_pre_hook(before_load)
        module.register_load_state_dict_post_hook(after_load)

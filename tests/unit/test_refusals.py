"""What is refused by name, beside what the tests of each feature come to."""

from __future__ import annotations

import contextlib
import gc
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise import (
    CheckpointError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from shardwise.fairscale import OSS, FullyShardedDataParallel
from shardwise.fairscale.testing import DummyProcessGroup
from shardwise.optim import flat

from ..models import MLP, inputs_for, wrap
from ..needs import needs_named_axes
from ..ranks.test_parallel import named_axes, needs_spmd_types

Mesh = Callable[..., DeviceMesh]


@pytest.mark.parametrize("given", [None, "model", nn.Parameter(torch.ones(2)), {}, 3])
def test_what_is_no_module(fake_mesh: Mesh, given: Any) -> None:
    with pytest.raises(TypeError, match="fully_shard takes a module or a list of modules, not"):
        fully_shard(given, mesh=fake_mesh(2))


@needs_named_axes
def test_axes_that_the_mesh_does_not_name(fake_mesh: Mesh) -> None:
    mesh = fake_mesh(2, 2)
    with pytest.raises(ValueError, match=r"names an axis 'data'; the mesh has replicate, shard"):
        fully_shard(MLP(), mesh=mesh, dp_mesh_dims=named_axes(shard="data"))
    unnamed = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match="the mesh has no names: pass mesh_dim_names"):
        fully_shard(MLP(), mesh=unnamed, dp_mesh_dims=named_axes(shard="data"))


def test_a_smaller_world_for_what_tensor_parallelism_cut(fake_mesh: Mesh) -> None:
    mesh, model = fake_mesh(4, 2), nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["shard"], [Shard(0)]))
    with pytest.raises(ValueError, match="parameter 'weight' is a DTensor, which cannot be resharded to a smaller"):
        fully_shard(model, mesh=mesh["replicate"], reshard_after_forward=2)
    fully_shard(model, mesh=mesh["replicate"])


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3]])
def test_a_mesh_for_what_is_cut_that_does_not_combine_with_ours(fake_mesh: Mesh, ranks: list[int]) -> None:
    mesh, other, model = fake_mesh(4), DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)), nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), other, [Shard(0)]))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor on .* does not combine with .* slice both from one"):
        fully_shard(model, mesh=mesh)


@needs_named_axes
def test_a_parameter_that_data_parallel_axes_cut_already(fake_mesh: Mesh) -> None:
    mesh, model = fake_mesh(2, 2), nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"'weight' is placed .* on data-parallel axis 'replicate', .* be Replicate"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=named_axes(shard="replicate"))


@needs_named_axes
@needs_spmd_types
@pytest.mark.parametrize(
    ("kinds", "axes", "message"),
    [
        ({"shard": "R"}, None, r"annotated by spmd_types: pass fully_shard the mesh of all its axes, and dp_mesh_dims"),
        ({"replicate": "R"}, "replicate", r"annotated by spmd_types, but not for axis 'shard' of .*: annotate it"),
        ({"replicate": "I", "shard": "R"}, "replicate", r".*I on data-parallel axis 'replicate', .*R there"),
        ({"other": "R", "shard": "R"}, "replicate", r".*R on .*, which is no axis of .*replicate=2, shard"),
    ],
)
def test_annotations_that_do_not_say_what_a_parameter_is(
    fake_mesh: Mesh, kinds: dict[str, str], axes: str | None, message: str
) -> None:
    import spmd_types

    mesh, model = fake_mesh(2, 2), nn.Linear(4, 4, bias=False)
    groups = {"other": dist.new_group([0, 3]), **{name: mesh.get_group(name) for name in ("replicate", "shard")}}
    spmd_types.assert_type(model.weight, {groups[axis]: getattr(spmd_types, kind) for axis, kind in kinds.items()})
    options: dict[str, Any] = {} if axes is None else {"dp_mesh_dims": named_axes(shard=axes)}
    with pytest.raises(ValueError, match=rf"'weight' is {message}"):
        fully_shard(model, mesh=mesh, **options)


@needs_named_axes
def test_what_is_set_for_one_mesh_of_several(fake_mesh: Mesh) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh, model = fake_mesh(2, 2), nn.Linear(4, 4)
    infos = {1: FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0), 2: FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)}
    unit: Any = fully_shard(
        model, mesh=mesh["shard"], shard_placement_fn=lambda one: ShardPlacementResult(Shard(0), infos[one.ndim])
    )
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(ValueError, match=rf"{method}: unit .* has parameters on several meshes"):
            getattr(unit, method)(DefaultAllGather())


def test_a_stream_for_the_hook_of_what_is_replicated(fake_mesh: Mesh) -> None:
    model: Any = fully_shard(MLP(), mesh=fake_mesh(2, 2))
    with pytest.raises(ValueError, match=r"unit .* all-reduces by itself: the hook runs in that stream"):
        model.set_all_reduce_hook(lambda tensor: None, stream=SimpleNamespace(device=torch.device("cpu")))


def test_the_norm_of_what_are_no_tensors(fake_mesh: Mesh) -> None:
    model = fully_shard(MLP(), mesh=fake_mesh(2))
    kinds = {"str": dict(model.named_parameters()), "tuple": model.named_parameters(), "NoneType": None}
    for kind, given in {**kinds, type(model).__name__: model}.items():
        with pytest.raises(TypeError, match=rf"parameters must be a tensor or several, .* and a {kind} is none"):
            shardwise.clip_grad_norm_(given, 1.0)  # type: ignore[arg-type]


def test_a_flat_optimizer_of_a_parameter_that_is_there_twice(fake_mesh: Mesh) -> None:
    model = fully_shard(MLP(), mesh=fake_mesh(2))
    first, *rest = model.parameters()
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=r"'layers\.0\.weight' is twice"):
        flat(torch.optim.SGD, [first, *rest, first])
    plain = nn.Parameter(torch.ones(2, 3))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=r"shape \(2, 3\) is twice"):
        flat(torch.optim.SGD, [plain, plain])
    optimizer = flat(torch.optim.SGD, [first, *rest], lr=0.1)
    optimizer.param_groups[0]["params"].append(first)
    model(torch.ones(1, first.shape[1])).sum().backward()
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is twice"):
        optimizer.step()
    del optimizer.param_groups[0]["params"][-1]
    optimizer.step()
    with pytest.raises(TypeError, match=r"flat\(elementwise='yes'\)"):
        flat(torch.optim.SGD, rest, elementwise="yes")  # type: ignore[arg-type]


def test_a_gathered_parameter_that_a_sharded_one_is_written_to(fake_mesh: Mesh) -> None:
    mesh = fake_mesh(2)
    teacher, student = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
    teacher.unshard()
    with torch.no_grad():
        for write in (lambda to, by: to.lerp_(by, 0.5), lambda to, by: to.copy_(by), operator.iadd):
            with pytest.raises(RuntimeError, match=r"writes to parameter 'weight' of unit .* while it is gathered"):
                write(teacher.weight, student.weight)
        teacher.reshard()
        teacher.weight.lerp_(student.weight, 0.5)  # type: ignore[arg-type]


def test_the_norm_of_gradients_that_are_not_reduced(fake_mesh: Mesh) -> None:
    model = fully_shard(MLP(), mesh=fake_mesh(2))
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad = torch.ones_like(parameter)
    first = next(model.parameters())
    assert isinstance(first, DTensor)
    first.grad = DTensor.from_local(torch.ones(first.shape), first.device_mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"placements \(Partial\(sum\),\) is not reduced yet"):
        shardwise.clip_grad_norm_(model.parameters(), 1.0)
    first.grad = DTensor.from_local(torch.ones(first.shape), first.device_mesh, [Replicate()], run_check=False)
    shardwise.clip_grad_norm_(model.parameters(), 1.0)


def test_the_norm_of_gradients_on_meshes_without_one_of_all_ranks(fake_mesh: Mesh) -> None:
    mesh, model = fake_mesh(2, 2), MLP()
    for layer, axis in zip(model.layers, ("replicate", "shard"), strict=False):
        fully_shard(layer, mesh=mesh[axis])
    of_both = r"'weight' of unit .* on ranks \[0, 2\], .*'weight' of unit .* on ranks \[0, 1\], .* by a call of its own"
    with pytest.raises(ValueError, match=of_both):
        shardwise.clip_grad_norm_(model.parameters(), 1.0)
    for layer in model.layers:
        shardwise.clip_grad_norm_(layer.parameters(), 1.0)


def test_other_parameters_trained_while_sums_wait_for_replicas(fake_mesh: Mesh) -> None:
    model: Any = wrap(MLP(), fully_shard, mesh=fake_mesh(2, 2))
    model.set_requires_all_reduce(False)
    model(inputs_for(model, 0)).sum().backward()
    model.layers[1].bias.requires_grad_(False)
    model.set_requires_all_reduce(True)
    with pytest.raises(ValueError, match=r"unit 'layers\.1': other parameters require gradients now"):
        model(inputs_for(model, 1)).sum().backward()
    model.reset_iter_state()
    model(inputs_for(model, 1)).sum().backward()


def test_a_parameter_whose_model_is_gone(fake_mesh: Mesh) -> None:
    model = fully_shard(MLP(), mesh=fake_mesh(2))
    weight = next(model.parameters())
    del model
    gc.collect()
    with pytest.raises(ValueError, match="a sharded parameter, whose unit no longer exists, was mixed with plain"):
        weight + torch.ones(weight.shape)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (["not", "one"], "has no metadata of a checkpoint"),
        (Metadata({}), "has no metadata of a checkpoint"),
        (Metadata({"weight": None}, storage_data={}), "does not describe the files"),  # type: ignore[dict-item]
    ],
    ids=["no metadata", "nothing stored", "no such entry"],
)
def test_a_checkpoint_whose_metadata_is_none(tmp_path: Path, metadata: Any, message: str) -> None:
    """Of a plain checkpoint of torch's, which has no checksums."""
    model = nn.Linear(2, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        shardwise.load(tmp_path, model=model)


@pytest.mark.parametrize("kind", ["fully_shard", "OSS", "FairScale FSDP"])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("one",), ValueError, r"clip_grad_norm_?\(max_norm='one'\): must be a number"),
        ((None,), TypeError, r"clip_grad_norm_?\(max_norm=None\): must be a number"),
        ((1.0, "two"), ValueError, r"clip_grad_norm_?\(norm_type='two'\): must be a number"),
        ((1.0, [2]), TypeError, r"clip_grad_norm_?\(norm_type=\[2\]\): must be a number"),
    ],
)
def test_norms_that_are_no_numbers(
    fake_mesh: Mesh, kind: str, arguments: Any, error: type[Exception], message: str
) -> None:
    mesh, model = fake_mesh(2), nn.Linear(2, 2)
    if kind == "fully_shard":
        parameters = [*fully_shard(model, mesh=mesh).parameters()]

        def clip(*given: Any) -> object:
            return shardwise.clip_grad_norm_(parameters, *given)

    elif kind == "OSS":
        clip = OSS(model.parameters(), torch.optim.SGD, lr=0.1).clip_grad_norm
    else:
        clip = FullyShardedDataParallel(model).clip_grad_norm_
    with pytest.raises(error, match=message):
        clip(*arguments)
    clip("1.0", "inf")


FLAGS = (
    "set_is_last_backward",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_keep_unsharded_storage",
    "set_unshard_in_backward",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_allocate_memory_from_process_group_for_comm",
    "set_manual_backward_finalization",
)


@pytest.mark.parametrize("method", FLAGS)
def test_flags_that_are_none(fake_mesh: Mesh, method: str) -> None:
    model: Any = fully_shard(nn.Linear(2, 2), mesh=fake_mesh(2))
    with pytest.raises(TypeError, match=rf"{method}\(\w+='no'\): pass True or False, not str"):
        getattr(model, method)("no")
    getattr(model, method)(False)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"mp_policy": MixedPrecisionPolicy(cast_forward_inputs="no")}, r"mp_policy\(cast_forward_inputs='no'\)"),  # type: ignore[arg-type]
        ({"offload_policy": CPUOffloadPolicy(pin_memory="no")}, r"offload_policy\(pin_memory='no'\)"),  # type: ignore[arg-type]
        ({"mp_policy": MixedPrecisionPolicy(output_dtype=torch.int64)}, "output_dtype must be a floating-point dtype"),
    ],
)
def test_policies_with_what_cannot_be(fake_mesh: Mesh, policies: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fully_shard(nn.Linear(2, 2), mesh=fake_mesh(2), **policies)


def test_divide_factors_in_tensors(fake_mesh: Mesh) -> None:
    model: Any = fully_shard(nn.Linear(2, 2), mesh=fake_mesh(2))
    with pytest.raises(ValueError, match=r"must be one number, not a tensor of shape \(2,\)"):
        model.set_gradient_divide_factor(torch.ones(2))
    model.set_gradient_divide_factor(torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"unit 'Linear \(root\)': the gradient divide factor .* holds 0\.0"):
        model(torch.ones(1, 2)).sum().backward()


def test_a_forward_method_that_is_none(fake_mesh: Mesh) -> None:
    model: Any = fully_shard(nn.Linear(2, 2), mesh=fake_mesh(2))
    for name in ("training", None):
        with pytest.raises(ValueError, match=f"Linear has no method {name!r} to register"):
            register_fsdp_forward_method(model, name)  # type: ignore[arg-type]
    assert model.training is True


def test_state_that_does_not_move_with_repointed_parameters(fake_mesh: Mesh) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    fully_shard(model, mesh=fake_mesh(2))
    with pytest.warns(UserWarning, match=r"state '\w+' that LBFGS has for parameter 'weight' stays whole"):
        shardwise.repoint(optimizer)


def test_oss_that_was_pickled_on_other_ranks(fake_mesh: Mesh) -> None:
    fake_mesh(2)
    pickled = pickle.dumps(OSS(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1))
    dist.destroy_process_group()
    fake_mesh(3)
    with pytest.raises(RuntimeError, match=r"pickled on 2 ranks and cannot be unpickled on 3: save its state_dict"):
        pickle.loads(pickled)


@pytest.mark.parametrize("ranks", [2, 3])
def test_groups_without_processes_to_reduce_over(fake_mesh: Mesh, ranks: int) -> None:
    fake_mesh(2)
    with contextlib.nullcontext() if ranks == 2 else pytest.warns(UserWarning, match="has 3 ranks and process_group 2"):
        model = FullyShardedDataParallel(nn.Linear(2, 2), process_group_reduce_scatter=DummyProcessGroup(0, ranks))
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_on_meshes_without_one_of_all_ranks(fake_mesh: Mesh, tmp_path: Path) -> None:
    fake_mesh(4)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer, other in zip(model, (1, 2), strict=True):
        fully_shard(layer, mesh=DeviceMesh("cpu", [0, other]))
    with pytest.raises(ValueError, match=r"of ranks \[0, 1\] and on .* of ranks \[0, 2\], and neither has all ranks"):
        shardwise.save_safetensors(model, tmp_path)


def test_a_tensor_that_safetensors_files_have_no_name_for(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="cannot hold a tensor named '__metadata__'"):
        shardwise.save_safetensors(model, tmp_path)


def test_names_that_a_function_does_not_know(tmp_path: Path) -> None:
    shardwise.save_safetensors(nn.Linear(2, 2), tmp_path)
    with pytest.raises(KeyError, match="weight") as caught:
        shardwise.load_safetensors(nn.Linear(2, 2), tmp_path, rename={"bias": "bias"}.__getitem__)
    assert caught.value.__notes__ == ["by rename, called with the name 'weight' of a tensor in the files"]


def test_averages_of_another_shape_or_of_no_number(fake_mesh: Mesh) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=fake_mesh(2))
    for decay in (True, "0.9", None):
        with pytest.raises(TypeError, match=f"decay must be a number, not {decay!r}"):
            shardwise.EMA(model, decay)  # type: ignore[arg-type]
    ema = shardwise.EMA(model, 0.5)
    state = ema.state_dict()
    state["averages"]["weight"] = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"average of 'weight' has shape \(3, 2\), not \(2, 2\)"):
        ema.load_state_dict(state)

"""What is refused by name, beside what the tests of each feature come to."""

from __future__ import annotations

import gc
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from shardwise.optim import flat

from ..models import MLP, inputs_for, wrap
from ..needs import needs_named_axes
from ..ranks.test_parallel import named_axes

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

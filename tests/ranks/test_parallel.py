"""Composition with tensor parallelism, two-axis meshes, other shard dims and meshes, smaller worlds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise import Placements
from shardwise.core.errors import StateError

from ..models import MLP, Transformer, inputs_for, wrap
from ..needs import needs_named_axes, needs_named_meshes
from .harness import on_ranks

needs_spmd_types = pytest.mark.skipif(importlib.util.find_spec("spmd_types") is None, reason="needs spmd_types")


def train(model: nn.Module, data_rank: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """Losses and whole parameters of some SGD steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    result: dict[str, torch.Tensor] = {}
    for step in range(steps):
        loss = model(inputs_for(model, 10 * step + data_rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result[f"loss{step}"] = loss.detach()
    for name, parameter in model.named_parameters():
        result[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return result


def plain(make: Callable[[], nn.Module], data_rank: int, data_size: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """The same without any parallelism, on the joined batch."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result: dict[str, torch.Tensor] = {}
    for step in range(steps):
        losses = [model(inputs_for(model, 10 * step + rank)).square().mean() for rank in range(data_size)]
        (sum(losses) / data_size).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        result[f"loss{step}"] = losses[data_rank].detach()
    return result | {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda message, name=name: f"{name}: {message}")


def make_mlp(sizes: tuple[int, ...] = (8, 16, 12)) -> nn.Module:
    torch.manual_seed(3)
    return MLP(sizes)


def make_linear() -> nn.Module:
    """Where each operator takes DTensor long."""
    return make_mlp((8, 16))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(make_mlp(), mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})


@on_ranks(4, verb=["ours", "torch"])
def test_with_tensor_parallelism(verb: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    wrap(model, shardwise.fully_shard if verb == "ours" else torch_fully_shard, mesh=mesh["dp"])
    assert_close(train(model, mesh["dp"].get_local_rank()), plain(make_mlp, mesh["dp"].get_local_rank(), 2))


@on_ranks(4, preset=["zero1", "zero2", "zero3", "ddp"])
def test_presets_with_tensor_parallelism(preset: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = wrap(
        tensor_parallel(mesh["tp"]), shardwise.fully_shard, mesh=mesh["dp"], placements=getattr(Placements, preset)
    )
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, parameter in make_mlp().named_parameters():
        assert torch.equal(before[name], parameter), name
    assert_close(train(model, mesh["dp"].get_local_rank()), plain(make_mlp, mesh["dp"].get_local_rank(), 2))
    shardwise.clip_grad_norm_(model.parameters(), 1.0)


@needs_named_meshes
@on_ranks(4)
def test_what_tensor_parallelism_cut_is_named_outside_of_forward() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = shardwise.fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"])
    activations = distribute_tensor(torch.ones(3, 8), mesh["tp"])
    for name, use in (
        ("layers.0.weight", lambda: model.layers[0](torch.ones(3, 8))),
        ("layers.1.weight", lambda: model.layers[1](torch.ones(3, 8))),
        ("layers.0.weight", lambda: activations @ model.layers[0].weight.t()),
    ):
        with pytest.raises(StateError, match=f"'{name}' was used outside the forward of its unit.*unshard()"):
            use()
    other = distribute_tensor(torch.ones(16, 8), init_device_mesh("cpu", (4,)))
    with pytest.raises(RuntimeError, match="different meshes"):
        model.layers[0].weight + other
    with pytest.raises(RuntimeError, match="different meshes"):  # of which the sharded one is none
        torch.where(activations > 0, distribute_tensor(torch.ones(3, 8), other.device_mesh), model.layers[0].weight[:3])
    model.unshard()
    model.layers[0](torch.ones(3, 8))


@on_ranks(4)
def test_optimizer_with_state_made_between_tensor_and_data_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, truth = tensor_parallel(mesh["tp"]), make_mlp()
    optimizer, expected = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, truth))
    for step in range(2):
        for one in (model, truth):
            one(inputs_for(truth, step)).square().mean().backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        if not step:
            wrap(model, shardwise.fully_shard, mesh=mesh["dp"])
            shardwise.repoint(optimizer)
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())
        average = optimizer.state[ours]["exp_avg"]
        assert average.placements == ours.placements
        torch.testing.assert_close(average.full_tensor(), expected.state[theirs]["exp_avg"])


@on_ranks(4)
def test_sharded_placements_beside_tensor_parallelism_are_torchs() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = wrap(tensor_parallel(mesh["tp"]), shardwise.fully_shard, mesh=mesh["dp"])
    theirs = wrap(tensor_parallel(mesh["tp"]), torch_fully_shard, mesh=mesh["dp"])
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        assert a.placements == b.placements
        assert a.device_mesh == b.device_mesh
        assert torch.equal(a.to_local(), b.to_local())


def on_whole_mesh(mesh: DeviceMesh, make: Callable[[], nn.Module] = make_mlp) -> nn.Module:
    """Every parameter a DTensor on the whole mesh, replicated over all but the last axis."""
    model = make()

    def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                placements = [Replicate()] * mesh.ndim
                if key == "weight":
                    placements[-1] = Shard(0)  # type: ignore[call-overload]
                module._parameters[key] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))

    def enter(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(x, mesh, [*[Shard(0)] * (mesh.ndim - 1), Replicate()], run_check=False) for x in args
        )

    def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[*[Shard(0)] * (mesh.ndim - 1), Replicate()]).to_local()

    return distribute_module(model, mesh, distribute, enter, leave)


def named_axes(**names: Any) -> Any:
    """torch's own where it has one (2.13), else what it would have."""
    if (own := getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)) is not None:
        return own(**names)
    return SimpleNamespace(
        **{
            f"{kind}_names": (value,) if isinstance(value := names.get(kind, ()), str) else value
            for kind in ("shard", "replicate")
        }
    )


@on_ranks(4, axes=["one", "replicate", "two"])
def test_axes_of_a_whole_mesh(axes: str) -> None:
    if axes == "two":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        dims = named_axes(shard=("dp", "cp"))
    elif axes == "one":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dims = named_axes(shard="dp")
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dims = named_axes(replicate="dp")
    model = on_whole_mesh(mesh)
    shardwise.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    rank = mesh["dp"].get_local_rank()
    assert_close(train(model, rank), plain(make_mlp, rank, 2))
    # The weight is cut on dim 0 by tensor parallelism first, then by data parallelism inside of that; torch has the
    # same placements, which it reads the other way round.
    weight, bias = (str(p.placements) for p in (model.layers[0].weight, model.layers[0].bias))  # type: ignore[union-attr, index]
    if axes == "replicate":
        assert (weight, bias) == ("(Replicate(), Shard(dim=0))", "(Replicate(), Replicate())")
    else:
        assert (weight, bias) == ("(_StridedShard(dim=0, sf=2), Shard(dim=0))", "(Shard(dim=0), Replicate())")


@on_ranks(4, shards=[True, False])
def test_axes_that_replicate_stay_apart(shards: bool) -> None:
    """Only axes that shard become one; torch leaves the others, and the parameters on the whole mesh."""
    mesh = init_device_mesh("cpu", (2, 1, 2, 1), mesh_dim_names=("pod", "host", "dp", "tp"))
    dims = named_axes(shard="dp", replicate=("pod", "host")) if shards else named_axes(replicate=("pod", "host", "dp"))
    model = on_whole_mesh(mesh, make_linear)
    shardwise.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    bias: Any = model.layers[0].bias  # type: ignore[union-attr, index]
    assert bias.device_mesh == mesh
    assert bias.placements == (Replicate(), Replicate(), Shard(0) if shards else Replicate(), Replicate())
    assert_close(train(model, dist.get_rank()), plain(make_linear, dist.get_rank(), 4))


@on_ranks(4, preset=["zero1", "zero2", "zero3", "hsdp", "ddp"])
def test_replicate_and_shard(preset: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap(make_transformer(), shardwise.fully_shard, mesh=mesh, placements=getattr(Placements, preset))
    if preset == "zero3":
        assert all(p.placements == (Replicate(), Shard(0)) for p in model.parameters())  # type: ignore[attr-defined]
    assert_close(train(model, dist.get_rank()), plain(make_transformer, dist.get_rank(), 4))


def make_transformer() -> nn.Module:
    torch.manual_seed(3)
    return Transformer()


@on_ranks(2, replicated=["outside", "inside"])
def test_torchs_replicate(replicated: str) -> None:
    """Parameters that it reduces stay whole and in no unit, and those of units are left to them."""
    model = make_transformer()
    for layer in model.layers:  # type: ignore[union-attr]
        (shardwise.fully_shard if replicated == "outside" else replicate)(layer)
    (replicate if replicated == "outside" else shardwise.fully_shard)(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == (name.startswith("layers.") == (replicated == "outside")), name
    assert_close(train(model, dist.get_rank()), plain(make_transformer, dist.get_rank(), 2))


@on_ranks(2)
def test_torchs_replicate_refuses_units() -> None:
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(shardwise.fully_shard(MLP()))


def widest(parameter: nn.Parameter) -> Shard:
    """The last dim that divides by four."""
    return next(Shard(dim) for dim in reversed(range(parameter.ndim)) if parameter.shape[dim] % 4 == 0 or dim == 0)


@on_ranks(2, 4)
def test_other_shard_dims() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = wrap(make_transformer(), shardwise.fully_shard, mesh=mesh, shard_placement_fn=widest)
    assert model.layers[0].down.weight.placements == (Shard(1),)  # type: ignore[union-attr, index]
    assert model.layers[0].down.weight.to_local().shape == (16, 64 // size)  # type: ignore[union-attr, index]
    assert_close(train(model, dist.get_rank()), plain(make_transformer, dist.get_rank(), size))


@on_ranks(4, reshard_to=[1, 2, 4])
def test_resharding_to_a_smaller_world(reshard_to: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = wrap(make_transformer(), shardwise.fully_shard, mesh=mesh, reshard_after_forward=reshard_to)
    output = model(inputs_for(model, 0))
    weight = model.layers[0].up.weight  # type: ignore[union-attr, index]
    if reshard_to == 2:
        assert weight.to_local().shape == (32, 16)
        whole = make_transformer().layers[0].up.weight  # type: ignore[union-attr, index]
        assert torch.equal(weight.to_local(), whole.chunk(2)[dist.get_rank() % 2])
        assert weight.placements == (Replicate(), Shard(0))
    elif reshard_to == 1:
        assert not isinstance(weight, DTensor)
    else:
        assert weight.to_local().shape == (16, 16)
    output.sum().backward()
    model.zero_grad()
    assert_close(train(model, dist.get_rank()), plain(make_transformer, dist.get_rank(), 4))


@on_ranks(4)
def test_models_of_one_group_share_the_smaller_world() -> None:
    """On all ranks, whichever models each keeps alive: one that made the groups again would wait for the others."""
    kept: list[nn.Module] = []
    made: set[int] = set()
    for _ in range(3):
        model = wrap(MLP(), shardwise.fully_shard, reshard_after_forward=2)
        model(inputs_for(model, 0)).sum().backward()
        made.add(len(distributed_c10d._world.pg_map))
        if dist.get_rank() == 0:
            kept.append(model)
        del model
    assert len(made) == 1


@on_ranks(8)
def test_resharding_to_a_smaller_world_in_each_stage_of_a_pipeline() -> None:
    """Both stages make their groups at the same time, which torch would name alike; FSDP2 hangs."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    model = wrap(MLP(), shardwise.fully_shard, mesh=mesh["dp"], reshard_after_forward=2)
    expected = wrap(MLP(), shardwise.fully_shard, mesh=mesh["dp"])
    expected.load_state_dict(model.state_dict())
    for each in (model, expected):
        each(inputs_for(each, dist.get_rank())).sum().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())  # type: ignore[union-attr]


class Recorded(DefaultAllGather):
    """Torch's own all-gather; notes over how many ranks."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.sizes.append(group.size())
        assert output_tensor.numel() == group.size() * input_tensor.numel()
        return super().__call__(output_tensor, input_tensor, group, async_op)


@on_ranks(4, dtype=[None, torch.bfloat16])
def test_the_users_gather_over_a_smaller_world_like_fsdp2(dtype: torch.dtype | None) -> None:
    found = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 8))
        gather, options = Recorded(), {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        verb(model[0], reshard_after_forward=2, **options)
        verb(model[1], reshard_after_forward=2, **options)
        verb(model, **options)
        for layer in model[:2]:
            layer.set_custom_all_gather(gather)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(model(torch.full((2, 8), dist.get_rank() + 1.0)).float().square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, gather.sizes))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == [4, 4, 2, 2] * 3


@on_ranks(4, when=["after evaluation", "before backward"], reshards=[False, True])
def test_the_smaller_world_is_left_while_resharded_to_it(when: str, reshards: bool) -> None:
    def steps(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
        result = train(model, rank, 1)
        if when == "after evaluation":
            with torch.no_grad():
                model(inputs_for(model, rank))
        else:
            loss = model(inputs_for(model, rank)).sum()
        if isinstance(model, shardwise.FSDPModule):
            model.set_reshard_after_forward(reshards)
        if when == "before backward":
            loss.backward()
            result |= {f"gradient.{name}": whole(parameter.grad) for name, parameter in model.named_parameters()}
            model.zero_grad()
        for module in model.modules():
            if isinstance(module, shardwise.FSDPModule):
                module.reshard()  # what is registered until then is no optimizer's
        return result | {f"then.{name}": value for name, value in train(model, rank).items()}

    model = wrap(make_transformer(), shardwise.fully_shard, reshard_after_forward=2)
    other = wrap(make_transformer(), shardwise.fully_shard)
    assert_close(steps(model, dist.get_rank()), steps(other, dist.get_rank()))
    assert_close(train(model, dist.get_rank()), train(other, dist.get_rank()))


@on_ranks(4)
def test_state_dict_while_resharded_to_a_smaller_world() -> None:
    """Which has freed what was gathered, so that the next forward and backward gather anew."""
    model = wrap(make_transformer(), shardwise.fully_shard, reshard_after_forward=2)
    other = wrap(make_transformer(), shardwise.fully_shard)
    data = inputs_for(model, dist.get_rank())
    with torch.no_grad():
        model(data)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), other.state_dict()[name].to_local())
    results = []
    for each in (model, other):
        loss = each(data).sum()
        each.state_dict()
        loss.backward()
        gradients = {name: whole(parameter.grad) for name, parameter in each.named_parameters()}
        each.zero_grad()
        results.append(gradients | train(each, dist.get_rank()))
    assert_close(*results)


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


@needs_named_axes
@on_ranks(4)
def test_a_mesh_for_each_parameter() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    whole = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    info = FSDPMeshInfo(pairs["inner"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if parameter.ndim == 1 else None

    ours = wrap(make_transformer(), shardwise.fully_shard, mesh=whole, shard_placement_fn=place)
    theirs = wrap(make_transformer(), torch_fully_shard, mesh=whole, shard_placement_fn=place)
    assert ours.norm.weight.device_mesh.size() == 2  # type: ignore[union-attr, operator]
    assert_close(train(ours, dist.get_rank()), train(theirs, dist.get_rank()))


@needs_named_axes
@on_ranks(4, names=["dp cp tp", "tp dp cp", "cp tp dp", "dp tp cp"])
def test_named_axes_in_any_order(names: str) -> None:
    axes = names.split()
    mesh = init_device_mesh("cpu", tuple(1 if name == "tp" else 2 for name in axes), mesh_dim_names=tuple(axes))
    placements = [Shard(0) if name == "tp" else Replicate() for name in axes]
    models = [nn.Linear(8, 6), nn.Linear(8, 6)]
    value = torch.arange(48.0).view(6, 8)
    for model, fully_shard in zip(models, (shardwise.fully_shard, torch_fully_shard), strict=True):
        model.bias = None  # type: ignore[assignment]
        model.weight = nn.Parameter(distribute_tensor(value, mesh, placements))
        fully_shard(model, mesh=mesh, dp_mesh_dims=named_axes(shard="dp", replicate="cp"))
    ours, theirs = (model.weight for model in models)
    assert isinstance(ours, DTensor)
    assert isinstance(theirs, DTensor)
    assert ours.placements == theirs.placements
    assert torch.equal(ours.to_local(), theirs.to_local())
    assert torch.equal(ours.full_tensor(), value)


@needs_named_axes
@on_ranks(4)
def test_named_axes_for_each_parameter() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "middle", "inner"))
    axes = named_axes(shard=("outer", "middle"))
    all_axes, one_axis = (_get_mesh_info(mesh, dims) for dims in (axes, named_axes(shard="outer", replicate="middle")))

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), one_axis if parameter.ndim == 1 else all_axes)

    models = [on_whole_mesh(mesh), on_whole_mesh(mesh)]
    for model, fully_shard in zip(models, (shardwise.fully_shard, torch_fully_shard), strict=True):
        fully_shard(model, mesh=mesh, dp_mesh_dims=axes, shard_placement_fn=place)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert isinstance(ours, DTensor)
        assert isinstance(theirs, DTensor)
        assert torch.equal(ours.to_local(), theirs.to_local())
    rank = mesh["outer"].get_local_rank()
    assert_close(train(models[0], rank), plain(make_mlp, rank, 2))


class AnnotatedMLP(MLP):
    """An `MLP` of two layers whose axis "tp" cuts the hidden width, by plain tensors that spmd_types annotates.

    Args:
        mesh: axes "dp" and "tp".
        last_bias: what the last bias is on "tp": alike with alike gradients ("I"), or with parts of them ("R").
        is_checked: whether spmd_types checks each operator of forward.
    """

    def __init__(self, mesh: DeviceMesh, last_bias: str, is_checked: bool):
        import spmd_types

        super().__init__((8, 16, 12))
        self.spmd, self.mesh, self.last_bias, self.is_checked = spmd_types, mesh, last_bias, is_checked
        self.load_state_dict(make_mlp().state_dict())
        cuts = [spmd_types.S(0), spmd_types.S(0), spmd_types.S(1), getattr(spmd_types, last_bias)]
        for (name, parameter), cut in zip(list(self.named_parameters()), cuts, strict=True):
            value = parameter.detach()
            if isinstance(cut, spmd_types.Shard):
                value = value.chunk(2, cut.dim)[mesh["tp"].get_local_rank()].clone()
            own = nn.Parameter(value)
            spmd_types.assert_type(own, {mesh.get_group("tp"): cut})
            self.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = own

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_checked:
            return super().__call__(x)  # type: ignore[no-any-return]
        from spmd_types.checker import typecheck

        dp, tp = (self.mesh.get_group(name) for name in ("dp", "tp"))
        with self.spmd.set_current_mesh(self.mesh), typecheck():
            self.spmd.assert_type(x, {dp: self.spmd.V, tp: self.spmd.I})
            return super().__call__(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.layers
        spmd, tp = self.spmd, self.mesh.get_group("tp")
        hidden = torch.tanh(F.linear(spmd.convert(x, tp, src=spmd.I, dst=spmd.R), first.weight, first.bias))
        part = spmd.reinterpret(F.linear(hidden, last.weight), tp, src=spmd.V, dst=spmd.P)
        if self.last_bias == "R":
            part = part + spmd.convert(last.bias, tp, src=spmd.R, dst=spmd.P)
        output = spmd.all_reduce(part, tp, src=spmd.P, dst=spmd.I)
        return output if self.last_bias == "R" else output + last.bias


@needs_named_axes
@needs_spmd_types
@on_ranks(4, last_bias=["I", "R"], is_checked=[False, True])
def test_parameters_annotated_by_spmd_types(last_bias: str, is_checked: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = AnnotatedMLP(mesh, last_bias, is_checked)
    unit = shardwise.fully_shard(model, mesh=mesh, dp_mesh_dims=named_axes(shard="dp"))
    assert [str(p.placements) for p in unit.parameters()] == [  # type: ignore[attr-defined]
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(Shard(dim=0), Shard(dim=1))",
        "(Shard(dim=0), Replicate())",
    ]
    rank = mesh["dp"].get_local_rank()
    assert_close(train(unit, rank), plain(make_mlp, rank, 2))


@needs_named_axes
@needs_spmd_types
@on_ranks(4, last_bias=["I", "R"])
def test_annotated_by_spmd_types_in_mixed_precision(last_bias: str) -> None:
    """What a cast gives is annotated as what it took: checks find nothing wrong, and the output's type."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    results = []
    for is_checked in (False, True):
        model = AnnotatedMLP(mesh, last_bias, is_checked)
        shardwise.fully_shard(model, mesh=mesh, dp_mesh_dims=named_axes(shard="dp"), mp_policy=policy)
        results.append(train(model, mesh["dp"].get_local_rank()))
    unchecked, checked = results
    assert unchecked.keys() == checked.keys()
    for name, value in unchecked.items():
        assert torch.equal(checked[name], value), name
    output, spmd = model(inputs_for(model, 0)), model.spmd
    assert output.dtype == torch.float64
    assert spmd.get_local_type(output)[spmd.MeshAxis.of(mesh.get_group("tp"))] is spmd.I


@on_ranks(4)
def test_repointing_state_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [optimizer.state[parameter]["momentum_buffer"].full_tensor() for parameter in model.parameters()]
    shardwise.fully_shard(model, mesh=mesh["dp"])
    shardwise.repoint(optimizer)
    for parameter, was in zip(model.parameters(), state, strict=True):
        now = optimizer.state[parameter]["momentum_buffer"]
        assert now.placements == parameter.placements
        assert now.device_mesh == parameter.device_mesh
        assert torch.equal(now.full_tensor(), was)
    model(torch.ones(3, 8)).square().sum().backward()
    optimizer.step()

"""Parameters that say themselves how they are gathered, beside torch FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import Shard

import shardwise
from shardwise import Placements
from shardwise.core import options
from shardwise.core.errors import StateError
from shardwise.core.root import units_of

from ..extensions import InColumns, SentInBfloat16, SentInTwo, SentWithScale, StaysBfloat16, Tells, Told, extend
from ..models import MLP, Transformer, inputs_for, wrap
from ..needs import needs_named_axes
from .harness import on_ranks
from .shared import shared_directory
from .truth import batch

BF16 = torch.bfloat16
EVEN = (12, 24, 12, 12)
"""Widths that 1 to 4 ranks cut evenly."""


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def train(model: nn.Module, steps: int = 3, accumulate: bool = False) -> list[torch.Tensor]:
    """Losses, local gradients and local parameters of some steps; each rank sees its own data."""
    optimizer, shown = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        for part in range(2 if accumulate else 1):
            if accumulate:
                model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            loss = model(inputs_for(model, 100 * step + 10 * part + dist.get_rank())).float().square().mean()
            loss.backward()
        shown += [loss.detach(), *(one.grad.to_local() for one in model.parameters() if one.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return shown + [torch.empty(one.to_local().shape).copy_(one.to_local().detach()) for one in model.parameters()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if dist.get_world_size() <= 2:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)


def small(kind: type[SentInBfloat16], sizes: tuple[int, ...] = EVEN) -> nn.Module:
    torch.manual_seed(0)
    return extend(MLP(sizes), kind)


def check_like_fsdp2(kind: type[SentInBfloat16], param_dtype: Any, reshard: bool) -> None:
    # The order of sums over more than two ranks shows in bfloat16.
    precision = MixedPrecisionPolicy(param_dtype, torch.float32 if dist.get_world_size() > 2 else None)
    options = {"mp_policy": precision, "reshard_after_forward": reshard, "mesh": mesh()}
    ours = train(wrap(small(kind), shardwise.fully_shard, **options))
    assert_same(ours, train(wrap(small(kind), torch_fully_shard, **options)))


@on_ranks(2, 3, 4, kind=[SentInBfloat16, Told, SentInTwo], param_dtype=[None, BF16], reshard=[True, False])
def test_like_fsdp2(kind: type[SentInBfloat16], param_dtype: Any, reshard: bool) -> None:
    check_like_fsdp2(kind, param_dtype, reshard)


@on_ranks(1, kind=[SentInBfloat16, Told])  # FSDP2 itself gives no more than one tensor there
def test_like_fsdp2_on_one_rank(kind: type[SentInBfloat16]) -> None:
    check_like_fsdp2(kind, BF16, True)


@on_ranks(2, 3, 4, accumulate=[False, True])
def test_uneven(accumulate: bool) -> None:
    ours = train(wrap(small(Told, (9, 17, 12, 5)), shardwise.fully_shard, mesh=mesh()), accumulate=accumulate)
    assert_same(ours, train(wrap(small(Told, (9, 17, 12, 5)), torch_fully_shard, mesh=mesh()), accumulate=accumulate))
    # One that gives its rows alone is padded for it.
    assert_same(
        ours, train(wrap(small(SentInBfloat16, (9, 17, 12, 5)), shardwise.fully_shard, mesh=mesh()), 3, accumulate)
    )


@on_ranks(2)
def test_what_it_is_told() -> None:
    precision = MixedPrecisionPolicy(BF16)
    model = wrap(small(Told, (9, 17)), shardwise.fully_shard, mesh=mesh(), mp_policy=precision)
    model(batch(0, 0, 4, 9))
    assert Told.told == (2, (17, 9), (9, 1), type(model.layers[0]), precision)  # type: ignore[index]


@on_ranks(4)
def test_on_two_axes() -> None:
    for names in (None, ("replicate", "shard")):
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        ours = train(wrap(small(SentInBfloat16), shardwise.fully_shard, mesh=two))
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        theirs = train(wrap(small(SentInBfloat16), torch_fully_shard, mesh=named))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"], kind=[SentInBfloat16, Told])
def test_presets(preset: str, kind: type[SentInBfloat16]) -> None:
    def losses(verb: Any, **options: Any) -> list[torch.Tensor]:
        return [one for one in train(wrap(small(kind), verb, mesh=mesh(), **options)) if one.ndim == 0]

    ours = losses(shardwise.fully_shard, placements=getattr(Placements, preset))
    torch.testing.assert_close(ours, losses(torch_fully_shard), rtol=0, atol=0)


@on_ranks(2, 3)
def test_a_transformer_with_embeddings_and_recomputation() -> None:
    def make(verb: Any) -> nn.Module:
        torch.manual_seed(0)
        model = extend(Transformer(width=24, vocabulary=36, length=12), Told)
        return wrap(model, verb, mesh=mesh())

    assert_same(train(make(shardwise.fully_shard)), train(make(torch_fully_shard)))


@on_ranks(2)
def test_cut_on_another_dim() -> None:
    def make(verb: Any) -> nn.Module:
        def place(parameter: nn.Parameter) -> Any:
            return Shard(1) if parameter.ndim > 1 else None

        return wrap(small(SentInTwo), verb, mesh=mesh(), shard_placement_fn=place)

    torch.manual_seed(0)
    plain = wrap(MLP(EVEN), torch_fully_shard, mesh=mesh())
    ours, theirs = train(make(shardwise.fully_shard)), train(plain)
    torch.testing.assert_close(
        [one for one in ours if one.ndim == 0], [one for one in theirs if one.ndim == 0], rtol=1e-4, atol=1e-5
    )


@on_ranks(2)
def test_offloaded() -> None:
    options = {"mesh": mesh(), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    ours = train(wrap(small(SentInBfloat16), shardwise.fully_shard, **options))
    assert_same(ours, train(wrap(small(SentInBfloat16), torch_fully_shard, **options)))


def pre_all_gather(self: torch.Tensor, *_: Any) -> Any:
    return (self.to(BF16),), None


def post_all_gather(self: torch.Tensor, outputs: Any, _: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    value = outputs[0].to(param_dtype)
    if out is None:
        return value, (value,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value)
    return None


def told_alone(self: torch.Tensor, mesh: Any) -> Any:
    return pre_all_gather(self, mesh)


@on_ranks(2, from_meta=[False, True])
def test_methods_hung_on_plain_shards(from_meta: bool) -> None:
    def make(verb: Any) -> nn.Module:
        with torch.device("meta" if from_meta else "cpu"):
            torch.manual_seed(0)
            model = MLP(EVEN)
        wrap(model, verb, mesh=mesh())
        if from_meta:
            model.to_empty(device="cpu")
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.to_local().copy_(
                    torch.linspace(-1, 1, parameter.to_local().numel()).view_as(parameter.to_local())
                )
        for parameter in model.parameters():
            if parameter.ndim > 1:
                local = parameter._local_tensor  # type: ignore[attr-defined]
                local.fsdp_pre_all_gather = told_alone.__get__(local)
                local.fsdp_post_all_gather = post_all_gather.__get__(local)
        return model

    assert_same(train(make(shardwise.fully_shard)), train(make(torch_fully_shard)))


@on_ranks(2)
def test_a_class_whose_parts_are_plain_tensors() -> None:
    """They are gathered as such."""

    class Falls(SentInBfloat16):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            return result.data_inside if func is torch.ops.aten.new_zeros.default else result

    torch.manual_seed(0)
    plain = train(wrap(MLP(EVEN), shardwise.fully_shard, mesh=mesh()))
    assert_same(train(wrap(small(Falls), shardwise.fully_shard, mesh=mesh())), plain)


@on_ranks(2)
def test_frozen_ones() -> None:
    def make(verb: Any) -> nn.Module:
        model = small(SentInBfloat16)
        for parameter in model.parameters():
            parameter.requires_grad = parameter.ndim == 1
        return wrap(model, verb, mesh=mesh())

    assert_same(train(make(shardwise.fully_shard)), train(make(torch_fully_shard)))


@on_ranks(2)
def test_memory_is_freed() -> None:
    model = wrap(small(SentInBfloat16), shardwise.fully_shard, mesh=mesh())
    with torch.no_grad():
        model.layers[0].unshard()  # type: ignore[operator]
        weight = model.layers[0].weight
        assert weight.untyped_storage().nbytes() == 4 * weight.numel()
        model.layers[0].reshard()  # type: ignore[operator]
    assert weight.untyped_storage().nbytes() == 0


@on_ranks(2, of=["class", "methods"])
def test_checkpoints_and_whole_values(of: str) -> None:
    def make() -> nn.Module:
        model = wrap(small(SentInBfloat16) if of == "class" else MLP(EVEN), shardwise.fully_shard, mesh=mesh())
        for parameter in model.parameters() if of == "methods" else ():
            hang(parameter)
        return model

    model = make()
    train(model)
    whole = shardwise.full_state_dict(model, rank0_only=False)
    for name, parameter in model.named_parameters():
        local = torch.empty(parameter.to_local().shape).copy_(parameter.to_local().detach())
        rows = len(local)
        torch.testing.assert_close(whole[name][dist.get_rank() * rows : (dist.get_rank() + 1) * rows], local)
    with shared_directory() as directory:
        optimizer = torch.optim.AdamW(model.parameters())
        shardwise.save(directory / "run", model=model, optimizer=optimizer)
        other = make()
        shardwise.load(directory / "run", model=other, optimizer=torch.optim.AdamW(other.parameters()))
        again = shardwise.full_state_dict(other, rank0_only=False)
    for name, value in whole.items():
        assert torch.equal(value, again[name])


@on_ranks(1, 2, preset=["ddp", "zero3"])
def test_whole_values_are_plain_tensors_at_any_world_size(preset: str) -> None:
    model = wrap(small(SentInBfloat16), shardwise.fully_shard, mesh=mesh(), placements=getattr(Placements, preset))
    torch.manual_seed(0)
    expected = MLP(EVEN).state_dict()
    for name, value in shardwise.full_state_dict(model, rank0_only=False).items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, expected[name])


@on_ranks(2)
def test_init_on_meta() -> None:
    torch.manual_seed(0)
    expected = dict(MLP(EVEN).state_dict())
    with shardwise.init_on_meta():
        model = MLP(EVEN)
    extend(model, SentInBfloat16)
    wrap(model, shardwise.fully_shard, mesh=mesh())
    model.to_empty(device="cpu")
    shardwise.load_full_state_dict(model, expected, broadcast_from_rank0=False)
    assert all(
        torch.equal(value, expected[name]) for name, value in shardwise.full_state_dict(model, rank0_only=False).items()
    )


def losses_of(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    return [one for one in train(model, steps) if one.ndim == 0]


class Parts(nn.Module):
    """The first rank uses another parameter than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(StaysBfloat16(torch.ones(4, 4))), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(BF16) @ self.weight if dist.get_rank() == 0 else x * self.bias


@on_ranks(2, 3, reduced_in=[BF16, torch.float32])
def test_gradients_of_another_dtype_than_the_one_asked_for(reduced_in: torch.dtype) -> None:
    """They are reduced in their own dtype before torch 2.15, in that of the shards from there on."""
    model = Parts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "REDUCES_IN_DTYPE_OF_SHARDS", reduced_in == torch.float32)
        shardwise.fully_shard(model, mesh=mesh())
        for _ in range(2):
            model(torch.ones(2, 4)).float().sum().backward()
    world = dist.get_world_size()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 4.0).to(reduced_in).div(world).float())
    torch.testing.assert_close(model.bias.grad.full_tensor(), torch.full((4,), 4.0 * (world - 1) / world))


@on_ranks(1, 2, 3, sizes=[EVEN, (12, 3, 1, 12)], gathers=["default", "custom"])
def test_scales_without_dims_and_empty_tensors(sizes: tuple[int, ...], gathers: str) -> None:
    model = small(SentWithScale, sizes)
    if dist.get_world_size() > 1 and any(size % dist.get_world_size() for size in sizes[1:]):
        wrap(model, shardwise.fully_shard, mesh=mesh())
        with pytest.raises(StateError, match=r"'layers.\d.weight'.*uneven"):
            model(batch(0, 0, 4, sizes[0]))
        return
    wrap(model, shardwise.fully_shard, mesh=mesh())
    if gathers == "custom":
        for layer in model.layers:
            layer.set_custom_all_gather(DefaultAllGather())  # type: ignore[operator]
    torch.manual_seed(0)
    plain = wrap(MLP(sizes), torch_fully_shard, mesh=mesh())
    torch.testing.assert_close(losses_of(model), losses_of(plain), rtol=1e-2, atol=1e-3)


@on_ranks(2, preset=["ddp", "zero1"])
def test_collectives_of_hooks_go_over_the_ranks_that_parts_are_cut_over(preset: str) -> None:
    ours = wrap(small(SentWithScale), shardwise.fully_shard, mesh=mesh(), placements=getattr(Placements, preset))
    torch.manual_seed(0)
    plain = wrap(MLP(EVEN), torch_fully_shard, mesh=mesh())
    torch.testing.assert_close(losses_of(ours), losses_of(plain), rtol=1e-2, atol=1e-3)


@on_ranks(2)
def test_scales_beside_matrices_that_are_cut_on_another_dim() -> None:
    def place(parameter: nn.Parameter) -> Any:
        return Shard(1) if parameter.ndim > 1 else None

    ours = wrap(small(SentWithScale), shardwise.fully_shard, mesh=mesh(), shard_placement_fn=place)
    torch.manual_seed(0)
    plain = wrap(MLP(EVEN), torch_fully_shard, mesh=mesh())
    torch.testing.assert_close(losses_of(ours), losses_of(plain), rtol=1e-2, atol=1e-3)


@on_ranks(2)
def test_memory_that_is_a_view() -> None:
    model = wrap(small(InColumns), shardwise.fully_shard, mesh=mesh())
    model.layers[0].unshard()  # type: ignore[operator]
    columns, nbytes = model.layers[0].weight, model.layers[0].weight.untyped_storage().nbytes()
    for _ in range(2):
        model.layers[0].reshard()  # type: ignore[operator]
        assert columns.untyped_storage().nbytes() == 0
        model.layers[0].unshard()  # type: ignore[operator]
        assert columns.untyped_storage().nbytes() == nbytes
    model.layers[0].reshard()  # type: ignore[operator]
    assert_same(train(model), train(wrap(small(SentInBfloat16), shardwise.fully_shard, mesh=mesh())))


@on_ranks(2, preset=["ddp", "zero1", "zero2"])
def test_writes_to_what_a_parameter_consists_of_are_noticed(preset: str) -> None:
    model = wrap(small(Tells), shardwise.fully_shard, mesh=mesh(), placements=getattr(Placements, preset))
    with torch.no_grad():
        before = model(torch.ones(2, 12))
        model.layers[-1].reshard()  # type: ignore[operator]
        weight: Any = model.layers[-1].weight
        weight._local_tensor.data_inside.zero_()
        after = model(torch.ones(2, 12))
    bias = shardwise.full_state_dict(model, rank0_only=False)["layers.2.bias"]
    assert not torch.equal(before, after)
    assert torch.equal(after, bias.expand(2, 12))


def hang(parameter: Any) -> None:
    local = parameter._local_tensor
    local.fsdp_pre_all_gather = told_alone.__get__(local)
    local.fsdp_post_all_gather = post_all_gather.__get__(local)


@on_ranks(2, preset=["ddp", "zero1", "zero3"])
def test_methods_hung_on_after_the_first_forward(preset: str) -> None:
    def make(late: bool) -> nn.Module:
        torch.manual_seed(0)
        model = wrap(MLP(EVEN), shardwise.fully_shard, mesh=mesh(), placements=getattr(Placements, preset))
        if late:
            model(batch(0, 0, 4, 12)).sum().backward()
            model.zero_grad()
        for layer in model.layers:
            layer.reshard()  # type: ignore[operator]
            hang(layer.weight)
        return model

    assert_same(train(make(True)), train(make(False)))


@on_ranks(2)
def test_half_an_extension_stays_an_error() -> None:
    model = wrap(MLP(EVEN), shardwise.fully_shard, mesh=mesh())
    local: Any = model.layers[0].weight._local_tensor
    local.fsdp_pre_all_gather = told_alone.__get__(local)
    for _ in range(3):
        with pytest.raises(TypeError, match=r"'layers.0.weight' is a Tensor with fsdp_pre_all_gather and without"):
            model(batch(0, 0, 4, 12))
    local.fsdp_post_all_gather = post_all_gather.__get__(local)
    assert model(batch(0, 0, 4, 12)).isfinite().all()


@on_ranks(2)
def test_tied_to_a_plain_one_after_both_were_sharded() -> None:
    model = small(SentInBfloat16, (12, 12, 12))
    model.layers[0].weight = nn.Parameter(torch.empty(12, 12).copy_(model.layers[0].weight.detach()))
    wrap(model, shardwise.fully_shard, mesh=mesh())
    model.layers[1].weight = model.layers[0].weight
    for step in range(2):
        model(batch(step, 0, 4, 12)).sum().backward()
    assert all(unit.groups[0].shards.is_adopted for unit in units_of(*model.layers))  # not taken over anew each time


@on_ranks(2)
def test_nothing_is_sharded_after_an_error() -> None:
    class Asks(SentInBfloat16):
        def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    model = small(SentInBfloat16)
    model.layers[-1].weight = nn.Parameter(Asks(model.layers[-1].weight.detach().data_inside))  # type: ignore[operator]
    before = dict(model.named_parameters())
    with pytest.raises(TypeError, match=r"'layers.2.weight' is a Asks .*takes other"):
        shardwise.fully_shard(model, mesh=mesh())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@needs_named_axes
@on_ranks(4)
def test_nothing_is_sharded_after_an_error_of_one_mesh() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common as results

    model = MLP(EVEN)
    last: Any = model.layers[-1]
    last.weight = small(SentInBfloat16).layers[-1].weight  # type: ignore[index, union-attr]
    before, other = dict(model.named_parameters()), results.FSDPMeshInfo(mesh(), shard_mesh_dim=0)
    with pytest.raises(ValueError, match=r"'layers.2.weight' is a SentInBfloat16 .*cannot be resharded to a smaller"):
        shardwise.fully_shard(
            model,
            mesh=mesh(),
            reshard_after_forward=2,
            shard_placement_fn=lambda one: (
                results.ShardPlacementResult(Shard(0), other) if one is last.weight else None
            ),
        )
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@on_ranks(1)
def test_whole_values_of_a_class_that_no_plain_tensor_copies() -> None:
    class Alone(SentInBfloat16):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
                raise NotImplementedError("on purpose")
            return super().__torch_dispatch__(func, types, args, kwargs)

    model = wrap(small(Alone), shardwise.fully_shard, mesh=mesh())
    value: Any = shardwise.full_state_dict(model)["layers.0.weight"]
    torch.manual_seed(0)
    assert torch.equal(value.data_inside, MLP(EVEN).layers[0].weight)  # type: ignore[arg-type]


@on_ranks(2)
def test_errors_of_hooks_name_the_parameter_and_leave_no_memory() -> None:
    class Wrong(SentInBfloat16):
        gives: Any = None
        sends: Any = None

        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return super().fsdp_pre_all_gather(mesh) if Wrong.sends is None else Wrong.sends(self.data_inside)

        def fsdp_post_all_gather(self, *arguments: Any, out: Any = None) -> Any:
            if Wrong.gives is not None:
                return Wrong.gives
            given = super().fsdp_post_all_gather(*arguments, out=out)
            return given if out is not None else [given[0], [*given[1]]]  # lists will do

    model = wrap(small(Wrong), shardwise.fully_shard, mesh=mesh())
    for gives, kind, message in (
        ((torch.ones(2), ()), StateError, r"'layers.0.weight' gave a tensor of shape \(2,\), .*\(24, 12\)"),
        ((torch.ones(24, 12), None), TypeError, r"(?s)'layers.0.weight' gave .*it has to give a pair"),
    ):
        Wrong.gives = gives
        with pytest.raises(kind, match=message):
            model(batch(0, 0, 4, 12))
        buffers: Any = units_of(model.layers[0])[0].groups[0].shards.buffers
        assert not any(one.untyped_storage().nbytes() for buffer in buffers for one in getattr(buffer, "_outputs", ()))
    Wrong.gives = None
    model(batch(0, 0, 4, 12))
    for sends, kind, message in (
        (lambda inside: inside, TypeError, r"(?s)'layers.0.weight' gave .*a pair, of the tensors to gather"),
        (lambda inside: ((inside,), None), StateError, r"'layers.0.weight' gave tensors of other sizes or dtypes than"),
    ):
        Wrong.sends = sends
        with pytest.raises(kind, match=message):
            model(batch(0, 0, 4, 12))
    Wrong.sends = None
    assert_same(train(model), train(wrap(small(SentInBfloat16), shardwise.fully_shard, mesh=mesh())))


@on_ranks(2)
def test_errors() -> None:
    for lacking in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        model = MLP(EVEN)
        setattr(model.layers[0].weight, lacking, None)
        with pytest.raises(TypeError, match=r"'weight' is a Parameter with fsdp_\w+ and without"):
            shardwise.fully_shard(model.layers[0], mesh=mesh())
    with pytest.raises(ValueError, match=r"reshard_after_forward=|cannot be resharded to a smaller world|as an int"):
        shardwise.fully_shard(small(SentInBfloat16), mesh=mesh(), reshard_after_forward=3)

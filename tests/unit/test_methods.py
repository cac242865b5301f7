"""Every method of FSDPModule, by its effect on collectives, bytes or gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise
from shardwise import FSDPModule, Placements, fully_shard
from shardwise.core import comm
from shardwise.core.comm import Comm, new_group_of
from shardwise.core.errors import StateError
from shardwise.core.gradient import Scale, gradient_scale
from shardwise.core.root import unit_of, units_of

from ..models import Stack, Transformer, inputs_for
from ..needs import needs_results
from .test_memory import Collectives, build, live_bytes, local_bytes

Mesh = Callable[..., DeviceMesh]


def run(model: nn.Module) -> tuple[Collectives, Collectives]:
    """Collectives of one forward and one backward."""
    with Collectives() as forward:
        loss = model(inputs_for(model, 0)).sum()
    with Collectives() as backward:
        loss.backward()
    return forward, backward


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def test_every_method_of_torch_is_here() -> None:
    from torch.distributed.fsdp import FSDPModule as Theirs

    own = vars(FSDPModule)
    missing = {name for name in vars(Theirs) if not name.startswith("_") and name not in own}
    # torch's own calls ours, with its deprecation warning
    assert missing == {"set_reduce_scatter_divide_factor"}


def test_modules_keep_private_names_of_their_own(fake_mesh: Mesh) -> None:
    """None of theirs means another thing once they are wrapped: only torch's own are taken."""

    class Named(nn.Linear):
        _unit = "cm"

        def __init__(self) -> None:
            super().__init__(3, 3)
            self._units, self._groups, self._options = 64, 8, {"bias": True}

        def _check_root(self) -> str:
            return self._unit

    model: Any = fully_shard(Named(), mesh=fake_mesh(2))
    assert (model._units, model._groups, model._options, model._check_root()) == (64, 8, {"bias": True}, "cm")
    model._unit = "m"
    model(torch.randn(2, 3)).sum().backward()
    model.set_requires_gradient_sync(False)
    model.zero_grad()
    assert model._check_root() == "m"
    private = {name for name in vars(FSDPModule) if name.startswith("_") and not name.startswith("__")}
    assert private - {"_abc_impl"} <= {*vars(TorchFSDPModule), *vars(nn.Module)}


def test_methods_of_a_newer_torch_are_refused(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule as Theirs

    def set_of_each_group(self: Any, value: bool) -> None:
        for group in self._get_fsdp_state()._fsdp_param_groups:
            group.newer = value

    def set_what_is_read(self: Any, value: bool) -> None:
        for group in self._get_fsdp_state()._fsdp_param_groups:
            group.newer.value = value

    model = build(fake_mesh(2))
    for set_newer in (lambda self, value: self._get_fsdp_state().set(value), set_of_each_group, set_what_is_read):
        monkeypatch.setattr(Theirs, "set_newer", set_newer, raising=False)
        with pytest.raises(AttributeError, match="newer than this version of shardwise"):
            model.set_newer(True)  # type: ignore[operator]


def test_class_and_name(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    assert type(model).__name__ == "FSDPTransformer"
    assert str(type(model)) == str(Transformer)  # by which transformers finds the outputs that a class records
    assert type(model).__mro__[1] is FSDPModule
    assert type(model.layers[0]) is type(model.layers[1])
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    assert type(type(model.layers[0])(16)).__name__ == "Block"


def test_classes_of_torch_and_of_registries(fake_mesh: Mesh) -> None:
    """torch.compile and torch.fx know torch's own modules by place; a base may refuse subclasses of one name."""
    mesh = fake_mesh(2)
    linear: Any = shardwise.fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    assert type(linear).__module__ == "shardwise.core.module"
    names: set[str] = set()

    class Registered(torch.nn.Module):
        def __init_subclass__(cls) -> None:
            assert cls.__qualname__ not in names
            names.add(cls.__qualname__)

    class Own(Registered):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    own: Any = shardwise.fully_shard(Own(), mesh=mesh)
    assert str(type(own)) == str(Own)


def test_unshard_and_reshard(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    layer = model.layers[0]
    with Collectives() as count:
        assert layer.unshard() is None  # type: ignore[operator]
        layer.unshard()  # type: ignore[operator]
    assert count.gathers == 1
    assert not isinstance(layer.up.weight, DTensor)
    assert live_bytes(model) > local_bytes(model)
    layer.reshard()  # type: ignore[operator]
    assert isinstance(layer.up.weight, DTensor)
    assert live_bytes(model) == local_bytes(model)


def test_kept_storage(fake_mesh: Mesh) -> None:
    """The same addresses in every use, and the values of the time."""
    model = build(fake_mesh(4))
    model.set_keep_unsharded_storage(True)
    addresses, layer = [], model.layers[0]
    for _ in range(2):
        with Collectives() as count:
            layer.unshard()  # type: ignore[operator]
        assert count.gathers == 1
        addresses.append(layer.up.weight.data_ptr())
        layer.reshard()  # type: ignore[operator]
        assert isinstance(layer.up.weight, DTensor)
        assert live_bytes(model) > local_bytes(model)
    assert addresses[0] == addresses[1] != 0
    model.set_keep_unsharded_storage(False, recurse=False)
    layer.unshard()  # type: ignore[operator]
    layer.reshard()  # type: ignore[operator]
    assert live_bytes(model) > local_bytes(model)
    model.set_keep_unsharded_storage(False)
    layer.unshard()  # type: ignore[operator]
    layer.reshard()  # type: ignore[operator]
    assert live_bytes(model) == local_bytes(model)


def test_unshard_handle(fake_mesh: Mesh) -> None:
    layer = build(fake_mesh(4)).layers[0]
    handle = layer.unshard(async_op=True)  # type: ignore[operator]
    assert isinstance(handle, shardwise.UnshardHandle)
    assert isinstance(handle, torch.distributed.fsdp.UnshardHandle)
    assert isinstance(layer.up.weight, DTensor)
    handle.wait()
    handle.wait()
    assert not isinstance(layer.up.weight, DTensor)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("is_written", [False, True])
def test_unsharding_gathers_once_for_each_update(fake_mesh: Mesh, preset: str, is_written: bool) -> None:
    """And again if it was on its way while the shards were written."""
    layer: Any = fully_shard(nn.Linear(4, 4), mesh=fake_mesh(4), placements=preset)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        with Collectives() as count:
            weight = layer.weight
            layer.unshard(async_op=True)
            if is_written:
                weight.to_local().detach().add_(1)
            layer(torch.ones(2, 4)).sum().backward()
        assert count.gathers == 1 + is_written
        optimizer.step()
        optimizer.zero_grad()


def test_unsharding_what_is_gathered_already(fake_mesh: Mesh) -> None:
    """It is gathered again if the shards were written since, also before the handle was waited for."""
    model, mesh = Stack([nn.Linear(4, 4)], 4), fake_mesh(4)
    layer: Any = fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    layer.set_reshard_after_backward(False)
    weight, found = layer.weight, []
    for is_written in (False, True):
        model(torch.ones(2, 4)).sum().backward()
        with Collectives() as count, torch.no_grad():
            handle = layer.unshard(async_op=True)
            if is_written:
                weight.to_local().add_(1)
            handle.wait()
            layer(torch.ones(2, 4))
        found.append(count.gathers)
    assert found == [0, 1]


def trained(mesh: DeviceMesh) -> tuple[Stack, Any, torch.Tensor]:
    """A model whose order is recorded, its last unit, and an input."""
    model, x = Stack([nn.Linear(4, 4), nn.Linear(4, 4)], 4), torch.ones(2, 4)
    for unit in (model.layers[0], model.layers[1], model):
        fully_shard(unit, mesh=mesh)
    for _ in range(3):
        model(x).sum().backward()
    return model, model.layers[1], x


def test_what_the_user_gathers_waits_for_the_handle(fake_mesh: Mesh) -> None:
    """A forward that did not reach the unit, where earlier ones did, freed it as its prefetch, as backward did."""
    model, last, x = trained(fake_mesh(2))
    for runs_backward in (False, True):
        handle = last.unshard(async_op=True)
        loss = model(x, stop_after=1).sum()
        if runs_backward:
            loss.backward()
        handle.wait()
        assert not isinstance(last.weight, DTensor)
        last.reshard()


def test_what_the_user_gathers_stays_without_the_handle(fake_mesh: Mesh) -> None:
    """Whether that exists still may differ between ranks, of which then only some gathered again."""
    model, last, x = trained(fake_mesh(2))
    assert last.unshard(async_op=True) is not None  # and gone
    model(x, stop_after=1).sum().backward()
    with Collectives() as counted:
        last.unshard()
    assert not counted.gathers
    last.reshard()


def test_a_gather_with_others_fails_for_all_of_them(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for another of its units is told, and the next use gathers again."""
    mesh, layers = fake_mesh(2), [nn.Linear(4, 4) for _ in range(20)]
    monkeypatch.setattr("shardwise.core.batch.JOINT_BYTES", 1000)  # of three layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, placements="zero1")
    model: Any = fully_shard(nn.Sequential(*layers), mesh=mesh, placements="zero1")
    optimizer, x, handles = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4), list[Any]()
    model(x).sum().backward()
    optimizer.step()
    gather, failing = Comm.all_gather, MagicMock()
    failing.wait.side_effect = ConnectionError("on purpose")

    def all_gather(own: Comm, outputs: Any, inputs: Any, purpose: str) -> Any:
        return [failing] if purpose == "3, 4, 5" else gather(own, outputs, inputs, purpose)

    hook = layers[0].register_forward_hook(lambda *_: handles.extend(model[at].unshard(async_op=True) for at in (4, 5)))
    with patch.object(Comm, "all_gather", all_gather), pytest.raises(ConnectionError, match="on purpose"):
        model(x)
    hook.remove()
    with pytest.raises(StateError, match=r"unit '4' was gathered together with others, .* call unshard\(\) again"):
        handles[0].wait()
    again = model[5].unshard(async_op=True)
    for handle in (again, handles[1]):
        handle.wait()
    model(x).sum().backward()


def test_unshard_before_the_root_ran_does_not_hide_the_root(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model.layers[1].unshard()  # type: ignore[operator]
    forward, _ = run(model)
    assert forward.gathers == 3
    assert unit_of(model).is_root  # type: ignore[union-attr]
    assert not unit_of(model.layers[1]).is_root  # type: ignore[union-attr]


def test_set_requires_gradient_sync(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    _, backward = run(model)
    assert backward.reductions == 0
    assert grads(model) == [None] * len(grads(model))
    model.set_requires_gradient_sync(True, recurse=False)  # type: ignore[operator]
    _, backward = run(model)
    assert backward.reductions == 1
    assert model.norm.weight.grad is not None
    assert model.layers[0].up.weight.grad is None
    assert not model.layers[0].reduce_grads
    model.layers[0].reduce_grads = True
    assert run(model)[1].reductions == 2


@pytest.mark.parametrize(
    ("setter", "value", "fewer"),
    [
        ("set_requires_gradient_sync", False, "reductions"),
        ("set_requires_all_reduce", False, "all_reduces"),
        ("set_reshard_after_forward", False, "gathers"),
        ("set_reshard_after_backward", False, "gathers"),
    ],
)
def test_setters_of_one_unit_or_of_all_in_it(fake_mesh: Mesh, setter: str, value: bool, fewer: str) -> None:
    """As those of torch FSDP2."""
    mesh, counts = fake_mesh(2, 2), []
    for shard in (fully_shard, torch_fully_shard):
        for options in ({}, {"recurse": False}, {"recurse": True}):
            model: Any = Transformer(tied=True)
            for module in (*model.layers, model):
                shard(module, mesh=mesh)
            run(model)
            getattr(model, setter)(value, **options)
            run(model)
            phases = run(model)
            counts.append([(one.gathers, one.reductions, one.all_reduces) for one in phases])
            counts[-1].append(sum(getattr(one, fewer) for one in phases))  # type: ignore[arg-type]
    ours, theirs = counts[:3], counts[3:]
    assert ours == theirs
    assert ours[0] == ours[2] != ours[1]
    assert ours[1][-1] > ours[0][-1]


class Half(nn.Module):
    """Of which one layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.skipif(
    not hasattr(TorchFSDPModule, "set_reduce_scatter_unused_params"), reason=f"not in torch {torch.__version__}"
)
def test_zeros_for_what_is_unused_of_one_unit_or_of_all_in_it(fake_mesh: Mesh) -> None:
    """As torch FSDP2 has them."""
    mesh, found = fake_mesh(2), []
    for shard in (fully_shard, torch_fully_shard):
        for options in ({}, {"recurse": False}, {"recurse": True}):
            model: Any = nn.Sequential(Half(), Half())
            model.unused = nn.Parameter(torch.ones(3))
            for module in (*model, model):
                shard(module, mesh=mesh)
            model[1].set_reduce_scatter_unused_params(True)
            model.set_reduce_scatter_unused_params(False, **options)
            model(torch.ones(2, 4)).sum().backward()
            found.append([name for name, parameter in model.named_parameters() if parameter.grad is None])
    assert found[:3] == found[3:]
    assert found[0] == found[2] != found[1]
    assert "1.unused.weight" in found[0]
    assert "1.unused.weight" not in found[1]


def test_set_reshard_after_backward(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    parameters = list(model.parameters())
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    assert not model.layers[2].reshard_after_backward
    run(model)
    forward, _ = run(model)
    assert forward.gathers == 0
    with torch.no_grad():  # what changed since is gathered again
        parameters[3].mul_(2)
    assert run(model)[0].gathers == 1
    model.layers[0].reshard_after_backward = True
    run(model)
    assert run(model)[0].gathers == 1


def test_attributes_of_a_root_without_parameters(fake_mesh: Mesh) -> None:
    """It has none to reduce or reshard, and reads as it was set all the same."""
    mesh = fake_mesh(2)
    model: Any = nn.Sequential(nn.Linear(2, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    assert model.reduce_grads
    assert model.reshard_after_backward
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    assert not model.reduce_grads
    assert not model.reshard_after_backward
    model.reduce_grads = model.reshard_after_backward = True
    assert model.reduce_grads
    assert model.reshard_after_backward
    assert not model[0].reduce_grads
    assert not model[0].reshard_after_backward


def test_set_reshard_after_forward(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model.set_reshard_after_forward(False)  # type: ignore[operator]
    assert run(model)[1].gathers == 0
    model.set_reshard_after_forward(True)  # type: ignore[operator]
    assert run(model)[1].gathers == 4
    model.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
    assert run(model)[1].gathers == 3
    with pytest.raises(ValueError, match="takes a bool, not 2"):
        model.set_reshard_after_forward(2)  # type: ignore[operator]


def test_set_unshard_in_backward(fake_mesh: Mesh) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)
            self.layers = [self.embed, self.linear]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.embed(x))

    mesh, model = fake_mesh(2), Head()
    for module in (model.embed, model.linear, model):
        fully_shard(module, mesh=mesh)
    model.embed.set_unshard_in_backward(False)  # type: ignore[operator]
    for _ in range(2):
        loss = model(torch.tensor([1, 2])).sum()
        with Collectives() as backward:
            loss.backward()
        assert (backward.gathers, backward.reductions) == (1, 2)


def test_set_is_last_backward(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model.set_is_last_backward(False)  # type: ignore[operator]
    run(model)
    context = unit_of(model).context  # type: ignore[union-attr]
    assert context is not None
    assert None not in grads(model)  # all are there after every backward
    assert context.order._backward
    model.set_is_last_backward(True)  # type: ignore[operator]
    run(model)
    assert not context.order._backward


def names_of_gathers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that are gathered from now on, as they are."""
    order: list[str] = []
    start = shardwise.core.group.ParamGroup._issue_gather

    def spy(group: Any, outputs: Any, inputs: Any) -> Any:
        order.append(group.name)
        return start(group, outputs, inputs)

    monkeypatch.setattr(shardwise.core.group.ParamGroup, "_issue_gather", spy)
    return order


def test_prefetch_setters_choose_what_is_gathered(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(fake_mesh(4))
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers)  # type: ignore[operator]
    layers[2].set_modules_to_backward_prefetch([layers[0]])  # type: ignore[operator]
    order = names_of_gathers(monkeypatch)
    output = model(inputs_for(model, 0))
    assert order == ["Transformer (root)", "layers.0", "layers.1", "layers.2"]
    order.clear()
    output.sum().backward()
    assert order == ["layers.2", "layers.0", "layers.1"]
    with pytest.raises(ValueError, match="takes modules wrapped by fully_shard, not Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])  # type: ignore[operator]


def test_units_go_by_themselves_where_the_user_chooses_what_is_gathered_when(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.core.batch.MANY", 1)
    model = build(fake_mesh(2))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])  # type: ignore[operator]
    for _ in range(3):
        run(model)
    order = names_of_gathers(monkeypatch)
    model(inputs_for(model, 0))
    assert order == ["Transformer (root)", "layers.0", "layers.2", "layers.1"]


@pytest.mark.parametrize(
    ("widths", "most_ahead"),
    [([64, 64, 64, 64], 1), ([256, 64, 64, 64, 256, 64], 3), ([64, 64, 300, 64, 64, 64, 64, 64], 4), ([32, 256], 1)],
)
def test_as_many_small_units_are_gathered_ahead_as_one_large_one_takes(
    fake_mesh: Mesh, widths: list[int], most_ahead: int
) -> None:
    mesh = fake_mesh(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ahead: list[tuple[int, int, int]] = []

    def look(*_: Any) -> None:
        units = [unit_of(layer) for layer in model]
        sizes = [unit.gathered_bytes for unit in units if unit.groups[0].is_gathering]
        ahead.append((len(sizes), sum(sizes), max(unit.gathered_bytes for unit in units)))

    for layer in model:
        layer[0].register_forward_pre_hook(look)
        layer[1].register_full_backward_hook(look)
    for _ in range(2):
        ahead.clear()
        model(torch.randn(3, 8)).sum().backward()
    assert max(count for count, _, _ in ahead) == most_ahead
    assert all(size <= largest for _, size, largest in ahead)
    assert len(ahead) == 2 * len(widths)


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5, 7], [0, 3, 6, 1, 4, 7, 2, 5]])
def test_no_other_order_takes_more_memory(fake_mesh: Mesh, order: list[int]) -> None:
    """Than one unit more: what was gathered ahead and did not come is freed once there are two of them; collectives
    were issued in vain."""
    mesh = fake_mesh(2)
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ahead: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(
            lambda *_: ahead.append(sum(group.is_gathering for unit in units_of(model) for group in unit.groups))
        )
    for _ in range(3):
        model(torch.randn(3, 16)).sum().backward()
    assert ahead[8:] == ([1] * 7 + [0]) * 2
    layers = list(model)
    model.forward = lambda x: nn.Sequential(*[layers[index] for index in order])(x)
    ahead.clear()
    model(torch.randn(3, 16)).sum().backward()
    assert len(ahead) == 8
    assert max(ahead) == 2
    assert not any(group.is_gathering for unit in units_of(model) for group in unit.groups)


def test_what_follows_a_second_use_is_gathered_after_it(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of it, it would be in the way of what is needed first, and is not gathered before its first use is over."""
    mesh = fake_mesh(2)
    model: Any = nn.Module()
    for name, size in (("a", 20), ("b", 8), ("c", 8), ("d", 2)):
        setattr(model, name, fully_shard(nn.Linear(8, size), mesh=mesh))

    def forward(x: torch.Tensor) -> torch.Tensor:
        for name in "abcbd":
            x = x + getattr(model, name)(x).sum()
        return x

    model.forward = forward
    fully_shard(model, mesh=mesh)
    order = names_of_gathers(monkeypatch)
    for _ in range(2):
        order.clear()
        loss = model(torch.ones(2, 8)).sum()
        assert order == [*"abcbd"]
        order.clear()
        loss.backward()
        assert order == [*"dbcba"]


def scaled_layers(mesh: Any, context: Any, *, of_root: bool, **options: Any) -> Any:
    """Three layers that are given a context, in a module with a parameter of its own that may be given it too."""
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model.scale = nn.Parameter(torch.ones(8))
    model.forward = lambda x: nn.Sequential.forward(model, x * model.scale)
    for layer in model:
        fully_shard(layer, mesh=mesh, comm_ctx=context, **options)
    return fully_shard(model, mesh=mesh, comm_ctx=context if of_root else None, **options)


@pytest.mark.parametrize("of_root", [False, True])
@pytest.mark.parametrize("trees", [1, 2])
def test_reductions_start_as_backward_comes_in_a_context_that_was_given(
    fake_mesh: Mesh, of_root: bool, trees: int
) -> None:
    """Those of replicated units, in one order on all ranks: the root, which joins that context last, is not first, nor
    are the outermost of several that no root contains."""
    mesh, context = fake_mesh(4), shardwise.FSDPCommContext("cpu")
    options = {"of_root": of_root, "placements": Placements.ddp}
    model: Any = nn.Sequential(*[scaled_layers(mesh, context, **options) for _ in range(trees)])
    started: list[int] = []
    with Collectives() as count:
        for layer in (layer for tree in model for layer in tree):
            layer.register_full_backward_pre_hook(lambda *_: started.append(count.all_reduces))
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert started == [0, 1, 2, 4, 5, 6][: 3 * trees]
    assert count.all_reduces == 4 * trees


def test_a_unit_around_all_others_of_a_context_that_was_given_is_the_root(fake_mesh: Mesh) -> None:
    mesh, context = fake_mesh(4), shardwise.FSDPCommContext("cpu")
    model = scaled_layers(mesh, context, of_root=True)
    assert not context.has_root, "others may be given it until it runs"
    with Collectives() as count:
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    root, *layers = (unit_of(module) for module in (model, *model))
    assert context.has_root
    assert root.is_root
    assert root.context is context
    assert [unit.name for unit in layers] == ["0", "1", "2"]
    assert not any(unit.is_root for unit in layers)
    assert count.gathers == 4 + 3, "by default the root stays gathered until its backward, and others do not"
    with pytest.raises(RuntimeError, match="called on '0'; call it on the root"):
        model[0].reset_iter_state()


def test_units_of_a_context_that_was_given_have_no_root_beside_others(fake_mesh: Mesh) -> None:
    """Their forwards are one pass, in which each tells what comes next."""
    mesh, context = fake_mesh(4), shardwise.FSDPCommContext("cpu")
    trees = [scaled_layers(mesh, context, of_root=True) for _ in range(2)]
    ahead: list[bool] = []
    trees[0].register_forward_hook(lambda *_: ahead.append(unit_of(trees[1]).groups[0].is_gathering))  # type: ignore[union-attr]
    for _ in range(2):
        trees[1](trees[0](torch.ones(2, 8, requires_grad=True))).sum().backward()
    assert not context.has_root
    assert ahead == [False, True]


@pytest.mark.parametrize("share", [shardwise.share_comm_ctx, torch.distributed.fsdp.share_comm_ctx])
def test_trees_that_share_a_context_have_roots_where_each_was_given_one(fake_mesh: Mesh, share: Any) -> None:
    mesh = fake_mesh(4)
    trees = [scaled_layers(mesh, shardwise.FSDPCommContext("cpu"), of_root=True) for _ in range(2)]
    share(trees)
    assert all(unit_of(tree).is_root for tree in trees)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_unit_is_gathered_ahead_in_another_dtype_too(fake_mesh: Mesh, dtype: torch.dtype) -> None:
    mesh = fake_mesh(2)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(torch.randn(3, 64)).sum().backward()
    model.to(dtype)
    ahead: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(
            lambda *_: ahead.append(sum(unit_of(one).groups[0].is_gathering for one in model))
        )
    model(torch.randn(3, 64, dtype=dtype)).sum().backward()
    assert ahead == [1, 1, 1, 1, 0]


def test_set_gradient_divide_factor(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(1))
    x = inputs_for(model, 0)
    model(x).sum().backward()
    expected = model.norm.weight.grad.to_local().clone()  # type: ignore[union-attr]
    model.zero_grad()
    model.set_gradient_divide_factor(4.0)  # type: ignore[operator]
    model(x).sum().backward()
    assert torch.equal(model.norm.weight.grad.to_local(), expected / 4)  # type: ignore[union-attr]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("factor", [None, 6.0])
def test_divide_factor_and_force_sum_reach_the_reduction(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, factor: float | None, force: bool
) -> None:
    model = build(fake_mesh(4))
    model.set_force_sum_reduction_for_comms(force)  # type: ignore[operator]
    if factor is not None:
        model.set_gradient_divide_factor(factor)  # type: ignore[operator]
    means: list[bool] = []
    original = Comm.reduce_scatter

    def spy(comm: Comm, outputs: Any, inputs: Any, **options: Any) -> Any:
        means.append(options["mean"])
        return original(comm, outputs, inputs, **options)

    monkeypatch.setattr(Comm, "reduce_scatter", spy)
    run(model)
    # The root's reduction is the last; the layers keep the backend's average.
    assert means == [True, True, True, factor is None and not force]


@pytest.mark.parametrize(
    ("dtype", "shard", "replicate", "factor", "force", "expected"),
    [
        (torch.float32, 4, 1, None, False, Scale(mean=True)),
        (torch.bfloat16, 4, 2, None, True, Scale(after=8.0)),
        (torch.bfloat16, 4, 2, 3.0, False, Scale(between=3.0)),
        (torch.float16, 4, 2, None, False, Scale(before=4.0, after=2.0)),
        (torch.float16, 3, 1, None, False, Scale(before=2.0, after=1.5)),
        (torch.float16, 2, 1, None, False, Scale(before=2.0, after=1.0)),
    ],
)
def test_scale(
    dtype: torch.dtype, shard: int, replicate: int, factor: float | None, force: bool, expected: Scale
) -> None:
    assert gradient_scale(dtype, shard, replicate, factor, force) == expected


def test_set_all_reduce_hook(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    sizes: list[int] = []

    def hook(gradients: torch.Tensor) -> None:
        sizes.append(gradients.numel())
        gradients.fill_(3.0)

    model.set_all_reduce_hook(hook)  # type: ignore[operator]
    run(model)
    assert len(sizes) == 1
    assert bool((model.norm.weight.grad.to_local() == 3).all())  # type: ignore[union-attr]
    assert not bool((model.layers[0].up.weight.grad.to_local() == 3).all())  # type: ignore[union-attr]


class Staged:
    """A collective that notes how it is used."""

    def __init__(self, call: Callable[..., Any]):
        self.call, self.allocated, self.calls = call, 0, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> Any:
        self.calls += 1
        return self.call(**arguments)


class Repointed(Staged):
    """Gives the same tensor each time, with other memory."""

    tensor = torch.empty(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.tensor.data = super().allocate(size, dtype=dtype, device=device)
        return self.tensor


def test_custom_gather_whose_memory_changes(fake_mesh: Mesh) -> None:
    model = nn.Linear(5, 4, bias=False)
    fully_shard(model, mesh=fake_mesh(2))
    model.set_custom_all_gather(Repointed(all_gather))  # type: ignore[attr-defined]
    x = torch.ones(2, 5)
    for factor in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(factor)
        assert torch.equal(model(x)[:, :2], torch.full((2, 2), 5 * factor))
        model.reshard()  # type: ignore[attr-defined]


def all_gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
    return (
        group._allgather_base(output_tensor, input_tensor)
        if async_op
        else group._allgather_base(output_tensor, input_tensor).wait() and None
    )


def test_custom_collectives(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    plain = build(model.norm.weight.device_mesh)  # type: ignore[arg-type]
    plain.load_state_dict(model.state_dict())
    gather = Staged(all_gather)

    def reduce_scatter(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any) -> Any:
        assert input_tensor.numel() == 2 * output_tensor.numel()
        output_tensor.copy_(input_tensor[: output_tensor.numel()])

    reduce = Staged(reduce_scatter)
    model.layers[0].set_custom_all_gather(gather)  # type: ignore[operator]
    model.layers[0].set_custom_reduce_scatter(reduce)  # type: ignore[operator]
    x = inputs_for(model, 0)
    assert torch.equal(model(x), plain(x))
    model(x).sum().backward()
    assert (gather.calls, gather.allocated) == (3, 3)
    assert (reduce.calls, reduce.allocated) == (1, 2)
    with pytest.raises(ValueError, match="allocates by itself"):
        model.layers[0].set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]


def test_custom_reduction_after_one_that_was_not(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are sent from where they are otherwise are staged too."""
    monkeypatch.setattr("shardwise.core.comm.PACK_BELOW_BYTES", 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=fake_mesh(2))
    sizes: list[int] = []

    def reduce_scatter(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any) -> None:
        sizes.append(input_tensor.numel())
        output_tensor.copy_(input_tensor[: output_tensor.numel()])

    for custom in (None, Staged(reduce_scatter)):
        if custom is not None:
            model.set_custom_reduce_scatter(custom)  # type: ignore[operator]
        model(torch.ones(2, 4)).sum().backward()
    assert len(sizes) == 1
    assert sizes[0] >= sum(parameter.numel() for parameter in model.parameters())


def test_custom_gather_of_a_unit_that_was_gathered_with_others(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, gathers: list[int]
) -> None:
    monkeypatch.setattr("shardwise.core.batch.MANY", 1)
    model, gather = build(fake_mesh(2)), Staged(all_gather)
    for _ in range(3):
        run(model)
    gathers.clear()
    run(model)
    assert len(gathers) == 3  # the root, and the layers twice
    model.layers[1].set_custom_all_gather(gather)  # type: ignore[operator]
    gathers.clear()
    run(model)
    assert (len(gathers), gather.calls) == (3, 2)


def test_process_group_memory(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    x = inputs_for(model, 0)
    expected = model(x).detach()
    for unit in (model, *model.layers):
        unit.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    model.set_allocate_memory_from_process_group_for_comm(False)  # type: ignore[operator]
    assert torch.equal(model(x), expected)


class LateAllocator:
    """As NCCL's: it exists once there is a communicator, which a first collective makes."""

    def __init__(self) -> None:
        self.is_connected = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, size: int, **options: Any) -> torch.Tensor:
        assert self.is_connected
        return torch.zeros(size, **options)


def test_process_group_memory_of_a_group_that_has_not_communicated(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = build(fake_mesh(2)), LateAllocator()
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: setattr(backend, "is_connected", True))
    for unit in (model, *model.layers):
        unit.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    model(inputs_for(model, 0)).sum().backward()
    assert backend.is_connected


def test_staging_of_what_is_replicated(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2), placements="ddp")
    for unit in (model, *model.layers):
        unit.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        with pytest.raises(ValueError, match="nothing is sharded over ranks"):
            unit.set_symm_mem_for_comm()  # type: ignore[operator]
    model(inputs_for(model, 0)).sum().backward()


def test_symmetric_memory_needs_a_backend_that_has_it(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    with pytest.raises(ValueError, match="it needs NCCL on CUDA, and the unit's process group uses 'fake'"):
        model.set_symm_mem_for_comm()  # type: ignore[operator]


def test_symmetric_memory_has_the_backend_that_was_asked_for(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build(fake_mesh(2))
    made: list[str] = []
    monkeypatch.setattr(comm, "_backend_name", lambda group, device: "nccl")
    monkeypatch.setattr(comm.symmetric_memory, "set_backend", made.append)
    with pytest.raises(ValueError, match="unit 'Transformer' with backend 'NVSHMEM' on cpu: it needs NCCL"):
        model.set_symm_mem_for_comm(backend="NVSHMEM")
    assert made == []
    model.set_symm_mem_for_comm(backend="NCCL")
    assert made == ["NCCL"]
    chosen = [unit_of(module).options[0].custom_gather for module in (model, model.layers[0])]  # type: ignore[union-attr]
    assert [type(one) for one in chosen] == [comm.SymmetricMemoryGather, type(None)]


def test_unused_parameters(fake_mesh: Mesh) -> None:
    model = Half()
    fully_shard(model, mesh=fake_mesh(1))
    model(torch.ones(2, 4)).sum().backward()
    assert model.unused.weight.grad is None
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    model(torch.ones(2, 4)).sum().backward()
    assert model.unused.weight.grad.to_local().tolist() == torch.zeros(4, 4).tolist()  # type: ignore[union-attr]


def test_parameters_of_units_that_never_ran_get_no_zeros(fake_mesh: Mesh, gathers: list[int]) -> None:
    model = Half()
    mesh = fake_mesh(4)
    for one in (model.unused, model):
        fully_shard(one, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    model(torch.ones(2, 4)).sum().backward()
    assert model.unused.weight.grad is None
    assert len(gathers) == 1


def test_a_parameter_that_is_used_again_is_reduced_with_the_others(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UsesSome(Half):
        def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
            return self.used(x) + self.unused(x) if use else self.used(x)

    reduced: list[int] = []
    all_reduce = Comm.all_reduce

    def noted(comm: Comm, tensor: torch.Tensor, **options: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(comm, tensor, **options)

    monkeypatch.setattr(Comm, "all_reduce", noted)
    model = UsesSome()
    fully_shard(model, mesh=fake_mesh(2), placements="ddp")
    counts = []
    for use in (False, False, False, True, True):
        reduced.clear()
        model(torch.ones(2, 4), use).sum().backward()
        counts.append(len(reduced))
    assert counts == [1, 1, 1, 2, 1]


def test_set_reduce_scatter_max_input_buffers(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model.set_reduce_scatter_max_input_buffers(3)  # type: ignore[operator]
    reductions = unit_of(model).context.reductions  # type: ignore[union-attr]
    most = 0
    add = reductions.add

    def spy(reduction: Any) -> None:
        nonlocal most
        add(reduction)
        most = max(most, len(reductions._scattering))

    reductions.add = spy  # type: ignore[method-assign]
    run(model)
    assert most == 3
    for wrong, kind in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
        with pytest.raises(kind, match="max_input_buffers must be"):
            model.set_reduce_scatter_max_input_buffers(wrong)  # type: ignore[operator]


def test_a_limit_set_on_one_unit_is_that_of_all(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    run(model)
    model.layers[1].set_reduce_scatter_max_input_buffers(2, recurse=False)  # type: ignore[operator]
    assert {unit_of(module).context.reductions.limit for module in (model, *model.layers)} == {2}  # type: ignore[union-attr]


def test_a_limit_set_on_inner_units_before_the_root_is_known(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model.layers[0].set_reduce_scatter_max_input_buffers(3)  # type: ignore[operator]
    run(model)
    assert unit_of(model).context.reductions.limit == 3  # type: ignore[union-attr]


def test_set_post_optim_event(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    waited: list[str] = []

    class Event:
        def wait(self) -> None:
            waited.append("yes")

    model.set_post_optim_event(None)  # type: ignore[operator]
    model.set_post_optim_event(Event())  # type: ignore[operator]
    run(model)
    run(model)
    assert waited == ["yes"]


def test_gathers_are_asynchronous_whatever_is_set(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    model._set_unshard_async_op(True)  # type: ignore[operator]
    run(model)


def test_reset_iter_state_only_on_the_root(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    run(model)
    with pytest.raises(RuntimeError, match=r"called on 'layers\.1'; call it on the root"):
        model.layers[1].reset_iter_state()  # type: ignore[operator]
    model.reset_iter_state()  # type: ignore[operator]


@pytest.mark.parametrize("share", [shardwise.share_comm_ctx, torch.distributed.fsdp.share_comm_ctx])
def test_share_comm_ctx(fake_mesh: Mesh, share: Callable[[Any], None]) -> None:
    mesh = fake_mesh(2)
    stages = [build(mesh), build(mesh)]
    share(stages)
    share([stages[0], *stages])
    assert unit_of(stages[0]).context is unit_of(stages[1].layers[2]).context  # type: ignore[union-attr]
    for stage in stages:
        run(stage)
        assert None not in grads(stage)
    with pytest.raises(ValueError, match="takes modules wrapped"):
        shardwise.share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]


def test_separate_reduce_scatter_group(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    model.set_separate_reduce_scatter_group(True)  # type: ignore[operator]
    units = [unit_of(module) for module in (model, *model.layers)]
    own = {id(unit.groups[0].options.reduce_comm) for unit in units if unit is not None}
    assert len(own) == 1
    assert units[0].groups[0].options.reduce_comm.group is not units[0].groups[0].mesh.shard.group  # type: ignore[union-attr]
    run(model)
    assert None not in grads(model)
    model.set_separate_reduce_scatter_group(False)  # type: ignore[operator]
    assert units[0].groups[0].options.reduce_comm is None  # type: ignore[union-attr]
    model.set_separate_reduce_scatter_group(recurse=False)  # type: ignore[operator]
    run(model)
    has_own = [unit.groups[0].options.reduce_comm is not None for unit in units if unit is not None]
    assert has_own == [True, False, False, False]


def test_models_of_one_group_share_the_separate_reduce_scatter_group(fake_mesh: Mesh) -> None:
    """A group ends with the world only, so that one for each model, or each call, would be one too many."""
    mesh, made = fake_mesh(2), set[int]()
    for _ in range(2):
        model = build(mesh)
        for enable in (True, False, True):
            model.set_separate_reduce_scatter_group(enable)  # type: ignore[operator]
        made.add(len(distributed_c10d._world.pg_map))
    assert len(made) == 1


def test_groups_of_some_ranks_are_not_split_from_all(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mesh(4)
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = bound = torch.device("cuda", 0)
    split: list[object] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", split.append)
    assert new_group_of([0, 1], "test").bound_device_id is None
    assert split == []
    assert world.bound_device_id == bound
    with pytest.raises(ValueError, match=r"out of range|within the world_size"):
        new_group_of([0, 4], "test")
    assert world.bound_device_id == bound


def test_profiler_labels(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    run(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(model)
    names = {event.key for event in profile.key_averages()}
    for name in ("pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward_reshard"):
        assert f"FSDP::{name} (layers.1)" in names
    assert "FSDP::post_backward_reduce (layers.1)" in names
    assert "FSDP::backward_prefetch for layers.1" in names
    for name in ("pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward_reshard"):
        assert f"FSDP::{name}" in names  # of the root, without a name, as in FSDP2
    assert not any("root)" in name for name in names)


def test_the_log_of_fsdp2_shows_the_same(fake_mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    model = build(fake_mesh(4))
    run(model)
    with caplog.at_level("DEBUG", "torch.distributed.fsdp"):
        run(model)
    messages = caplog.messages
    assert messages[:2] == ["FSDP::pre_forward", "FSDP::root_pre_forward"]
    first = [messages.index(f"FSDP::{name} (layers.1)") for name in ("pre_forward", "post_forward", "pre_backward")]
    assert first == sorted(first)
    assert {"FSDP::post_backward_reduce (layers.1)", "FSDP::root_post_backward_callback"} <= {*messages}
    run(model)  # nobody looks
    assert len(caplog.messages) == len(messages)


def test_a_profiler_that_runs_again_sees_what_runs_meanwhile(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4))
    for _ in range(2):
        run(model)  # nobody looks
        loss = model(inputs_for(model, 0)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
            model.layers[1].unshard()  # type: ignore[index, operator, union-attr]
            model.layers[1].reshard()  # type: ignore[index, operator, union-attr]
        counts = {event.key: event.count for event in profile.key_averages() if event.key.endswith("layers.1)")}
        assert counts == {
            "FSDP::all_gather (layers.1)": 2,
            "FSDP::pre_backward (layers.1)": 1,
            "FSDP::post_backward_reshard (layers.1)": 1,
            "FSDP::post_backward_reduce (layers.1)": 1,
        }


@pytest.mark.parametrize(
    ("collective", "doing"),
    [("all_gather", "gathering the parameters of unit"), ("reduce_scatter", "reducing the gradients of unit")],
)
def test_a_collective_that_does_not_start_names_the_unit(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, collective: str, doing: str
) -> None:
    """gloo refuses messages to a rank that it knows to be gone."""
    model = build(fake_mesh(4))
    run(model)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("connection closed")

    monkeypatch.setattr(Comm, collective, refuse)
    with pytest.raises(RuntimeError, match="connection closed") as caught:
        run(model)
    assert [doing in note for note in caught.value.__notes__] == [True]


def test_transformer_alone_is_no_fsdp_module() -> None:
    module = Transformer()
    shardwise.register_fsdp_forward_method(module, "forward")  # nothing to do, no error
    assert "forward" not in vars(module)
    shardwise.register_fsdp_forward_method(None, "forward")  # type: ignore[arg-type]  # a stage without an encoder, say


@dataclass
class Scaled:
    """What can be called, and has no hash."""

    factor: int

    def __call__(self, x: int) -> int:
        return self.factor * x


def test_a_forward_method_is_registered_once(fake_mesh: Mesh) -> None:
    """Each time around the last, it took longer with every epoch that registered it, until recursion ended it."""
    model: Any = fully_shard(Transformer(), mesh=fake_mesh(2))
    model.double_of = lambda x: x * 2
    for name in ("double_of", "get_submodule"):
        shardwise.register_fsdp_forward_method(model, name)
        registered = vars(model)[name]
        shardwise.register_fsdp_forward_method(model, name)
        assert vars(model)[name] is registered
    model.double_of = lambda x: x * 3
    shardwise.register_fsdp_forward_method(model, "double_of")
    assert vars(model)["double_of"] is not registered
    assert vars(model)["double_of"].__wrapped__(2) == 6
    model.scaled = Scaled(4)
    shardwise.register_fsdp_forward_method(model, "scaled")
    assert model.scaled(2) == 8


def test_no_policy_of_offloading_is_the_default_one(fake_mesh: Callable[..., DeviceMesh]) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=fake_mesh(2), offload_policy=None)
    assert not unit_of(model).groups[0].policy.offload  # type: ignore[arg-type, union-attr]


@needs_results
def test_a_divide_factor_may_be_a_tensor_that_changes(fake_mesh: Callable[..., DeviceMesh]) -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=fake_mesh(2))
    factor = torch.tensor(2.0)
    model.set_gradient_divide_factor(factor)  # type: ignore[arg-type]
    found = []
    for value in (2.0, 4.0):
        factor.fill_(value)
        model(torch.ones(1, 4)).sum().backward()
        found.append(model.weight.grad.to_local()[0, 0].item())  # type: ignore[operator, union-attr]
        model.zero_grad()
    assert found == [0.5, 0.25]


class Noted:
    """Work that notes when it starts and when it is waited for."""

    def __init__(self, notes: list[str], name: str):
        self.notes, self.name = notes, name
        notes.append(name)

    def wait(self) -> None:
        self.notes.append(f"end of {self.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When reductions start and end."""
    notes: list[str] = []
    for name in ("reduce_scatter", "all_reduce"):

        def note(*_: Any, name: str = name, **__: Any) -> list[Noted]:
            number = sum(other.startswith(name) for other in notes)
            return [Noted(notes, f"{name} {number}")]

        monkeypatch.setattr(Comm, name, note)
    return notes


def test_sums_over_replicas_alone_run_beside_the_next_backward(fake_mesh: Mesh, notes: list[str]) -> None:
    model = build(fake_mesh(2), placements=Placements.ddp)
    model(inputs_for(model, 0)).sum().backward()
    starts, ends = ([f"{prefix}all_reduce {number}" for number in range(4)] for prefix in ("", "end of "))
    assert notes == [*starts[:2], ends[0], starts[2], ends[1], starts[3], ends[2], ends[3]]


def test_sums_over_replicas_run_beside_the_next_reduce_scatter(fake_mesh: Mesh, notes: list[str]) -> None:
    """They take other links, and nothing waits for them before the reduction after that."""
    model = build(fake_mesh(2, 2))
    model(inputs_for(model, 0)).sum().backward()
    at = {name: index for index, name in enumerate(notes)}
    assert len(at) == len(notes) == 16
    for number in range(4):
        assert at[f"all_reduce {number}"] == at[f"end of reduce_scatter {number}"] + 1
        if number < 3:
            assert at[f"all_reduce {number}"] < at[f"reduce_scatter {number + 1}"] < at[f"end of all_reduce {number}"]
        if number < 2:  # the memory of two is held, and of no more
            assert at[f"end of all_reduce {number}"] < at[f"reduce_scatter {number + 2}"]


def test_what_was_scattered_is_freed_before_it_is_summed_over_replicas(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[StorageWeakRef] = []

    def scatter(comm: Any, outputs: Any, inputs: Sequence[torch.Tensor], **_: Any) -> list[Any]:
        sent.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in inputs if tensor.numel() == 512 * 512)
        return []

    def all_reduce(comm: Any, tensor: torch.Tensor, **_: Any) -> list[Any]:
        assert [one for one in sent if not one.expired()] == []
        return []

    monkeypatch.setattr(Comm, "reduce_scatter", scatter)
    monkeypatch.setattr(Comm, "all_reduce", all_reduce)
    mesh, model = fake_mesh(2, 2), nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.randn(1, 512)).sum().backward()
    assert len(sent) == 3


@pytest.mark.parametrize("placements", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("reshards", [None, True, False])
def test_what_the_user_gathers_stays_registered_until_backward(
    fake_mesh: Mesh, placements: str, reshards: bool | None
) -> None:
    """Where whole parameters are kept anyway."""

    def is_sharded() -> bool:
        return all(isinstance(parameter, DTensor) for parameter in inner.parameters())

    mesh = fake_mesh(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    inner: Any = fully_shard(model[0], mesh=mesh, placements=placements, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, placements=placements)
    for gathers in (False, True, False):
        if gathers:
            inner.unshard()
        loss = model(torch.ones(2, 4)).sum()
        assert is_sharded() == (reshards is not False and (placements == "zero3" or not gathers))
        loss.backward()
        assert is_sharded()
    with torch.no_grad():
        inner.unshard()
        model(torch.ones(2, 4))
    assert is_sharded() == (reshards is not False)


@pytest.mark.parametrize("is_inside", [False, True])
def test_the_last_unit_of_a_context_is_its_root_unless_others_join_outside(fake_mesh: Mesh, is_inside: bool) -> None:
    """A root alone stays gathered after forward."""
    context, mesh = shardwise.FSDPCommContext("cpu"), fake_mesh(2)
    outer = nn.Linear(4, 4)
    outer.inner, outer.late = nn.Linear(4, 4), nn.Linear(4, 4)  # type: ignore[assignment]
    outer.forward = lambda x: nn.functional.linear(outer.inner(x), outer.weight)  # type: ignore[assignment]
    late = outer.late if is_inside else nn.Linear(4, 4)
    for module in (outer.inner, late, outer) if is_inside else (outer.inner, outer, late):
        fully_shard(module, mesh=mesh, comm_ctx=context)
    outer(torch.ones(2, 4))
    assert isinstance(outer.weight, DTensor) is not is_inside
    assert isinstance(outer.inner.weight, DTensor)

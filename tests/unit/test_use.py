"""What users of FSDP2 do with sharded models beside training them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import shardwise
from shardwise import FSDPCommContext, Placements, fully_shard
from shardwise.adapters.wrapping import show_shards
from shardwise.core import posts
from shardwise.core.agreement import explain_failure
from shardwise.core.comm import _Messages, comm_for, failed_peer
from shardwise.core.device import is_fake, local_of, unfaked
from shardwise.core.errors import StateError
from shardwise.core.lanes import current_world
from shardwise.core.root import unit_of

from ..models import MLP, Transformer, inputs_for
from ..needs import needs_results
from .test_memory import Collectives, build

Mesh = Callable[..., DeviceMesh]


FAKE: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": 2},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    *({"placements": preset} for preset in ("zero2", "zero1", "ddp")),
]


@pytest.mark.parametrize("options", FAKE)
def test_trains_with_fake_tensors(fake_mesh: Mesh, options: dict[str, Any]) -> None:
    """As one does to find out how much memory a model would take."""
    mesh = fake_mesh(8)
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("error")
        # Large enough to be sent each by itself, and a cut that is not even.
        model = nn.Sequential(nn.Linear(1024, 1020), nn.Linear(1020, 1024), nn.Linear(1024, 3))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh, **options)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 1024)).sum().backward()
            shardwise.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert all(is_fake(local_of(parameter)) for parameter in model.parameters())


def test_memory_is_told_with_fake_tensors(fake_mesh: Mesh) -> None:
    mesh = fake_mesh(8)

    def peak(shard: Any) -> int:
        with FakeTensorMode():
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
            for unit in (*model, model):
                shard(unit, mesh=mesh)
            optimizer, tracker = torch.optim.SGD(model.parameters(), momentum=0.9), MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                for _ in range(2):
                    tracker.reset_mod_stats()
                    model(torch.randn(2, 1024)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        return sum(found.values())

    told = 4096  # what ranks tell each other with the gradients
    assert 0 < peak(fully_shard) <= peak(torch_fully_shard) + told


def test_meshes_tell_their_ranks_beside_fake_tensors(fake_mesh: Mesh) -> None:
    mesh = fake_mesh(4)
    with FakeTensorMode():
        with pytest.raises(AssertionError, match="FakeTensorMode"):
            mesh.mesh.tolist()
        with unfaked():
            assert mesh.mesh.tolist() == [0, 1, 2, 3]
            assert not is_fake(torch.empty(1))
        assert is_fake(torch.empty(1))


def test_state_dict_can_be_saved_and_copied(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    model(inputs_for(model, 0)).sum().backward()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) and not isinstance(value, nn.Parameter) for value in state.values())
    file = io.BytesIO()
    torch.save({"model": state, "gradients": [p.grad for p in model.parameters()]}, file)
    # What is saved is what is held: each unit's shards once, not once for each parameter.
    held = sum(2 * value.to_local().nbytes for value in state.values())
    assert file.tell() < held + 2500 * len(state)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["model"]
    for copied in (loaded, copy.deepcopy(state)):
        for name, value in state.items():
            assert type(copied[name]) is DTensor
            assert torch.equal(copied[name].to_local(), value.to_local())
            assert copied[name].placements == value.placements


@pytest.mark.parametrize("ran", [False, True])
def test_a_copy_outlives_the_module_that_was_wrapped(fake_mesh: Mesh, ran: bool) -> None:
    model = build(fake_mesh(2))
    inputs = inputs_for(model, 0)
    if ran:
        model(inputs).sum().backward()
    copied = copy.copy(model)
    del model
    for _ in range(2):
        copied(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_parameters_can_be_copied_pickled_and_made_parameters(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    weight = model.layers[0].up.weight
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), nn.Parameter(weight.clone())):
        assert isinstance(other, DTensor)
        assert isinstance(other, nn.Parameter)
        assert other.requires_grad
        assert torch.equal(other.to_local(), weight.to_local())
    assert isinstance(nn.Parameter(weight), nn.Parameter)
    value = weight.detach()
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), pickle.loads(pickle.dumps(value.t()))):
        assert type(other) is DTensor
        assert not isinstance(other, nn.Parameter)
    copied = copy.deepcopy(weight)
    with torch.no_grad():
        copied.zero_()
    assert bool(weight.to_local().any())


def test_gradients_are_read_written_and_deleted_as_of_any_tensor(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `zero_grad` does for each parameter runs nothing of the class that explains parameters."""
    model = build(fake_mesh(2))
    weight, optimizer = model.layers[0].up.weight, torch.optim.SGD(model.parameters(), 0.1)
    calls: list[Any] = []
    original = type(weight).__torch_function__.__func__

    def noted(cls: Any, func: Any, *args: Any) -> Any:
        calls.append(func)
        return original(cls, func, *args)

    monkeypatch.setattr(type(weight), "__torch_function__", classmethod(noted))
    assert weight.grad is None
    model(inputs_for(model, 0)).sum().backward()
    gradient = weight.grad
    calls.clear()
    assert isinstance(gradient, DTensor)
    optimizer.zero_grad()
    assert weight.grad is None
    weight.grad = gradient
    assert weight.grad is gradient
    del weight.grad
    assert weight.grad is None
    assert not calls
    with pytest.raises(TypeError, match="Tensor or None"):
        weight.grad = 1  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="size"):
        weight.grad = model.layers[0].up.bias


def test_conversions_of_submodules_that_change_nothing(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    before = model.layers[0].up.weight
    model.layers[0].up.to(torch.float32)
    model.layers[0].up.cpu()
    model.float()
    assert model.layers[0].up.weight is before
    model(inputs_for(model, 0)).sum().backward()
    assert before.grad is not None


@pytest.mark.parametrize("preset", ["zero1", "zero2"])
@pytest.mark.parametrize(
    "write",
    [
        lambda p, model: p.detach().mul_(2),
        lambda p, model: torch.mul(p, 2, out=p),
        lambda p, model: p.view(-1).mul_(2),
        lambda p, model: model.state_dict()["layers.0.up.weight"].mul_(2),
        lambda p, model: p.to_local().mul_(2),
        lambda p, model: p.data.mul_(2),
        lambda p, model: nn.init.ones_(p),
        lambda p, model: torch._foreach_mul_([p], 2),
    ],
)
def test_kept_parameters_see_every_write(fake_mesh: Mesh, preset: str, write: Any) -> None:
    model = build(fake_mesh(2), placements=getattr(Placements, preset))
    x = inputs_for(model, 0)
    with torch.no_grad():
        model(x)
        write(model.layers[0].up.weight, model)
        with Collectives() as count:
            model(x)
    assert count.gathers == 1


class Fragile(nn.Module):
    """Fails when told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.fails:
            raise KeyError("on purpose")
        return self.layers[1](x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def _fails_to_convert(model: nn.Module, weight: nn.Parameter) -> None:
    with pytest.raises(KeyError):
        model._apply(lambda tensor: _fail(tensor))
    weight.requires_grad_(False)


def _swap(model: nn.Module, weight: nn.Parameter) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(copy.deepcopy(weight).detach(), requires_grad=False))


def _without_torch_function(model: nn.Module, weight: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        weight.requires_grad = False


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("moment", ["between steps", "before backward"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model, weight: weight.requires_grad_(not weight.requires_grad),
        lambda model, weight: setattr(weight, "requires_grad", not weight.requires_grad),
        lambda model, weight: model.requires_grad_(not weight.requires_grad),
        lambda model, weight: weight.detach_(),
        lambda model, weight: weight.copy_(model.layers[1].up.weight),
        _without_torch_function,
        _fails_to_convert,
        _swap,
    ],
    ids=["method", "attribute", "module", "detach_", "history", "disabled", "failure", "swap"],
)
@needs_results
def test_what_requires_gradients_changes_in_any_way(fake_mesh: Mesh, change: Any, moment: str, frozen: bool) -> None:
    mesh, found = fake_mesh(2), []
    for verb in (fully_shard, torch_fully_shard):
        model = Transformer()
        model.layers[0].up.weight.requires_grad_(not frozen)
        for module in (*model.layers, model):
            verb(module, mesh=mesh)
        weight = model.layers[0].up.weight
        model(inputs_for(model, 0)).sum().backward()
        model.zero_grad()
        output = model(inputs_for(model, 0)).sum() if moment == "before backward" else None
        for unit in (*model.layers, model):
            unit.reshard()
        with contextlib.suppress(RuntimeError):  # a trained leaf cannot be written with a history
            change(model, weight)
        if output is None:
            output = model(inputs_for(model, 0)).sum()
        if output.requires_grad:
            output.backward()
        found.append({name: parameter.requires_grad for name, parameter in model.named_parameters()})
        with warnings.catch_warnings(action="ignore"):  # of a parameter that has a history
            found[-1] |= {f"{name}.grad": p.grad is not None for name, p in model.named_parameters()}
    assert found[0] == found[1]


def test_what_requires_gradients_changes_before_a_transform(fake_mesh: Mesh) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=fake_mesh(2), reshard_after_forward=True)
    model(torch.ones(2, 4))
    model.bias.requires_grad_(False)
    x = torch.ones(2, 4)
    gradient = torch.func.grad(lambda value: model(value).sum())(x)
    x.requires_grad_(True)
    model(x).sum().backward()
    assert torch.equal(gradient, x.grad)  # type: ignore[arg-type]
    assert model.bias.grad is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_gradients_freeze_parameters(fake_mesh: Mesh, register: str) -> None:
    mesh, found = fake_mesh(1), []
    for is_sharded in (False, True):
        model = Transformer()
        for module in (*model.layers, model) if is_sharded else ():
            fully_shard(module, mesh=mesh)
        first, last = model.layers[0].up.weight, model.layers[1].up.weight
        for frozen in (first, last):
            getattr(last, register)(lambda _, frozen=frozen: (frozen.requires_grad_(False), None)[1])
        model(inputs_for(model, 0)).sum().backward()
        model.zero_grad()
        model(inputs_for(model, 0)).sum().backward()
        found.append({name: parameter.grad is not None for name, parameter in model.named_parameters()})
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["forward", "layer", "method", "backward"])
def test_training_goes_on_after_a_caught_exception(fake_mesh: Mesh, where: str) -> None:
    mesh, model = fake_mesh(1), Fragile()
    plain = copy.deepcopy(model)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    shardwise.register_fsdp_forward_method(model, "encode")
    x = torch.ones(2, 4)
    for step in range(3):
        model.fails = step == 1 and where in ("forward", "method")
        with pytest.raises((KeyError, RuntimeError, TypeError)) if step == 1 else _nothing():
            if where == "layer" and step == 1:
                model.layers[0](torch.ones(2, 5))
            output = model.encode(x) if where == "method" else model(x)
            if where == "backward" and step == 1:
                output.register_hook(_fail)
            output.sum().backward()
        if step == 1:
            continue
        plain(x).sum().backward()
        for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.to_local(), truth.grad), where  # type: ignore[attr-defined, union-attr]
        model.zero_grad()
        plain.zero_grad()


def _fail(gradient: torch.Tensor) -> None:
    raise KeyError("on purpose")


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_only_some_modules_of_an_outermost_unit_run(fake_mesh: Mesh) -> None:
    mesh, model = fake_mesh(1), MLP((4, 4, 4))
    fully_shard(list(model.layers), mesh=mesh, comm_ctx=FSDPCommContext("cpu"))
    for _ in range(2):
        model.layers[0](torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert model.layers[0].weight.grad is not None
        assert model.layers[1].weight.grad is None
        model.zero_grad()


@pytest.mark.parametrize(
    ("device_type", "kind"), [(3, TypeError), (torch.device("cpu"), TypeError), ("meta", ValueError), ("x", ValueError)]
)
def test_a_context_names_what_is_no_device_type(device_type: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="device_type="):
        FSDPCommContext(device_type)  # type: ignore[arg-type]


def test_tying_what_is_cut_otherwise_is_refused(fake_mesh: Mesh) -> None:
    model = Transformer()
    mesh = fake_mesh(2)
    fully_shard(model.embed, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(model, mesh=mesh)
    model.head.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"'head\.weight' .*'embed\.weight'.* cut in other ways.*before fully_shard"):
        model(inputs_for(model, 0))


def test_plain_parameter_put_in_place_of_a_sharded_one_is_refused(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    model.norm.weight = nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match=r"'norm\.weight' of unit .* was replaced by a Parameter that is not sharded"):
        model(inputs_for(model, 0))


def test_plain_values_written_into_sharded_parameters(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    with pytest.raises(RuntimeError, match=r"norm\.weight.*set_model_state_dict"), torch.no_grad():
        model.norm.weight.copy_(torch.ones(16))


def test_parameters_of_another_dtype_loaded_by_assignment(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict(state, assign=True)
    assert model(inputs_for(model, 0)).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="SGD holds parameter"):
        optimizer.step()


def test_hook_sees_gradients_of_a_world_of_one(fake_mesh: Mesh) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=fake_mesh(1))
    sizes: list[int] = []
    model.set_all_reduce_hook(lambda gradients: sizes.append(gradients.numel()))  # type: ignore[operator]
    model(torch.ones(2, 4)).sum().backward()
    assert sizes == [20 + 4]  # and one number for each parameter, padded to 16 bytes


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.own = lambda x: self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    @classmethod
    def of_class(cls, x: torch.Tensor) -> str:
        return cls.__name__

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1


METHODS = "of_class", "static", "own"


def test_forward_methods_of_all_kinds(fake_mesh: Mesh) -> None:
    model = Methods()
    kinds = {name: (type(getattr(model, name)), inspect.signature(getattr(model, name))) for name in METHODS}
    fully_shard(model, mesh=fake_mesh(2))
    for name in (*METHODS, *METHODS):
        shardwise.register_fsdp_forward_method(model, name)
        assert (type(getattr(model, name)), inspect.signature(getattr(model, name))) == kinds[name]
    x = torch.ones(1, 4)
    assert model.of_class(x).endswith("Methods")
    assert torch.equal(model.static(x), x + 1)
    assert model.own(x).shape == (1, 4)
    with pytest.raises(ValueError, match="has no method 'missing'"):
        shardwise.register_fsdp_forward_method(model, "missing")


def test_the_process_group_is_not_kept_alive(fake_mesh: Mesh) -> None:
    mesh = fake_mesh(2)
    build(mesh)
    watched = weakref.ref(mesh.get_group())
    del mesh
    dist.destroy_process_group()
    gc.collect()
    assert watched() is None or not any("shardwise" in str(type(holder)) for holder in gc.get_referrers(watched()))


def test_a_message_fails_after_the_process_group_was_destroyed(fake_mesh: Mesh) -> None:
    """As one that is waited for too late: what failed is told, though not whose rank of all it was."""
    group = fake_mesh(2).get_group()
    comm = comm_for(group, torch.device("cpu"))
    dist.destroy_process_group()

    def refuse(*_: object) -> None:
        raise RuntimeError("connection closed")

    refusing: Any = SimpleNamespace(recv=refuse, send=refuse)
    with pytest.raises(RuntimeError, match="connection closed") as caught:
        _Messages([(1, torch.ones(1))], [], refusing, 0, current_world())
    assert failed_peer(caught.value) == 1
    explain_failure(caught.value, "gathering", comm)
    assert "while gathering." in caught.value.__notes__[0]


def test_messages_name_the_root(fake_mesh: Mesh) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=fake_mesh(2))
    with pytest.raises(
        RuntimeError, match=r"'weight' was used outside the forward of its unit 'FSDPLinear \(root\)'|Linear"
    ):
        nn.functional.linear(torch.ones(1, 4), model.weight)
    assert unit_of(model) is not None


def test_messages_name_the_parameter_that_a_view_is_of(fake_mesh: Mesh) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=fake_mesh(2))
    weight, x = model.weight, torch.ones(2, 4)
    for used in (weight.t(), weight.T, weight.mT, weight.T[:, 1:3].contiguous(), weight.view(2, 8).reshape(4, 4)):
        with pytest.raises(RuntimeError, match="parameter 'weight' was used outside the forward of its unit"):
            x @ used
    with pytest.raises(RuntimeError, match=r"shape '\[5, 5\]' is invalid"):
        weight.t().view(5, 5)
    assert type(weight.contiguous()) is type(weight)
    assert isinstance(torch.transpose(input=weight, dim0=0, dim1=1), DTensor)
    copied = copy.deepcopy(weight.detach().t())
    assert type(copied) is type(pickle.loads(pickle.dumps(weight.detach().t()))) is DTensor
    assert type(weight.t() * 2) is DTensor
    assert isinstance(nn.Parameter(weight.t()), nn.Parameter)


def test_messages_name_a_parameter_of_which_this_rank_has_nothing(fake_mesh: Mesh) -> None:
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=fake_mesh(4, rank=3))
    for name, parameter in model.named_parameters():
        with pytest.raises(StateError, match=f"parameter '{name}' was used outside"):
            parameter + torch.ones(2, 1)


def test_messages_of_what_had_a_sharded_parameter_before_its_unit_was_gathered(fake_mesh: Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=fake_mesh(2))
    plain = nn.Linear(4, 4)
    plain.weight, plain.bias = model[1].weight, model[1].bias
    model[1] = plain
    with pytest.raises(StateError, match=r"'1\.weight' was used while its unit .* is gathered.*: replace"):
        model(torch.ones(2, 4))
    average = torch.zeros(4, 4)
    model.unshard()
    with pytest.raises(StateError, match=r"is gathered.*; where lerp_ updates a copy or an average"):
        average.lerp_(plain.weight, 0.5)


def test_gradients_of_what_was_computed_without_them(fake_mesh: Mesh) -> None:
    """Are no matter of what is sharded."""
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=fake_mesh(2))
    with torch.no_grad():
        loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss, list(model.parameters()))


class Sealed:
    def __init__(self, value: torch.Tensor):
        self.open = lambda: value


class Seals(nn.Linear):
    def forward(self, x: torch.Tensor) -> Sealed:  # type: ignore[override]
        return Sealed(super().forward(x))


def test_backward_through_hidden_outputs_of_the_root_is_told_of(fake_mesh: Mesh) -> None:
    model = Seals(4, 4)
    fully_shard(model, mesh=fake_mesh(2))
    model(torch.ones(2, 4))  # what no backward goes through may be anything
    model(torch.ones(2, 4)).open().sum().backward()
    with pytest.raises(TypeError, match=r"'Seals \(root\)' returned a Sealed.*not reduced"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("box", [list, lambda items: SimpleNamespace(items=items)])
def test_an_object_that_units_fill_announces_to_each_its_own(fake_mesh: Mesh, box: Callable[[Any], Any]) -> None:
    """Gradients of what other units left there gather and reduce nothing once more."""

    class Fills(nn.Linear):
        def forward(self, x: torch.Tensor, found: Any) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
            x = torch.tanh(super().forward(x))
            return x, box([*getattr(found, "items", found), x])

    class Runs(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = box([])
            for layer in self:
                x, found = layer(x, found)
            return torch.stack(getattr(found, "items", found)).sum()

    mesh, model = fake_mesh(2), Runs(Fills(4, 4) for _ in range(4))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    for _ in range(2):
        with CommDebugMode() as counter:
            model(torch.ones(2, 4)).backward()
    assert sum(counter.get_comm_counts().values()) == 3 * len(model)


@dataclasses.dataclass
class Field:
    value: torch.Tensor | None = None


def test_a_parameter_that_a_unit_puts_into_a_field(fake_mesh: Mesh) -> None:
    """It is used after the unit has freed it."""

    class Puts(nn.Linear):
        def forward(self, x: torch.Tensor, field: Field) -> torch.Tensor:  # type: ignore[override]
            field.value = self.weight
            return super().forward(x)

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Puts(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            field = Field()
            return self.inner(x, field).sum() * field.value.square().sum()  # type: ignore[no-any-return, union-attr]

    mesh, plain = fake_mesh(1), Uses()
    model = copy.deepcopy(plain)
    for unit in (model.inner, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float64))  # so that one rank gathers too
    plain(torch.ones(2, 4)).backward()
    model(torch.ones(2, 4)).backward()
    torch.testing.assert_close(local_of(model.inner.weight.grad), plain.inner.weight.grad)  # type: ignore[arg-type]


def test_views_that_no_backward_goes_through_beside_what_it_does(fake_mesh: Mesh) -> None:
    """Autograd raises when it is asked for the history of such a view."""

    class Shows(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            first, _ = output.unbind()
            output.mul_(2)
            return SimpleNamespace(first=first, output=output)

    model = Shows(4, 4)
    fully_shard(model, mesh=fake_mesh(1))
    model(torch.ones(2, 4)).output.sum().backward()
    assert torch.equal(local_of(model.bias.grad), torch.full((4,), 4.0))  # type: ignore[arg-type]


def test_outputs_of_transforms_that_need_no_gradients(fake_mesh: Mesh) -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x), x.argmax()

    plain = Counts(4, 4)
    model, x = copy.deepcopy(plain), torch.eye(4)[1:]
    fully_shard(model, mesh=fake_mesh(1))
    for output, expected in zip(torch.vmap(model)(x), torch.vmap(plain)(x), strict=True):
        assert torch.equal(output, expected)
        assert output.requires_grad == expected.requires_grad


def test_ignored_parameters_on_the_meta_device_are_refused(fake_mesh: Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    fully_shard(model, mesh=fake_mesh(2), ignored_params=set(model[1].parameters()))
    with pytest.raises(StateError, match=r"unsharded parameters '1\.weight', '1\.bias'.*materialize"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("has_run", ["", "forward", "forward and backward"])
def test_what_needs_whole_parameters_for_good_is_refused(fake_mesh: Mesh, has_run: str) -> None:
    mesh, model = fake_mesh(2), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = torch.randn(3, 4)
    if has_run:
        result = model(inputs).sum()
        if has_run != "forward":
            result.backward()
            model.zero_grad()
    with pytest.raises(StateError, match=r"is sharded, and cannot be exported .* unshard\(\)"):
        torch.export.export(model, (inputs,))
    for sharing in (model, nn.Sequential(model)):
        with pytest.raises(StateError, match=r"is sharded, and share_memory"):
            sharing.share_memory()
    for unit in (model, model[0]):
        unit.unshard()
    expected = model(inputs)
    for unit in (model, model[0]):
        unit.unshard()
    assert torch.equal(torch.export.export(model, (inputs,)).module()(inputs), expected)
    model(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("inner", [True, False])
def test_what_torch_has_sharded_is_refused_as_that(fake_mesh: Mesh, inner: bool) -> None:
    mesh, model = fake_mesh(2), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch_fully_shard(model[0] if inner else model, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"parameter '0\.weight' is a DTensor on the data parallel mesh already.*torch"
    ):
        fully_shard(model, mesh=mesh)


def test_buffers_on_the_meta_device_are_refused(fake_mesh: Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].to("meta")
    for parameter in ("weight", "bias"):
        setattr(model[1], parameter, nn.Parameter(torch.ones(4)))
    fully_shard(model, mesh=fake_mesh(2))
    for _ in range(2):
        with pytest.raises(StateError, match=r"buffers '1\.running_mean', '1\.running_var'.*materialize"):
            model(torch.ones(2, 4))
    model[1].running_mean, model[1].running_var = torch.zeros(4), torch.ones(4)  # type: ignore[assignment]
    model[1].num_batches_tracked = torch.tensor(0)  # type: ignore[assignment]
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()


class EveryKeyWithoutValues:
    """As torch 2.15's store of fake groups."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return b""


def test_what_nobody_posted_is_no_difference(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "_store", lambda comm: (EveryKeyWithoutValues(), "here"))
    model = MLP()
    fully_shard(model, mesh=fake_mesh(2, 2))
    model(inputs_for(model, 0)).sum().backward()


def test_wrappers_have_no_memory_of_their_own(fake_mesh: Mesh) -> None:
    # torch's staging of asynchronous checkpoints goes by the address whether there is a storage to copy.
    model = build(fake_mesh(2))
    staged = StateDictStager(pin_memory=False, share_memory=False).stage({**model.state_dict(), "p": model.head.weight})
    for name, value in {**model.state_dict(), "p": model.head.weight}.items():
        assert torch.equal(staged[name].to_local(), value.to_local())


def test_our_class_in_place_of_torchs(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that libraries find ours, which import the names only when they shard.
    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", shardwise.FSDPModule)
    with torch.device("meta"):
        model = Transformer()
    mesh = fake_mesh(2)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu").bfloat16()
    assert all(parameter.dtype == torch.bfloat16 and not parameter.is_meta for parameter in model.parameters())
    assert type(type(model.layers[0])(16)).__name__ == "Block"


class LateCopy:
    """A copy of offloaded shards to the device that is under way until the host waits for it."""

    def __init__(self, source: torch.Tensor):
        self.source, self.seen = source, torch.empty(0)

    def wait(self) -> None:
        """The host goes on."""

    def synchronize(self) -> None:
        """What the device has got."""
        self.seen = self.source.clone()


@pytest.mark.parametrize("way", ["swap", "load"])
def test_offloaded_shards_are_not_written_while_they_are_copied(fake_mesh: Mesh, way: str) -> None:
    model = build(fake_mesh(1), offload_policy=shardwise.CPUOffloadPolicy(pin_memory=False))
    ema = shardwise.EMA(model)
    whole = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    shards = unit_of(model.layers[0]).groups[0].shards  # type: ignore[union-attr]
    before = shards.buffers[0].local.clone()
    shards.read_by = copy = LateCopy(shards.buffers[0].local)
    if way == "swap":
        ema.swap()
    else:
        shardwise.load_full_state_dict(model, whole, broadcast_from_rank0=False)
    assert torch.equal(copy.seen, before)
    assert not torch.equal(shards.buffers[0].local, before)


def test_offloaded_shards_that_are_copied_with_others_are_not_written(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.core.batch.MANY", 1)
    model = build(fake_mesh(2), placements="zero1", offload_policy=shardwise.CPUOffloadPolicy(pin_memory=False))
    for _ in range(2):
        model(inputs_for(model, 0))
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), 1)
    model(inputs_for(model, 0))
    shards: list[Any] = [unit_of(layer).groups[0].shards for layer in model.layers]  # type: ignore[union-attr]
    assert shards[0].read_by is shards[1].read_by is not None
    before = shards[0].buffers[0].local.clone()
    shards[0].read_by._ticket = copy = LateCopy(shards[0].buffers[0].local)
    with torch.no_grad():
        torch._foreach_add_(list(model.layers[0].parameters()), 1)
    assert torch.equal(copy.seen, before)
    assert not torch.equal(shards[0].buffers[0].local, before)


@pytest.mark.parametrize("again", [False, True])
def test_the_cut_over_a_smaller_world_stays_while_shards_are_shown(
    fake_mesh: Mesh, gathers: list[int], again: bool
) -> None:
    """Lightning shows them to hooks before each backward, which gathers over the smaller world unless they wrote."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = fake_mesh(4)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    for writes in (False, True, False):
        gathers.clear()
        loss = model(torch.ones(2, 8)).sum()
        assert model[0].weight.to_local().shape == (4, 8)
        show_shards(model)
        assert model[0].weight.to_local().shape == (2, 8)
        if writes:
            with torch.no_grad():
                model[0].weight.mul_(2)
        if again:
            loss = model(torch.ones(2, 8)).sum()
            assert gathers == [4, 4, 4 if writes else 2]
        loss.backward()
        before_backward = [4, 4, 4 if writes else 2] if again else [4, 4]
        assert gathers == [*before_backward, 2 if again or not writes else 4]
        assert not any(buffer.resharded for group in unit_of(model[0]).groups for buffer in group.shards.buffers)


@pytest.mark.parametrize("writes", [False, True])
def test_a_second_forward_takes_the_cut_over_a_smaller_world_unless_shards_were_written(
    fake_mesh: Mesh, gathers: list[int], writes: bool
) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = fake_mesh(4)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    weight = model[0].weight
    model(torch.ones(2, 8))
    gathers.clear()
    if writes:
        with torch.no_grad():
            weight.mul_(2)
    model(torch.ones(2, 8))
    assert gathers == [4 if writes else 2]


def test_what_its_own_forward_reshards_is_not_cut_over_a_smaller_world(fake_mesh: Mesh, gathers: list[int]) -> None:
    class Reshards(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            self.reshard()  # type: ignore[operator]
            return output

    model: Any = Reshards(8, 8)
    fully_shard(model, mesh=fake_mesh(4), reshard_after_forward=2)
    loss = model(torch.ones(2, 8)).sum()
    assert model.weight.to_local().shape == (2, 8)
    loss.backward()
    assert gathers == [4, 4]


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_what_users_leave_on_parameters_is_there_in_forward(fake_mesh: Mesh, preset: str) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self.weight, "scale", 1.0)

    model: Any = Scaled(4, 4)
    model.weight.scale = 2.0
    plain = copy.deepcopy(model)
    plain.weight.scale = 2.0
    fully_shard(model, mesh=fake_mesh(2) if preset == "ddp" else fake_mesh(1), placements=getattr(Placements, preset))
    for _ in range(2):
        torch.testing.assert_close(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    model.unshard()
    assert model.weight.scale == 2.0

"""Whole state dicts against plain models, torch's own and torch's loading."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise.checkpoint import full_state
from shardwise.checkpoint.full_state import full_state_dict, load_full_state_dict
from shardwise.checkpoint.safetensors import load_safetensors, save_safetensors
from shardwise.checkpoint.weights import Weight

from ..models import MLP, MODELS, Transformer, build, inputs_for, wrap
from .harness import on_ranks
from .shared import shared_directory
from .test_safetensors import (
    Counted,
    Mixed,
    assert_equal,
    assert_raises_alike,
    assert_state,
    by_torch,
    highest_memory,
    ignore_some,
    make_mixed,
    mesh_of_all,
    not_at_all,
    offload,
    on_meta,
    shard_and_replicate,
    shard_on_last_dim,
    shard_plainly,
    tensor_parallel,
)

SHARDINGS = [shard_plainly, shard_on_last_dim, shard_and_replicate, offload, ignore_some, by_torch, not_at_all]


def of_rank_zero(state: dict[str, Any]) -> dict[str, Any]:
    return state if dist.get_rank() == 0 else {}


@on_ranks(1, 2, 3, 4)
def test_round_trip_of_models() -> None:
    for name in MODELS:
        truth = build(name, 1).state_dict()
        source = wrap(build(name, 1), shardwise.fully_shard, mesh=mesh_of_all())
        state = full_state_dict(source)
        assert list(state) == list(of_rank_zero(truth))
        assert_equal(state, of_rank_zero(truth))
        assert all(type(value) is torch.Tensor for value in state.values())
        for target in (build(name, 2), on_meta(MODELS[name])):
            wrap(target, shardwise.fully_shard, mesh=mesh_of_all())
            parameters = list(target.parameters())
            load_full_state_dict(target, state)
            assert_state(target, truth)
            assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))
            inputs = inputs_for(target, 0)
            with torch.no_grad():
                assert torch.equal(target.eval()(inputs), build(name, 1).eval()(inputs))


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_every_preset(preset: str) -> None:
    model = wrap(build("mlp", 2), shardwise.fully_shard, mesh=mesh_of_all(), placements=preset)
    model(inputs_for(model, 0))
    truth = build("mlp", 1)
    load_full_state_dict(model, truth.state_dict(), broadcast_from_rank0=False)
    with torch.no_grad():
        assert torch.equal(model(inputs_for(model, 0)), truth(inputs_for(model, 0)))
    assert_equal(full_state_dict(model), of_rank_zero(dict(truth.state_dict())))


@on_ranks(2, 4, sharding=SHARDINGS)
def test_everything_that_a_unit_may_have(sharding: Callable[[nn.Module], nn.Module]) -> None:
    truth = make_mixed(1).state_dict()
    source = sharding(make_mixed(1))
    everywhere = full_state_dict(source, rank0_only=False)
    assert_equal(everywhere, dict(truth))
    assert everywhere["first.weight"].data_ptr() == everywhere["second.weight"].data_ptr()
    first = full_state_dict(source)
    assert_equal(first, of_rank_zero(dict(truth)))
    kept = {name: value.clone() for name, value in everywhere.items()}
    for target, state, broadcast in (
        (sharding(make_mixed(2)), first, True),
        (sharding(on_meta(Mixed)), first or None, True),
        (sharding(on_meta(Mixed)), everywhere, False),
    ):
        load_full_state_dict(target, state, broadcast_from_rank0=broadcast)
        assert_state(target, truth)
        assert target.first.weight is target.second.weight  # type: ignore[union-attr]
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            tensor.zero_()
    assert_equal(everywhere, kept)  # shares no memory with the model


@on_ranks(4, ranks=[[3, 1, 0, 2], [[2, 3], [0, 1]]])
def test_replicas_whose_ranks_do_not_ascend(ranks: list[Any]) -> None:
    """Their process groups number ranks otherwise than the mesh does."""
    is_cut = torch.tensor(ranks).ndim == 2
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[: 1 + is_cut])
    truth = build("mlp", 1).state_dict()
    for model in (build("mlp", 2), on_meta(MODELS["mlp"])):
        wrap(model, shardwise.fully_shard, mesh=mesh, placements=None if is_cut else "ddp")
        load_full_state_dict(model, of_rank_zero(dict(truth)))
        assert_equal(full_state_dict(model, rank0_only=False), dict(truth))


@on_ranks(4, rows=[8, 10])
def test_beside_tensor_parallelism(rows: int) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return MLP((9, rows, 4, 6))

    truth = dict(make(1).state_dict())
    state = full_state_dict(tensor_parallel(make(1)))
    assert_equal(state, of_rank_zero(truth))
    for target in (tensor_parallel(make(2)), tensor_parallel(on_meta(lambda: make(2)))):
        load_full_state_dict(target, state)
        assert_state(target, truth)


@on_ranks(2, 3)
def test_like_torch() -> None:
    model = wrap(Transformer(tied=True), shardwise.fully_shard, mesh=mesh_of_all())
    theirs = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert_equal(full_state_dict(model), dict(theirs))


class Renewed(nn.Linear):
    """Has twice the values in its state that it had in version 1."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@on_ranks(1, 2)
def test_plain_modules_see_which_versions_they_load() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Renewed(3, 5), nn.Linear(5, 2))

    truth = make(1).state_dict()
    state = full_state_dict(shardwise.fully_shard(make(1)), rank0_only=False)
    assert state._metadata == truth._metadata  # type: ignore[attr-defined]
    target = make(2)
    target.load_state_dict(state)
    assert_state(target, truth)


class Picky(nn.Linear):
    """With extra state that the last rank refuses."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError(f"not {state}")


@on_ranks(2)
def test_what_one_rank_cannot_keep_or_take_is_an_error_on_all() -> None:
    model = shard_plainly(build("mlp", 1))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            to_host = torch.Tensor.cpu
            patch.setattr(torch.Tensor, "cpu", lambda self: fail() if self.shape == (12, 17) else to_host(self))
        assert_raises_alike(RuntimeError, "cannot keep 'layers.1.weight': no memory", lambda: full_state_dict(model))
    assert_equal(full_state_dict(model), of_rank_zero(dict(build("mlp", 1).state_dict())))
    state = Picky(3, 3).state_dict()
    assert_raises_alike(ValueError, "not 1", lambda: load_full_state_dict(shard_plainly(Picky(3, 3)), state))


def fail() -> Any:
    raise RuntimeError("no memory")


@on_ranks(3)
def test_ranks_that_differ_in_where_the_values_are() -> None:
    truth, model = build("mlp", 1).state_dict(), shard_plainly(build("mlp", 2))
    for state in (truth, None):
        given = truth if dist.get_rank() == 0 else state
        broadcast = dist.get_rank() < 2
        action = lambda given=given, b=broadcast: load_full_state_dict(model, given, broadcast_from_rank0=b)  # noqa: E731
        assert_raises_alike(ValueError, "broadcast_from_rank0 is True on rank 0 and False on rank 2", action)
    assert_state(model, build("mlp", 2).state_dict())


def fail_on_the_last_rank(*_: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError("no such state")


@on_ranks(2)
def test_a_state_dict_that_one_rank_cannot_make_is_an_error_on_all() -> None:
    model = shard_plainly(nn.Linear(3, 3))
    state = full_state_dict(model)
    with tempfile.TemporaryDirectory() as directory:
        save_safetensors(nn.Linear(3, 3), directory)
        model.register_state_dict_pre_hook(fail_on_the_last_rank)
        for action in (
            lambda: full_state_dict(model),
            lambda: load_full_state_dict(model, state),
            lambda: load_safetensors(model, directory),
            lambda: save_safetensors(model, directory),
        ):
            with pytest.raises(OSError, match="no such state") as caught:
                action()
            notes = getattr(caught.value, "__notes__", [])
            assert notes == ["shardwise: this happened on rank 1"] * (dist.get_rank() == 0)


@on_ranks(3, moves=[True, False])
def test_ranks_whose_state_dicts_have_other_tensors(moves: bool) -> None:
    def hook(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        if dist.get_rank() == 2:
            weight = state.pop("layers.0.weight")
            state.update({"layers.0.weight": weight} if moves else {})

    model = shard_plainly(build("mlp", 1))
    model.register_state_dict_post_hook(hook)
    what = "order of tensors" if moves else "'layers.0.weight'"
    assert_raises_alike(ValueError, f"ranks 0 and 2 do not have the same {what}", lambda: full_state_dict(model))


class Branches(nn.ModuleDict):
    """Of a unit each, which ranks have in opposite orders."""

    def __init__(self, **dtypes: torch.dtype):
        names = sorted(dtypes, reverse=dist.get_rank() % 2 == 1)
        super().__init__({name: nn.Linear(4, 3, dtype=dtypes[name]) for name in names})
        self.truth = {}
        for number, name in enumerate(sorted(dtypes), 1):
            for key in ("weight", "bias"):
                value = torch.full_like(getattr(self[name], key), 2 * number + (key == "bias"), requires_grad=False)
                self.truth[f"{name}.{key}"] = value

    def shard(self, mesh: DeviceMesh) -> Branches:
        for name in sorted(self):
            shardwise.fully_shard(self[name], mesh=mesh)
        return self


@on_ranks(2, 3, broadcast=[True, False])
def test_loads_by_name_where_ranks_have_units_in_another_order(broadcast: bool) -> None:
    model = Branches(a=torch.float32, b=torch.float32, c=torch.float32).shard(mesh_of_all())
    given = of_rank_zero(model.truth) if broadcast else model.truth
    load_full_state_dict(model, given, broadcast_from_rank0=broadcast)
    assert_state(model, model.truth)


@on_ranks(2)
def test_models_that_differ_between_ranks_do_not_get_each_others_values() -> None:
    for dtype, tied, what in (
        (torch.float64, False, "'1.bias', '1.weight'|'1.weight', '1.bias'"),
        (torch.float32, True, "ties between parameters"),
    ):
        differs = dist.get_rank() == 1
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=dtype if differs else torch.float32))
        if tied and differs:
            model[1].weight = model[0].weight
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = {name: torch.ones_like(value) for name, value in before.items()}
        action = lambda model=model, state=state: load_full_state_dict(model, state)  # noqa: E731
        assert_raises_alike(ValueError, f"ranks 0 and 1 do not have the same ({what})", action)
        assert_equal(dict(model.state_dict()), before)


@on_ranks(2)
def test_converts_dtypes() -> None:
    state = {name: value.double() for name, value in build("mlp", 1).state_dict().items()}
    model = shard_plainly(build("mlp", 2).bfloat16())
    load_full_state_dict(model, of_rank_zero(state))
    assert_state(model, {name: value.bfloat16() for name, value in state.items()})


@on_ranks(2, broadcast=[False, True])
def test_tensors_that_are_not_dense(broadcast: bool) -> None:
    rows = torch.ones(12, 17)
    sparse, nested = rows.to_sparse(), torch.nested.nested_tensor(list(rows))
    model = shard_plainly(build("mlp", 2))
    for value in (sparse, rows.to_sparse_csr(), nested, torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8)):
        state = build("mlp", 1).state_dict() | {"layers.1.weight": value}
        given = of_rank_zero(state) if broadcast else state
        action = lambda given=given: load_full_state_dict(model, given, broadcast_from_rank0=broadcast)  # noqa: E731
        assert_raises_alike(ValueError, r"nested or quantized \(give dense ones\): .layers.1.weight", action)
    assert_state(model, build("mlp", 2).state_dict())


@on_ranks(2)
def test_a_value_that_cannot_be_sent() -> None:
    state = of_rank_zero(build("mlp", 1).state_dict() | {"more": lambda: None})
    model = shard_plainly(build("mlp", 2))
    assert_raises_alike(TypeError, "cannot be sent to the other ranks", lambda: load_full_state_dict(model, state))


@on_ranks(2, broadcast=[False, True])
def test_a_value_that_cannot_be_read_on_one_rank(broadcast: bool) -> None:
    """It is found when the others are waiting for it already."""
    state = build("mlp", 1).state_dict()
    freed = torch.ones(12, 17)
    freed.untyped_storage().resize_(0)
    given = state | {"layers.1.weight": freed} if dist.get_rank() == 0 else {} if broadcast else state
    model = shard_plainly(build("mlp", 2))
    action = lambda: load_full_state_dict(model, given, broadcast_from_rank0=broadcast)  # noqa: E731
    assert_raises_alike(ValueError, "the state dict's 'layers.1.weight' cannot be read: ", action)
    load_full_state_dict(model, state)
    assert_state(model, state)


@on_ranks(3, broadcast=[False, True])
def test_a_value_that_one_rank_cannot_write(broadcast: bool) -> None:
    """Its memory may be full when it converts one; the others get their parts of what comes after all the same."""
    state, model = build("mlp", 1).state_dict(), shard_plainly(build("mlp", 2))
    given = of_rank_zero(state) if broadcast else state
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            write = Weight.write_rows
            patch.setattr(Weight, "write_rows", lambda w, *at: fail() if w.shape == (12, 17) else write(w, *at))
        action = lambda: load_full_state_dict(model, given, broadcast_from_rank0=broadcast)  # noqa: E731
        assert_raises_alike(ValueError, "the state dict's 'layers.1.weight' cannot be read: no memory", action)
    load_full_state_dict(model, state)
    assert_state(model, state)


@on_ranks(2, broadcast=[False, True])
def test_a_value_that_torch_cannot_convert_on_one_rank(broadcast: bool) -> None:
    state = build("mlp", 1).state_dict()
    packed = torch.ones(12, 17, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    given = state | {"layers.1.weight": packed} if dist.get_rank() == 0 else {} if broadcast else state
    model = shard_plainly(build("mlp", 2))
    action = lambda: load_full_state_dict(model, given, broadcast_from_rank0=broadcast)  # noqa: E731
    assert_raises_alike(ValueError, r"cannot be converted: 'layers\.1\.weight' is torch\.float4_e2m1fn_x2", action)
    load_full_state_dict(model, state)
    assert_state(model, state)


@on_ranks(2, broadcast=[False, True])
def test_one_error_lists_all_that_does_not_fit_and_nothing_is_written(broadcast: bool) -> None:
    state: dict[Any, Any] = dict(build("mlp", 1).state_dict())
    state["more"], state[3] = torch.zeros(1), torch.zeros(1)
    del state["layers.0.weight"]
    state["layers.0.bias"] = [0.0]
    state["layers.1.bias"] = torch.zeros(1, 12)
    state["layers.1.weight"] = torch.zeros(12, 17, device="meta")
    state["layers.2.weight"] = shard_plainly(build("mlp")).layers[2].weight  # type: ignore[index, union-attr]
    model = shard_plainly(build("mlp", 2))
    given = of_rank_zero(state) if broadcast else state
    message = assert_raises_alike(
        ValueError, "does not fit", lambda: load_full_state_dict(model, given, broadcast_from_rank0=broadcast)
    )
    assert message.splitlines()[1:] == [
        "  keys that are not strings: 3",
        "  keys of DTensors (give whole tensors: full_tensor()): 'layers.2.weight'",
        "  keys of tensors on the meta device: 'layers.1.weight'",
        "  missing keys: 'layers.0.weight'",
        "  unexpected keys: 'more', 3",
        "  keys that are not tensors: 'layers.0.bias'",
        "  mis-shaped keys: 'layers.1.bias' has shape (1, 12), in the model (12,)",
    ]
    assert_state(model, build("mlp", 2).state_dict())
    for nothing in (None, [], 3):
        assert_raises_alike(TypeError, "must be a dict", lambda nothing=nothing: load_full_state_dict(model, nothing))
    assert_raises_alike(TypeError, "must be a module", lambda: load_full_state_dict(state, state))  # type: ignore[arg-type]
    if not broadcast:
        one = build("mlp", 1).state_dict() if dist.get_rank() == 0 else {}
        action = lambda: load_full_state_dict(model, one, broadcast_from_rank0=False)  # noqa: E731
        assert_raises_alike(ValueError, "missing keys", action)
        assert_state(model, build("mlp", 2).state_dict())


@on_ranks(2)
def test_ties() -> None:
    torch.manual_seed(1)
    truth = dict(Transformer(tied=True).state_dict())
    model = wrap(Transformer(tied=True), shardwise.fully_shard, mesh=mesh_of_all())
    for left_out in ("embed.weight", "head.weight"):
        load_full_state_dict(model, {name: value for name, value in truth.items() if name != left_out})
        assert_state(model, truth)
    equal = truth | {"head.weight": truth["embed.weight"].clone().fill_(float("nan"))}
    equal["embed.weight"] = equal["head.weight"].clone()
    load_full_state_dict(model, equal)
    differ = truth | {"head.weight": truth["head.weight"] + 1}
    match = "ties what has different values there: 'embed.weight' and 'head.weight'"
    assert_raises_alike(ValueError, match, lambda: load_full_state_dict(model, of_rank_zero(differ)))


@on_ranks(2)
def test_without_values() -> None:
    model = shard_plainly(on_meta(MLP))
    assert_raises_alike(ValueError, r"layers\.0\.weight.* without values", lambda: full_state_dict(model))
    load_full_state_dict(model, of_rank_zero(dict(build("mlp", 1).state_dict())))
    assert_equal(full_state_dict(model), of_rank_zero(dict(build("mlp", 1).state_dict())))


@on_ranks(2)
def test_extra_state() -> None:
    source = shard_plainly(nn.Sequential(Counted({"a": 1}), Counted(torch.tensor([2.0]))))
    state = full_state_dict(source)
    target = shard_plainly(nn.Sequential(Counted(None), Counted(torch.zeros(1))))
    load_full_state_dict(target, state)
    assert target[0].count == {"a": 1}  # type: ignore[index]
    assert target[1].count == torch.tensor([2.0])  # type: ignore[index]
    broken = of_rank_zero({name: value for name, value in state.items() if "extra" not in name})
    load_full_state_dict(target, full_state_dict(shard_plainly(nn.Sequential(Counted(torch.arange(3)), Counted(None)))))
    assert target[0].count.tolist() == [0, 1, 2]  # type: ignore[index]
    assert target[1].count is None  # type: ignore[index]
    load_full_state_dict(target, state)
    assert target[1].count == torch.tensor([2.0])  # type: ignore[index]
    longer = full_state_dict(shard_plainly(nn.Sequential(Counted(None), Counted(torch.arange(3)))))
    load_full_state_dict(target, longer)
    assert target[1].count.tolist() == [0, 1, 2]  # type: ignore[index]
    match = r"missing keys: '0\._extra_state', '1\._extra_state'"
    assert_raises_alike(ValueError, match, lambda: load_full_state_dict(target, broken))


class Measured(nn.Linear):
    """Has an entry of its own in state dicts, as torchmetrics have, and notes each extra state that it is handed."""

    def __init__(self, total: int) -> None:
        super().__init__(3, 3)
        self.total, self.handed = torch.tensor(total), list[int]()

    def get_extra_state(self) -> int:
        return int(self.total)

    def set_extra_state(self, state: int) -> None:
        self.handed.append(state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.total

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.total = state_dict.pop(prefix + "total")
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_extra_state_is_handed_over_once() -> None:
    """Not the module's own once more, when it takes what else is in the state dict."""
    source, target = (shard_plainly(nn.Sequential(Measured(total))) for total in (5, 0))
    load_full_state_dict(target, full_state_dict(source))
    assert (int(target[0].total), target[0].handed) == (5, [5])  # type: ignore[index]
    with shared_directory() as directory:
        shardwise.save(directory / "saved", model=source)
        shardwise.load(directory / "saved", model=target)
    assert (int(target[0].total), target[0].handed) == (5, [5, 5])  # type: ignore[index]


@on_ranks(2)
def test_memory_stays_at_what_is_kept_and_one_tensor() -> None:
    """Of eight tensors of 16 MiB."""
    # Resident memory of a process that ran other tests before: what it gives back late counts too.
    one, count, slack = 2**24, 8, 24 * 2**20
    make = lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(count)))  # noqa: E731
    model = shard_plainly(make())
    kept: list[Any] = []
    full_state_dict(model)
    gc.collect()
    saving = highest_memory(lambda: kept.append(full_state_dict(model)))
    result = count * one if dist.get_rank() == 0 else 0
    assert saving <= result + 2 * one + slack, saving
    target = shard_plainly(on_meta(make))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_state, "BLOCK_BYTES", 2**20)
        loading = highest_memory(lambda: load_full_state_dict(target, kept[0]))
    assert loading <= count * one / 2 + slack, loading
    for ours, theirs in zip(target.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())  # type: ignore[attr-defined]


@on_ranks(2)
def test_blocks_share_their_memory() -> None:
    """gloo holds what it sent a little longer: of blocks made one by one there were three."""
    sent, broadcast = set(), full_state.Peers.broadcast

    def noting(self: Any, tensor: torch.Tensor) -> None:
        sent.add(tensor.data_ptr())
        broadcast(self, tensor)

    model = shardwise.fully_shard(nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9).double()))
    state = full_state_dict(model, rank0_only=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_state, "BLOCK_BYTES", 40)
        patch.setattr(full_state.Peers, "broadcast", noting)
        load_full_state_dict(model, of_rank_zero({name: value + 1 for name, value in state.items()}))
    assert len(sent) == 1
    after = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(after[name], value + 1) for name, value in state.items())


@on_ranks(4)
def test_a_mesh_of_some_of_the_ranks() -> None:
    """The ranks of a mesh load and save by themselves; their first one stands for rank zero."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = mesh.get_coordinate()[0]  # type: ignore[index]
    model = shardwise.fully_shard(build("mlp", stage), mesh=mesh["data"])
    state = full_state_dict(model)
    expected = dict(build("mlp", stage).state_dict()) if mesh.get_coordinate()[1] == 0 else {}  # type: ignore[index]
    assert_equal(state, expected)
    if stage == 1:
        load_full_state_dict(model, {name: value + 1 for name, value in state.items()})
        assert_state(model, {name: value + 1 for name, value in build("mlp", 1).state_dict().items()})

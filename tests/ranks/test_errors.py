"""What bad input gets: an error that names the module or parameter, what is wrong, and what to do."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise
from shardwise import Placements, fully_shard
from shardwise.checkpoint import sharded
from shardwise.checkpoint.peers import Peers
from shardwise.core import agreement
from shardwise.core.agreement import explain_failure, tell_failure
from shardwise.core.comm import comm_for
from shardwise.core.errors import StateError
from shardwise.core.posts import KEPT, failure_elsewhere, post, posted_by
from shardwise.core.root import unit_of, units_of

from ..models import MLP, Transformer, wrap
from .harness import RankError, on_ranks, ranks
from .shared import shared_directory
from .test_autograd import Layer, stack
from .test_parallel import named_axes
from .truth import batch

WIDTH = 9


@contextmanager
def refused(kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> Iterator[None]:
    """An error of ``kind`` whose message has all ``words``, in any case."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    missing = [word for word in words if word.lower() not in message.lower()]
    assert not missing, f"{missing} not in: {message}"


# -- Other ranks


def another_model(difference: str, mesh: DeviceMesh, placements: Placements) -> Any:
    """A wrapped model, with a ``difference`` from the usual one if that is named."""
    layers: list[nn.Module] = [Layer() for _ in range(4 if difference == "a unit more" else 3)]
    if difference == "wider":
        layers[1] = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))
    policy = MixedPrecisionPolicy(**{difference: torch.bfloat16} if difference.endswith("_dtype") else {})
    if difference == "a dtype":
        layers[1].to(torch.float64)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, placements=placements)
    return fully_shard(nn.Sequential(*layers), mesh=mesh, mp_policy=policy, placements=placements)


def assert_named(difference: str, mesh: DeviceMesh, placements: Placements = Placements.zero3) -> None:
    """The last rank, or the last replica, comes later and knows the cause; the others do when they hear nothing from
    it. The groups of ``mesh`` wait for two seconds."""
    is_last = mesh.get_coordinate()[0] == mesh.size(0) - 1
    model = another_model(difference if is_last else "", mesh, placements)
    dist.barrier()
    time.sleep(1.0 if is_last else 0.0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH)).sum().backward()
    told = told_by(caught.value)
    assert "anks do not share one model" in told
    assert f"rank {dist.get_process_group_ranks(mesh.get_group(0))[-1]} " in told
    assert isinstance(caught.value, StateError) == is_last
    if is_last and difference == "wider":
        assert "unit '1' with 1.0.weight (4, 9), 1.0.bias (4,), 1.1.weight (9, 4), … in torch.float32" in told


def impatient_mesh() -> DeviceMesh:
    """All ranks."""
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")


@on_ranks(2, difference=["wider", "a dtype", "param_dtype", "reduce_dtype", "a unit more"])
def test_another_model_on_one_rank(difference: str) -> None:
    assert_named(difference, impatient_mesh())


@on_ranks(3)
def test_another_model_on_one_rank_of_three() -> None:
    assert_named("wider", impatient_mesh())


@on_ranks(2, difference=["wider", "reduce_dtype"])
def test_another_model_on_one_replica(difference: str) -> None:
    assert_named(difference, impatient_mesh(), Placements.ddp)


@on_ranks(4)
def test_another_model_on_a_replica_of_two_ranks() -> None:
    ranks = torch.arange(4).view(2, 2)
    groups = [
        dist.new_subgroups_by_enumeration(axis.tolist(), timeout=timedelta(seconds=2))[0] for axis in (ranks.T, ranks)
    ]
    assert_named("wider", DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("replicate", "shard")))


@on_ranks(2)
def test_failures_are_explained_when_the_group_is_gone() -> None:
    mesh = impatient_mesh()
    model = another_model("", mesh, Placements.zero3)
    model(torch.ones(2, WIDTH)).sum().backward()
    group = mesh.get_group()
    comm = comm_for(group, torch.device("cpu"))
    dist.destroy_process_group(group)
    error = RuntimeError("the group is gone")
    explain_failure(error, "doing this", comm)
    assert "this happened while doing this" in told_by(error)


class Unlucky(nn.Module):
    """Fails where it is told to."""

    fails = False
    error: Exception = ArithmeticError("no luck\nat all")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise self.error
        return inputs


def unlucky_model(mesh: DeviceMesh, placements: str = "zero3") -> tuple[Any, Unlucky]:
    unlucky = Unlucky()
    layers = [Layer(), nn.Sequential(Layer(), unlucky), Layer()]
    for layer in layers:
        fully_shard(layer, mesh=mesh, placements=placements)
    return fully_shard(nn.Sequential(*layers), mesh=mesh, placements=placements), unlucky


def told_by(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@on_ranks(3)
def test_what_failed_on_another_rank_is_told() -> None:
    """To all ranks that wait for it: also to one that reads what a third one, which waited too, may have told."""
    model, unlucky = unlucky_model(impatient_mesh())
    unlucky.fails = dist.get_rank() == 2
    with pytest.raises((RuntimeError, ArithmeticError)) as caught:
        model(torch.ones(2, WIDTH)).sum().backward()
    assert isinstance(caught.value, ArithmeticError) == unlucky.fails, told_by(caught.value)
    if not unlucky.fails:
        cause = "Rank 2 failed before that, in the forward of unit '1': ArithmeticError: no luck."
        assert cause in told_by(caught.value), told_by(caught.value)


@on_ranks(2)
def test_reset_of_a_reduction_that_no_other_rank_came_to() -> None:
    model, mesh = nn.Sequential(Layer(), Layer()), impatient_mesh()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)

    def fail(_: torch.Tensor) -> None:
        raise Unlucky.error

    model[0].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    loss = model(torch.ones(2, WIDTH)).sum()
    if dist.get_rank():
        with pytest.raises(ArithmeticError):
            loss.backward()
        with pytest.raises(RuntimeError) as caught:
            model.reset_iter_state()
        assert "this happened while reducing the gradients of unit '1'" in told_by(caught.value)


class UnprintableError(Exception):
    """Fails, too."""

    def __str__(self) -> str:
        raise AssertionError("it is printed")


@on_ranks(2)
def test_what_is_told_hides_nothing() -> None:
    model, unlucky = unlucky_model(init_device_mesh("cpu", (2,)))
    model.set_separate_reduce_scatter_group()
    reduce_comm = unit_of(model[0]).groups[0].options.reduce_comm  # type: ignore[union-attr]
    comms = [comm_for(dist.group.WORLD, torch.device("cpu")), reduce_comm]
    unlucky.fails = True
    is_first = dist.get_rank() == 0
    errors = (
        (UnprintableError("no"), "UnprintableError"),
        (UnprintableError(torch.ones(1)), "UnprintableError"),
        (FileNotFoundError(2, "gone", "\udcff"), "FileNotFoundError: [Errno 2] gone: '\\udcff'"),
        (OSError("\udcff"), "OSError: ?"),
    )
    for error, told in errors:
        unlucky.error = error if is_first else Unlucky.error
        with pytest.raises(type(unlucky.error)) as caught:
            model(torch.ones(2, WIDTH))
        assert caught.value is unlucky.error
        dist.barrier()
        for comm in comms:
            assert is_first or failure_elsewhere(comm) == (0, f"in the forward of unit '1': {told}")
        dist.barrier()


@on_ranks(2, placements=["ddp", "zero3"])
def test_ranks_have_met_by_a_file_that_is_gone(placements: str) -> None:
    """The store would wait for it for five minutes, which is longer than a test may take."""
    model, unlucky = unlucky_model(init_device_mesh("cpu", (2,)), placements)
    store: Any = dist.distributed_c10d._get_default_store()
    while not hasattr(store, "path"):
        store = store.underlying_store
    path = Path(store.path)
    if dist.get_rank() == 0:
        path.unlink()
        path.parent.rmdir()
    dist.barrier()
    model(torch.ones(2, WIDTH)).sum().backward()
    unlucky.fails = True
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, WIDTH))
    if dist.get_rank() == 0:
        path.parent.mkdir()  # the harness removes it
    dist.barrier()


class Dropped(nn.Module):
    """Leaves out the layer that it is told to."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = [(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)) for width in widths]
        self.layers = nn.ModuleList([nn.Sequential(*pair) for pair in pairs])

    def forward(self, hidden: torch.Tensor, left_out: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            hidden = hidden if index == left_out else layer(hidden)
        return hidden


@on_ranks(2, shapes=["the same", "others"])
def test_ranks_that_run_other_units(shapes: str) -> None:
    """Never with what another rank sent for another unit; and the second that fails knows where the first one was."""
    widths, left_out = ((4, 4, 4), (1, 2)) if shapes == "the same" else ((4, 5, 6), (None, 1))
    model, mesh = Dropped(*widths), impatient_mesh()
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH), left_out[dist.get_rank()]).sum().backward()
    told = told_by(caught.value)
    assert "this happened while gathering the parameters of unit 'layers." in told
    other = rf"Rank {1 - dist.get_rank()} failed (before that|at the same time), while gathering the parameters of unit"
    both = [False] * 2
    dist.all_gather_object(both, re.search(other, told) is not None)
    assert any(both)


@on_ranks(2, way=["frozen", "converted"])
def test_ranks_whose_parameters_part(way: str) -> None:
    """After they agreed once. gloo would end a process that gets more than it expects."""
    model, _ = unlucky_model(impatient_mesh())
    model(torch.ones(2, WIDTH)).sum().backward()
    if dist.get_rank() and way == "converted":
        model[1].to(torch.float64)
    elif dist.get_rank():
        model[1][0].linear.weight.requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH)).sum().backward()
    told = {*re.findall(r"of unit '1' \((\d+) elements of torch.(\w+)\)", told_by(caught.value))}
    both: list[Any] = [None] * 2
    dist.all_gather_object(both, told)
    parts = {("99", "float32"), ("18", "float32")} if way == "frozen" else {("99", "float32"), ("99", "float64")}
    assert parts in both
    if way == "frozen":
        named = (
            "hen they told it last, parameter '1.0.linear.weight' of unit '1' required gradients on rank 0 and not on"
        )
        assert f"{named} rank 1" in told_by(caught.value)


@on_ranks(2, placements=["ddp", "zero1", "zero3"], frozen=["a parameter", "a unit"])
def test_parameters_that_one_rank_does_not_train(placements: str, frozen: str) -> None:
    """The one that reduces later knows it. gloo would end a process, or sum gradients of different units."""
    check_frozen_on_last(impatient_mesh(), placements, frozen)


@on_ranks(4)
def test_parameters_that_one_replica_does_not_train() -> None:
    groups = [dist.new_group(pair, timeout=timedelta(seconds=2)) for pair in ([0, 2], [1, 3], [0, 1], [2, 3])]
    rank = dist.get_rank()
    own = [groups[rank % 2], groups[2 + rank // 2]]
    mesh = DeviceMesh.from_group(own, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    check_frozen_on_last(mesh, "zero3", "a parameter")


def check_frozen_on_last(mesh: DeviceMesh, placements: str, frozen: str) -> None:
    """The last rank along the first axis of ``mesh`` has frozen something."""
    is_last = mesh.get_coordinate()[0] == mesh.size(0) - 1  # type: ignore[index]
    model, _ = unlucky_model(mesh, placements)
    if is_last:
        part = model[1] if frozen == "a unit" else model[1][0].linear.weight
        part.requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH)).sum().backward()
    told = told_by(caught.value)
    assert "arameter '1.0." in told
    ranks = dist.get_process_group_ranks(mesh.get_group(0))
    assert f"of unit '1' required gradients on rank {ranks[0]} and not on rank {ranks[-1]}: set requires_grad" in told
    know: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(know, isinstance(caught.value, StateError))
    assert any(know)


@on_ranks(2, placements=["ddp", "zero3"])
def test_what_is_trained_is_told_once(
    placements: str,
) -> None:
    """Whoever freezes and trains parameters by turns tells each of both, and nothing else in each step."""
    told: list[str] = []
    model, _ = unlucky_model(init_device_mesh("cpu", (2,)), placements)
    with patch.object(agreement, "post_last", lambda comm, topic, text: told.append(topic)):
        for step in range(8):
            model[1].requires_grad_(step % 4 != 2)
            model[2].linear.weight.requires_grad_(step % 2 == 0)
            model(torch.ones(2, WIDTH)).sum().backward()
    assert told == ["trained"] * 3


@on_ranks(2, placements=["ddp", "zero3"])
def test_two_models_of_one_kind_trained_by_turns(placements: str) -> None:
    """As generator and discriminator, or two critics: what one rank tells of one is not taken to be about the other."""
    preset, mesh = getattr(Placements, placements), impatient_mesh()
    first, second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    for model in (first, second):
        fully_shard(model, mesh=mesh, placements=preset)
    for _ in range(2):
        second.requires_grad_(False)
        loss = second(first(torch.ones(2, WIDTH))).sum()
        if dist.get_rank() == 0:
            time.sleep(0.3)  # the other rank tells of both before this one does of the second
        loss.backward()
        second.requires_grad_(True)
        first.requires_grad_(False)
        second(first(torch.ones(2, WIDTH))).sum().backward()
        first.requires_grad_(True)


@on_ranks(2, 3, placements=["ddp", "zero1", "zero3"])
def test_gradients_of_inputs_alone(placements: str) -> None:
    """As for adversarial examples, with a model that is frozen for that: nothing is reduced, so the ranks do not wait
    for each other, and what is told before and after may meet on the slower one."""
    model, _ = unlucky_model(impatient_mesh(), placements)
    for step in range(4):
        model.requires_grad_(False)
        x = torch.ones(2, WIDTH, requires_grad=True)
        loss = model(x).square().sum()
        if dist.get_rank() == step % 2:
            time.sleep(0.3)
        loss.backward()
        model.requires_grad_(True)
        model[1].requires_grad_(step != 1)
        model(x.detach()).square().sum().backward()


@on_ranks(2)
def test_what_failed_on_a_rank_that_went_on_is_told() -> None:
    """As one does that leaves out what it cannot compute."""
    model, unlucky = unlucky_model(impatient_mesh())
    unlucky.fails = dist.get_rank() == 1
    if unlucky.fails:
        with pytest.raises(ArithmeticError):
            model(torch.ones(2, WIDTH))
        unlucky.fails = False
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH))
    if dist.get_rank() == 0:
        assert "Rank 1 failed before that, in the forward of unit '1': ArithmeticError" in told_by(caught.value)


@on_ranks(2)
def test_what_failed_in_the_first_forward_over_replicas_is_told() -> None:
    model, unlucky = unlucky_model(impatient_mesh(), "ddp")
    unlucky.fails = dist.get_rank() == 1
    with pytest.raises(ArithmeticError if unlucky.fails else RuntimeError) as caught:
        model(torch.ones(2, WIDTH)).sum().backward()
    if not unlucky.fails:
        assert "Rank 1 failed before that, in the forward of unit '1': ArithmeticError" in told_by(caught.value)


@on_ranks(2)
def test_what_failed_before_ranks_communicated_again_is_not_told() -> None:
    mesh = init_device_mesh("cpu", (2,))
    (model, unlucky), (another, _) = (unlucky_model(mesh) for _ in range(2))
    comm, other = comm_for(dist.group.WORLD, torch.device("cpu")), 1 - dist.get_rank()

    def fail_with(error: Exception) -> Any:
        unlucky.fails, unlucky.error = True, error
        with pytest.raises(type(error)):
            model(torch.ones(2, WIDTH))
        unlucky.fails = False
        return told_elsewhere()

    def told_elsewhere() -> Any:
        dist.barrier()
        found = failure_elsewhere(comm)
        dist.barrier()
        return found

    for going_on in (another, model):
        told = fail_with(ArithmeticError(f"no luck on {dist.get_rank()}"))
        assert told == (other, f"in the forward of unit '1': ArithmeticError: no luck on {other}")
        going_on(torch.ones(2, WIDTH))
        assert told_elsewhere() is None
    # All ranks leave a forward by it: it is no cause of anything.
    assert fail_with(StopIteration("enough")) is None


@on_ranks(2)
def test_conversions_that_one_rank_has_taken_over() -> None:
    """By something that communicates nothing."""
    model = wrap(MLP(), fully_shard)
    model.to(torch.float64)
    if dist.get_rank():
        model.state_dict()
        for unit in units_of(model)[0].context.units:
            for group in unit.groups:
                group.adopt_registered()
    model(torch.ones(2, model.layers[0].in_features, dtype=torch.float64)).sum().backward()


@on_ranks(2)
def test_units_in_another_order() -> None:
    """In which they are wrapped, and not in which they run: ranks need not agree on that."""
    context = shardwise.FSDPCommContext("cpu")
    layers = [Layer(WIDTH), nn.Linear(WIDTH, WIDTH)]
    for layer in layers if dist.get_rank() else layers[::-1]:
        fully_shard(layer, comm_ctx=context)
    layers[1](layers[0](torch.ones(2, WIDTH))).sum().backward()


@on_ranks(2, how=["ddp", "replicas", "unsharded", "kept"])
def test_a_forward_on_one_rank_that_gathers_nothing(how: str) -> None:
    """Of another model than all ranks run first."""
    mesh = init_device_mesh("cpu", (2, 1) if how == "replicas" else (2,))
    placements = {"ddp": Placements.ddp, "kept": Placements.zero1}.get(how, Placements.zero3)
    first, second = (fully_shard(nn.Linear(WIDTH, w), mesh=mesh, placements=placements) for w in (2, 3))
    if how in ("unsharded", "kept"):
        second.unshard()
    if how == "kept":
        second.reshard()
    if not dist.get_rank():
        second(torch.ones(2, WIDTH))
    dist.barrier()
    for model in (first, second):
        model(torch.ones(2, WIDTH)).sum().backward()


@on_ranks(2)
def test_posts_over_ranks_that_are_connected_again_have_other_numbers() -> None:
    """The group has the name of the one before, and the store its posts; in the next world too, if torchrun made it."""
    dist.barrier()
    store, names, numbers = dist.HashStore(), [], []
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for _ in range(2):
            group = dist.new_group([0], use_local_synchronization=True)
            names.append(group.group_name)
            numbers.append(post(comm_for(group, torch.device("cpu")), ""))
            dist.destroy_process_group(group)
    if torch.__version__ < "2.14":  # whose groups have other names each time, and so other places for their posts
        assert len({*names}) == 1
        assert len({*numbers}) == 4
    assert len({*zip(names, numbers, strict=True)}) == 4


@on_ranks(2)
def test_the_store_keeps_the_latest_posts() -> None:
    """Each model that is made leaves some."""
    world = dist.group.WORLD
    assert world is not None
    comm = comm_for(world, torch.device("cpu"))
    numbers = [post(comm, "text") for _ in range(3 * KEPT)]
    dist.barrier()
    kept = [number for number in numbers if posted_by(comm, 1 - comm.rank, number) == "text"]
    assert kept == numbers[-KEPT:]


@on_ranks(2)
def test_models_on_two_devices_of_one_group() -> None:
    world = dist.group.WORLD
    assert world is not None
    host, other = comm_for(world, torch.device("cpu")), comm_for(world, torch.device("cuda"))
    if not dist.get_rank():
        assert post(host, "the host's") != post(other, "the other's")
    dist.barrier()
    if dist.get_rank():
        assert posted_by(host, 0, post(host, "")) == "the host's"
        assert posted_by(other, 0, post(other, "")) == "the other's"


VERBS: dict[str, Callable[[Any, str], object]] = {
    "computing the norm of the gradients": lambda model, _: shardwise.clip_grad_norm_(model.parameters(), 1.0),
    "gathering the full state dict": lambda model, _: shardwise.full_state_dict(model),
    "loading a full state dict": lambda model, _: shardwise.load_full_state_dict(model, {}),
    "saving safetensors": lambda model, path: shardwise.save_safetensors(model, path),
    "saving a checkpoint to": lambda model, path: shardwise.save(path, model=model),
    "loading a checkpoint from": lambda model, path: shardwise.load(path, model=model),
    "writing": lambda model, path: shardwise.save(path, model=model, async_=True),
}


class Ends:
    """A body that the test below runs by name."""

    @staticmethod
    def body(verb: str, path: str) -> None:
        """The last rank is gone before the ``verb``, or once everything is copied and others write beside training."""
        model = unlucky_model(init_device_mesh("cpu", (dist.get_world_size(),)))[0]
        model(torch.ones(2, WIDTH)).sum().backward()
        shardwise.save(path, model=model)
        if dist.get_rank() == dist.get_world_size() - 1:
            if verb != "writing":
                os._exit(3)
            sharded.write_leaves = lambda *_: os._exit(3)
        VERBS[verb](model, path)
        shardwise.wait()


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_a_rank_does_not_come_to_is_named(verb: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3).run(__name__, "Ends", {"verb": verb, "path": str(tmp_path)}, 60.0)
    tracebacks = dict(caught.value.tracebacks)
    assert tracebacks.pop(2) == "the process died"
    assert {*tracebacks} == {0, 1}, caught.value
    what = "saving a checkpoint to" if verb == "writing" else verb
    what += f" {tmp_path}" if what.endswith(("to", "from")) else ""
    for traceback in tracebacks.values():
        assert f"shardwise: this happened while {what}" in traceback, traceback


@on_ranks(2)
def test_why_a_rank_does_not_come_to_a_verb_is_told() -> None:
    model, unlucky = unlucky_model(impatient_mesh(), "ddp")
    unlucky.fails = dist.get_rank() == 1
    with pytest.raises(ArithmeticError) if unlucky.fails else nullcontext():
        model(torch.ones(2, WIDTH))
    dist.barrier()
    if not unlucky.fails:
        with pytest.raises(RuntimeError) as caught:
            shardwise.full_state_dict(model)
        told = told_by(caught.value)
        assert (
            "this happened while gathering the full state dict. Rank 1 failed before that, in the forward of" in told
        ), told


@on_ranks(2)
def test_what_failed_before_ranks_did_a_verb_together_is_not_told() -> None:
    model, comm = unlucky_model(init_device_mesh("cpu", (2,)))[0], comm_for(dist.group.WORLD, torch.device("cpu"))
    model(torch.ones(2, WIDTH)).sum().backward()
    for verb in ("computing the norm of the gradients", "gathering the full state dict"):
        tell_failure(f"no luck on {dist.get_rank()}", [comm])
        dist.barrier()
        assert failure_elsewhere(comm) == (1 - dist.get_rank(), f"no luck on {1 - dist.get_rank()}")
        dist.barrier()
        VERBS[verb](model, "")
        dist.barrier()
        assert failure_elsewhere(comm) is None
        dist.barrier()


@on_ranks(2)
def test_what_failed_is_told_while_a_checkpoint_is_saved_beside() -> None:
    """Whose ranks meet over connections of their own, while others may wait in training."""
    model, comm = unlucky_model(init_device_mesh("cpu", (2,)))[0], comm_for(dist.group.WORLD, torch.device("cpu"))
    told = f"no luck on {dist.get_rank()}", f"no luck on {1 - dist.get_rank()}"
    tell_failure(told[0], [comm])
    with shared_directory() as path:
        shardwise.save(path, model=model, async_=True)
        shardwise.wait()
    dist.barrier()
    assert failure_elsewhere(comm) == (1 - dist.get_rank(), told[1])
    dist.barrier()


@on_ranks(2)
def test_what_a_user_raises_in_a_verb_is_not_explained() -> None:
    class Extra(Layer):
        def get_extra_state(self) -> Any:
            raise RuntimeError("no state")

        def set_extra_state(self, _: Any) -> None: ...

    model = fully_shard(Extra(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="no state") as caught:
        shardwise.full_state_dict(model)
    assert "this happened while" not in told_by(caught.value)


# -- What to wrap


@on_ranks(1, container=[nn.ModuleList, nn.ModuleDict])
def test_container_without_forward(container: Any) -> None:
    layers = {"a": Layer(), "b": Layer()} if container is nn.ModuleDict else [Layer(), Layer()]
    module = container(layers)
    with refused(ValueError, container.__name__, "no forward", "each module in it"):
        fully_shard(module)
    with refused(ValueError, container.__name__, "no forward"):
        fully_shard([Layer(), module])


@on_ranks(1)
def test_container_with_a_forward_of_its_own() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x)
            return x

    chain = Chain([Layer(), Layer()])
    fully_shard(chain)
    chain(batch(0, 0, 2, WIDTH)).sum().backward()


@on_ranks(1)
def test_module_wrapped_twice() -> None:
    model = stack(Layer(), Layer())
    fully_shard(model.layers[0], module_fqn="layers.0")
    with refused(ValueError, "FSDPLayer", "layers.0", "already", "once"):
        fully_shard(model.layers[0])
    with refused(ValueError, "FSDPLayer", "already"):
        fully_shard([model.layers[1], model.layers[0]])
    assert not isinstance(model.layers[1], shardwise.FSDPModule), "a refused call changed something"
    parts = [Layer(), Layer()]
    fully_shard(parts)
    parts[0].unshard()  # which makes the unit the root of its two modules
    with refused(ValueError, "FSDPLayer 'Layer (root)' was wrapped"):
        fully_shard(parts[1])


@on_ranks(1)
def test_wrapped_from_the_top_down() -> None:
    """The inner module's parameters belong to the outer unit by then: that is not a tie."""
    model = stack(Layer(), Layer())
    fully_shard(model)
    with refused(ValueError, "linear.weight", "inner"):
        fully_shard(model.layers[0])


@on_ranks(1)
def test_nothing_or_something_else_to_wrap() -> None:
    with refused(ValueError, "empty list"):
        fully_shard([])
    with refused(TypeError, "int", "module"):
        fully_shard([3])  # type: ignore[call-overload]
    with refused(TypeError, "str", "module"):
        fully_shard([Layer(), "layer"])  # type: ignore[list-item]


@on_ranks(1)
def test_class_that_allows_no_plain_subclass() -> None:
    class Registered(nn.Module):
        def __init_subclass__(cls, *, name: str) -> None:
            super().__init_subclass__()

    class Layers(Registered, name="layers"):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    model, inputs = Layers(), batch(0, 0, 2, WIDTH)
    expected = model(inputs)
    with refused(TypeError, "subclass of Layers", "'name'"):
        fully_shard(model)
    assert torch.equal(model(inputs), expected), "a refused call changed something"


@on_ranks(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript() -> None:
    for compiled in (torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))):
        model = nn.Sequential(compiled, nn.Linear(2, 2))
        for module, name in ((compiled, "'weight'"), (model, "'0.weight'")):
            with refused(ValueError, name, "TorchScript", "torch.compile"):
                fully_shard(module)
        model(torch.ones(1, 2)).sum().backward()  # nothing was changed
    fully_shard(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU())))(torch.ones(1, 2)).sum().backward()


@on_ranks(1)
def test_scalar_parameter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = Layer(), nn.Parameter(torch.tensor(1.0))

    with refused(ValueError, "'scale'", "scalar", "1-D"):
        fully_shard(Scaled())


@on_ranks(1)
def test_lazy_parameter() -> None:
    with refused(ValueError, "'1.weight'", "lazy modules"):
        fully_shard(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


@on_ranks(1)
def test_gradients_of_another_dtype_than_the_parameter() -> None:
    layer = Layer().bfloat16()
    parameter = next(layer.parameters())
    parameter.grad_dtype = None  # any
    fully_shard(layer)
    layer = Layer().bfloat16()
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    with refused(ValueError, "of torch.bfloat16 has grad_dtype=torch.float32", "reduce_dtype"):
        fully_shard(layer)


@on_ranks(1)
def test_parameter_that_is_a_dtensor_already() -> None:
    layer = Layer()
    mesh = init_device_mesh("cpu", (1,))
    layer.gate = nn.Parameter(distribute_tensor(layer.gate.detach(), mesh, [Replicate()]))
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        fully_shard(layer)
    assert "'gate'" in str(caught.value)
    assert "DTensor" in str(caught.value)


@on_ranks(1)
def test_module_that_two_units_share() -> None:
    """Neither contains the other, so the order of wrapping is not what is wrong."""
    one, other = stack(Layer()), stack(Layer())
    other.layers[0] = one.layers[0]
    fully_shard(one)
    with refused(ValueError, "linear.weight", "share", "one unit", "fully_shard(["):
        fully_shard(other)


@on_ranks(2, how=["units", "unit_and_root"])
def test_tied_across_units(how: str) -> None:
    model = Transformer(layers=1, tied=True)
    fully_shard(model.embed, module_fqn="embed")
    with refused(ValueError, "weight", "tied", "one unit", "fully_shard(["):
        fully_shard(model.head if how == "units" else model)


@on_ranks(1)
def test_deepcopy() -> None:
    model = stack(Layer())
    fully_shard(model.layers[0])
    fully_shard(model)
    with refused(TypeError, "FSDPStack", "sharded", "before fully_shard", "load"):
        copy.deepcopy(model)
    with refused(TypeError, "FSDPLayer"):
        copy.deepcopy(model.layers)
    # After the first forward the name is known.
    model(batch(0, 0, 2, WIDTH))
    with refused(TypeError, "layers.0", "FSDPLayer"):
        copy.deepcopy(model.layers[0])


class RebuildsItself(Layer):
    def __reduce__(self) -> Any:
        return _layer_of, (np.arange(2),)


def _layer_of(_: Any) -> Layer:
    return Layer()


@on_ranks(1)
def test_pickles() -> None:
    model = stack(Layer())
    fully_shard(model.layers[0])
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with refused(TypeError, "sharded by fully_shard", "pickled", "state_dict", "shardwise.save"):
            pickle.dumps(model, protocol)
    fully_shard(model)
    model(batch(0, 0, 2, WIDTH))
    with refused(TypeError, "torch.save(model)", "full_state_dict"):
        torch.save(model, io.BytesIO())
    with refused(TypeError, "layers.0"):
        torch.save(model.layers, io.BytesIO())
    assert type(copy.copy(model.layers[0])) is Layer
    for copied in (pickle.loads(pickle.dumps(fully_shard(RebuildsItself()))), copy.copy(fully_shard(RebuildsItself()))):
        assert type(copied) is Layer


# -- How to wrap


@on_ranks(1, axes=[3, 4])
def test_mesh_with_too_many_axes(axes: int) -> None:
    mesh = init_device_mesh("cpu", (1,) * axes, mesh_dim_names=tuple("abcd"[:axes]))
    with refused(ValueError, "1-D", "2-D", f"{axes}-D", "slice"):
        fully_shard(Layer(), mesh=mesh)


@on_ranks(1)
def test_mesh_that_the_strategy_cannot_use() -> None:
    with refused(ValueError, "2-D", "mesh"):
        fully_shard(Layer(), mesh=init_device_mesh("cpu", (1,)), placements=Placements.hsdp)
    with pytest.raises((TypeError, ValueError), match="mesh"):
        fully_shard(Layer(), mesh=(1,))  # type: ignore[call-overload]


@on_ranks(3)
def test_mesh_without_this_rank() -> None:
    mesh = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("outer", "data"))
    layer = Layer()
    if dist.get_rank() < 2:
        fully_shard(layer, mesh=mesh)
        layer(torch.ones(2, WIDTH)).sum().backward()
        return
    for options in ({}, {"dp_mesh_dims": named_axes(shard="data")}):
        with refused(ValueError, "rank 2", "data=2", "ranks of its mesh"):
            fully_shard(layer, mesh=mesh, **options)
    assert not isinstance(layer, shardwise.FSDPModule)


@on_ranks(4, ranks=[[3, 2, 1, 0], [[0, 2], [3, 1]]])
def test_mesh_whose_ranks_do_not_ascend(ranks: list[Any]) -> None:
    """Replicas would add up gradients of different rows, and checkpoints would have them in another order."""
    names = ("replicate", "shard")[-torch.tensor(ranks).ndim :]
    mesh, layer = DeviceMesh("cpu", ranks, mesh_dim_names=names), Layer()
    with refused(ValueError, "mesh", "ascend", "shard"):
        fully_shard(layer, mesh=mesh)
    assert not isinstance(layer, shardwise.FSDPModule)


@on_ranks(1, policy=["one dtype", "two dtypes"])
def test_a_refused_parameter_leaves_the_others_as_they_are(policy: str) -> None:
    """The last one does not fit; nothing is sharded yet, so the model can be wrapped once that is mended."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    if policy == "two dtypes":
        model[1].to(torch.bfloat16)
    for name, parameter in list(model[0].named_parameters()):
        model[0].register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate(), Replicate()])))
    before = dict(model.named_parameters())
    with refused(ValueError, "1.weight", "dp_mesh_dims", "distribute"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=named_axes(shard="dp"))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight, mesh, [Replicate(), Replicate()]))
    fully_shard(model, mesh=mesh, dp_mesh_dims=named_axes(shard="dp"))


@on_ranks(2, 4, size=[3, 0, -1, 8])
def test_int_reshard_that_does_not_divide(size: int) -> None:
    world_size = dist.get_world_size()
    with refused(ValueError, f"reshard_after_forward={size}", f"{world_size} ranks", "divide", "True"):
        fully_shard(Layer(), reshard_after_forward=size)


@on_ranks(1, value=["yes", 0.5, [1]])
def test_reshard_of_another_type(value: Any) -> None:
    with refused((ValueError, TypeError), "reshard_after_forward", repr(value), "bool", "int"):
        fully_shard(Layer(), reshard_after_forward=value)


@on_ranks(2)
def test_int_reshard_of_kept_parameters() -> None:
    with refused(ValueError, "reshard_after_forward=2", "unsharded", "parameter='shard'"):
        fully_shard(Layer(), reshard_after_forward=2, placements="zero2")


@on_ranks(2)
def test_int_reshard_of_named_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "data"))
    layer = nn.Linear(4, 4)
    for kind in (ValueError, NotImplementedError):
        with refused(kind, "reshard_after_forward=2", "dp_mesh_dims", "True"):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=named_axes(shard="data"), reshard_after_forward=2)


@on_ranks(2, 4)
def test_dim_that_does_not_divide() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, 8))
    with refused(
        (ValueError, NotImplementedError), "'0.weight'", "(8, 9)", "dim 1", "evenly", f"{dist.get_world_size()} ranks"
    ):
        fully_shard(layer, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None)
    with pytest.raises(ValueError, match="dim 1"):
        fully_shard(layer, shard_placement_fn=lambda p: Shard(-1) if p.ndim > 1 else None)
    assert not isinstance(layer[0].weight, torch.distributed.tensor.DTensor), "a refused call changed something"


@on_ranks(1)
def test_placement_function_that_gives_nonsense() -> None:
    with refused(ValueError, "'linear.weight'", "no dim 3", "(9, 9)"):
        fully_shard(Layer(), shard_placement_fn=lambda p: Shard(3) if p.ndim > 1 else None)
    with refused((ValueError, TypeError), "linear.weight", "Shard"):
        fully_shard(Layer(), shard_placement_fn=lambda p: Replicate())


@on_ranks(1)
def test_arguments_of_other_types() -> None:
    newer = MixedPrecisionPolicy()
    for given, kind, words in (
        (lambda parameter: torch.float64, ValueError, ("'linear.weight'", "torch.float64", "torch.float32")),
        (torch.float32, TypeError, ("must be a function",)),
    ):
        object.__setattr__(newer, "param_dtype_override_fn", given)  # a field from torch 2.15 on
        with refused(kind, "mp_policy", "param_dtype_override_fn", *words):
            fully_shard(Layer(), mp_policy=newer)
    with refused(TypeError, "mp_policy", "MixedPrecisionPolicy", "dtype"):
        fully_shard(Layer(), mp_policy=torch.bfloat16)  # type: ignore[call-overload]
    with refused(TypeError, "offload_policy", "OffloadPolicy", "bool"):
        fully_shard(Layer(), offload_policy=True)  # type: ignore[call-overload]
    with refused(ValueError, "zero4", "zero3"):
        fully_shard(Layer(), placements="zero4")
    with refused(TypeError, "Placements", "int"):
        fully_shard(Layer(), placements=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="comm_ctx"):
        fully_shard(Layer(), comm_ctx="cpu")  # type: ignore[call-overload]
    layer: Any = Layer()
    odd = {"module_fqn": 3, "shard_placement_fn": Shard(0), "dp_mesh_dims": "x"}
    for name, value in odd.items():
        with refused(TypeError, name, type(value).__name__):
            fully_shard(layer, **{name: value})
    for dtype in ("param_dtype", "reduce_dtype"):
        with refused(ValueError, "mp_policy", dtype, "int8"):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**{dtype: torch.int8}))  # type: ignore[arg-type]
    with refused(TypeError, "mp_policy", "reduce_dtype", "bfloat16"):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype="bfloat16"))  # type: ignore[arg-type]
    first = next(layer.parameters())
    for ignored in (first, layer, {"linear.weight"}, [layer], {"linear.weight": first}, {first.data}, 3):
        with refused(TypeError, "ignored_params"):
            fully_shard(layer, ignored_params=ignored)
    assert not isinstance(layer, shardwise.FSDPModule)


@on_ranks(1)
def test_strategies_that_make_no_sense() -> None:
    with refused(ValueError, "parameter='sharded'", "replicate", "shard"):
        Placements(parameter="sharded")  # type: ignore[arg-type]
    with refused(ValueError, "gradient", "optimizer", "both"):
        Placements(gradient="replicate")
    with refused(ValueError, "optimizer='shard'"):
        Placements(parameter="shard", gradient="replicate", optimizer="replicate")


# -- When to use


@on_ranks(1, 2, how=["forward", "unshard", "half"])
def test_still_on_the_meta_device(how: str) -> None:
    with torch.device("meta"):
        model: Any = stack(Layer(), Layer())
    wrap(model, fully_shard)
    if how == "half":
        model.layers[0].to_empty(device="cpu")
    x = batch(0, dist.get_rank(), 2, WIDTH)
    with refused((ValueError, RuntimeError), "meta", "to_empty", "first.weight" if how != "unshard" else "gate"):
        if how == "unshard":
            model.layers[1].unshard()
        else:
            model(x)


@on_ranks(1)
def test_partly_materialized_unit() -> None:
    with torch.device("meta"):
        layer: Any = Layer()
    fully_shard(layer, module_fqn="layers.7")
    layer.linear.to_empty(device="cpu")
    with refused((ValueError, RuntimeError), "layers.7", "gate", "meta", "to_empty"):
        layer(batch(0, 0, 2, WIDTH))
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    plain = Layer()
    for parameter in plain.parameters():
        nn.init.ones_(parameter)
    torch.testing.assert_close(layer(batch(0, 0, 2, WIDTH)), plain(batch(0, 0, 2, WIDTH)))


def matrix_product(model: Any, x: torch.Tensor) -> None:
    F.linear(x, model.layers[1].linear.weight)


def arithmetic(model: Any, x: torch.Tensor) -> None:
    _ = x * model.layers[1].gate


def submodule_forward(model: Any, x: torch.Tensor) -> None:
    model.layers[1].linear(x)


def concatenation(model: Any, x: torch.Tensor) -> None:
    torch.cat([x, model.layers[1].linear.weight])


def in_place(model: Any, x: torch.Tensor) -> None:
    x.add_(model.layers[1].gate)


USES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    use.__name__: use for use in (matrix_product, arithmetic, submodule_forward, concatenation, in_place)
}


@on_ranks(2, use=list(USES), preset=["zero2", "zero3"], trained=[True, False])
def test_used_outside_the_forward(use: str, preset: str, trained: bool) -> None:
    model = stack(Layer(), Layer())
    wrap(model, fully_shard, placements=preset)
    x = batch(0, dist.get_rank(), 2, WIDTH)
    model(x)
    if trained:
        model(x).sum().backward()
    name = "layers.1.gate" if use in ("arithmetic", "in_place") else "layers.1.linear"
    with refused((ValueError, RuntimeError), f"'{name}", "'layers.1'", "unshard()", "register_fsdp_forward_method"):
        USES[use](model, x)
    model.layers[1].unshard()
    USES[use](model, x)


@on_ranks(2)
def test_used_in_another_units_forward() -> None:
    """A head that borrows the embedding's weight, which is another unit's."""

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(29, WIDTH), Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.layer(self.embed(x)), self.embed.weight)

    model = Borrows()
    fully_shard(model.embed)
    fully_shard(model)
    with refused((ValueError, RuntimeError), "'embed.weight'", "'embed'", "unshard()"):
        model(torch.zeros(2, 3, dtype=torch.int64))


@on_ranks(2)
def test_custom_method_that_is_not_registered() -> None:
    class Encoder(Layer):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = Encoder()
    fully_shard(model, module_fqn="encoder")
    with refused((ValueError, RuntimeError), "encoder", "register_fsdp_forward_method"):
        model.encode(batch(0, 0, 2, WIDTH))
    shardwise.register_fsdp_forward_method(model, "encode")
    model.encode(batch(0, 0, 2, WIDTH))
    with refused((ValueError, AttributeError), "Encoder", "decode"):
        shardwise.register_fsdp_forward_method(model, "decode")


@on_ranks(1)
def test_plain_errors_keep_their_message() -> None:
    """Only what comes from mixing is explained: a wrong shape is told as torch tells it."""
    layer = Layer()
    fully_shard(layer)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.ones(2, WIDTH + 1))
    layer.reset_iter_state()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"size|shape"):
        _ = layer.gate + layer.linear.weight[:, :2]


@on_ranks(2)
def test_sparse_gradients() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(29, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embed(x)

    model = Sparse()
    fully_shard(model)
    with refused((ValueError, RuntimeError), "embed.weight", "sparse"):
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()


class Bounded(nn.Module):
    """Its embedding limits the norms of rows that it looks up, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(29, 4, max_norm=0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embed(x))


@on_ranks(1, 2, preset=["zero3", "zero1"], inner=[True, False])
def test_writes_to_gathered_parameters(preset: Any, inner: bool) -> None:
    """In the first forward, and the first with gradients; not where the shards are what is written."""
    model, tokens = Bounded(), torch.arange(6).view(2, 3)
    if inner:
        fully_shard(model.embed, placements=preset)
    fully_shard(model, placements=preset)
    unit = "unit 'embed'" if inner else r"unit 'Bounded \(root\)'"
    warned: Any = pytest.warns(UserWarning, match=rf"{unit}: forward wrote to 'embed.weight' in place.*max_norm")
    if dist.get_world_size() == 1:
        warned = nullcontext()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warned, torch.no_grad():
            model(tokens)
        with warned:
            model(tokens).sum().backward()
        model(tokens).sum().backward()
        fine = wrap(Transformer(1), fully_shard, placements=preset)
        fine(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()


@on_ranks(1, 2, preset=["zero3", "zero1"], reshards=[True, False])
def test_writes_between_forward_and_backward(preset: Any, reshards: bool) -> None:
    """To parameters that stay gathered until then, as those of a zero3 root do; elsewhere shards are written."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], placements=preset, reshard_after_forward=reshards)
    fully_shard(model, placements=preset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            with torch.no_grad():
                for parameter in model.parameters():
                    # Backward refuses changed weights by itself, as it does without sharding.
                    if parameter.ndim == 1:
                        parameter.mul_(0.5)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    messages = [str(one.message) for one in caught if "while they" in str(one.message)]
    root = ["unit 'Sequential (root)'"] if preset == "zero3" else []
    expected = root if reshards else [*root, "unit '0'"]
    assert [one.partition(":")[0] for one in messages] == ([] if dist.get_world_size() == 1 else expected)


@on_ranks(1, 2)
def test_writes_after_unshard() -> None:
    model, x = fully_shard(nn.Linear(4, 4)), torch.ones(2, 4)
    told: Any = pytest.warns(UserWarning, match=r"unit 'Linear \(root\)': something wrote, while .*, to 'bias'")
    if dist.get_world_size() == 1:
        told = nullcontext()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(x).sum().backward()
        for uses in (lambda: model(x).sum().backward(), model.reshard):
            model.unshard()
            uses()
            model.unshard()
            with torch.no_grad():
                model.bias.zero_()
            with told:
                uses()
            uses()
        loss = model(x).sum()
        for uses in (loss.backward, model.reshard):
            with torch.no_grad():
                model.bias.zero_()
            with told:
                model.unshard()  # again
            uses()
            model.unshard()


@on_ranks(2)
def test_gathered_parameters_that_are_made_anew_after_writes() -> None:
    """Nobody wrote to those."""
    model, tokens = Bounded(), torch.arange(6)
    fully_shard(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.warns(UserWarning, match="forward wrote to 'embed.weight'"):
            model(tokens)
        model.embed.max_norm = None
        model.to(torch.float64)
        model(tokens)


class Moves(nn.Linear):
    """Moves its weight to other memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return super().forward(x)


@on_ranks(2)
def test_gathered_parameters_that_are_moved_while_evaluating() -> None:
    """Told twice: not at every forward for ever."""
    model = fully_shard(Moves(4, 4))
    with torch.no_grad():
        for _ in range(2):
            with pytest.warns(UserWarning, match="forward wrote to 'weight' in place"):
                model(torch.ones(2, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(2, 4))


@on_ranks(2)
def test_dtypes_of_one_unit_that_part() -> None:
    model: Any = stack(Layer())
    wrap(model, fully_shard)
    before = {name: p.dtype for name, p in model.named_parameters()}
    with refused((ValueError, RuntimeError), "float64", "float32", "alike"):
        model.layers[0].linear.to(torch.float64)
        model(batch(0, 0, 2, WIDTH))
    assert before["first.weight"] == torch.float32


# -- Methods


@on_ranks(2)
def test_parameter_that_is_removed_after_wrapping() -> None:
    for remove in (
        lambda layer: setattr(layer, "bias", None),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "bias", nn.ReLU()),
    ):
        layer = nn.Linear(4, 4)
        shardwise.fully_shard(layer)
        remove(layer)
        with refused(ValueError, "lost its parameter 'bias'", "before"):
            layer(torch.ones(1, 4))


@on_ranks(1)
def test_reset_on_an_inner_unit() -> None:
    model: Any = stack(Layer())
    wrap(model, fully_shard)
    model(batch(0, 0, 2, WIDTH))
    with refused((ValueError, RuntimeError), "layers.0", "root"):
        model.layers[0].reset_iter_state()
    model.reset_iter_state()


@on_ranks(1)
def test_arguments_of_methods() -> None:
    model: Any = stack(Layer(), Layer())
    wrap(model, fully_shard)
    with refused((ValueError, TypeError), "bool", "2"):
        model.set_reshard_after_forward(2)
    for method in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        with refused((ValueError, TypeError), "Linear", "fully_shard"):
            method([model.first])
    with refused(TypeError, "max_input_buffers", "int"):
        model.set_reduce_scatter_max_input_buffers(1.5)
    with refused(ValueError, "max_input_buffers", "1", "0"):
        model.set_reduce_scatter_max_input_buffers(0)
    with refused((ValueError, TypeError), "share_comm_ctx", "Linear"):
        shardwise.share_comm_ctx([model, model.first])
    for verb in (model.set_modules_to_forward_prefetch, shardwise.share_comm_ctx):
        with refused(TypeError, verb.__name__, "list of modules"):
            verb(model)
        with refused(ValueError, verb.__name__, "NoneType"):
            verb([None])
    for factor in (0, -1, float("nan"), float("inf")):
        with refused(ValueError, "divide factor", repr(factor)):
            model.set_gradient_divide_factor(factor)
    for method in ("set_gradient_divide_factor", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with refused(TypeError, method.removeprefix("set_").replace("gradient_", "").split("_")[0], "nonsense"):
            getattr(model, method)("nonsense")
    with refused(TypeError, "set_all_reduce_hook", "str"):
        model.set_all_reduce_hook("nonsense")
    with refused(TypeError, "repoint", "Linear"):
        shardwise.repoint(model.first)
    with refused((ValueError, RuntimeError, NotImplementedError), "symm"):
        model.set_symm_mem_for_comm()


@on_ranks(2)
def test_gradients_that_are_not_finite() -> None:
    model: Any = stack(Layer())
    wrap(model, fully_shard)
    (model(batch(0, dist.get_rank(), 2, WIDTH)).sum() * float("inf")).backward()
    with refused(RuntimeError, "norm", "nan", "error_if_nonfinite"):
        shardwise.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@on_ranks(2, 3)
def test_a_gradient_that_is_nan_on_one_rank() -> None:
    """On each in turn: a maximum of numbers and NaN may lose it, by their order."""
    model: Any = stack(Layer())
    wrap(model, fully_shard)
    for where in range(dist.get_world_size()):
        for order in (2.0, float("inf"), -float("inf")):
            model.zero_grad()
            model(batch(0, dist.get_rank(), 2, WIDTH)).sum().backward()
            if dist.get_rank() == where:
                model.first.weight.grad.to_local()[0, 0] = float("nan")
            with refused(RuntimeError, "norm", "nan", "error_if_nonfinite"):
                shardwise.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)


@on_ranks(2, optimizer=[torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_of_replaced_parameters(optimizer: Any) -> None:
    model = MLP()
    dead = optimizer(model.parameters(), lr=0.1)
    wrap(model, fully_shard)
    model(batch(0, dist.get_rank(), 2, WIDTH)).sum().backward()
    with refused((ValueError, RuntimeError), optimizer.__name__, "'layers.0.weight'", "before fully_shard", "repoint"):
        dead.step()
    with refused((ValueError, RuntimeError), "repoint"):
        dead.step(lambda: torch.ones(()))


@on_ranks(2)
def test_optimizer_of_unsharded_parameters() -> None:
    """One that is made while parameters are gathered holds tensors that nothing reads: the same silent death."""
    model: Any = Layer()
    fully_shard(model)
    model.unshard()
    dead = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    model(batch(0, dist.get_rank(), 2, WIDTH)).sum().backward()
    with refused((ValueError, RuntimeError), "SGD", "gate"):
        dead.step()


@on_ranks(2)
def test_state_dict_of_other_shapes() -> None:
    model = stack(Layer())
    wrap(model, fully_shard)
    state = dict(model.state_dict())
    state["layers.0.gate"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"layers\.0\.gate|gate"):
        model.load_state_dict(state)
    model(batch(0, dist.get_rank(), 2, WIDTH)).sum().backward()


class UnportableError(Exception):
    """Cannot be pickled and made again."""

    def __init__(self, what: str, where: str):
        super().__init__(f"{what} in {where}")


@on_ranks(2)
def test_a_rank_raises_its_own_error_whatever_others_can_be_told() -> None:
    def fail_on_the_second() -> None:
        if dist.get_rank():
            raise UnportableError("no luck", "here")

    peers, kind = Peers(init_device_mesh("cpu", (2,))), UnportableError if dist.get_rank() else RuntimeError
    with pytest.raises(kind, match="no luck in here") as caught, peers.together():
        fail_on_the_second()
    assert ("happened on rank 1" in told_by(caught.value)) == (dist.get_rank() == 0)

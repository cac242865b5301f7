"""Ranks that are threads of one process, over torch's group for them: it is written in Python and has no backend."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import shardwise
from shardwise.core.comm import new_group_of
from shardwise.fairscale import OSS, ShardedDataParallel

from ..models import MLP, inputs_for, wrap
from ..needs import needs_dtensors_on_threads

pytestmark = needs_dtensors_on_threads

LIMIT = 60.0
Body = Callable[[int], Any]


@pytest.fixture
def on_threads() -> Iterator[Callable[[int, Body], list[Any]]]:
    """Run a body on so many threads, each of which is a rank; gives what each returned."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()

    def run(world_size: int, body: Body) -> list[Any]:
        store, results = dist.HashStore(), dict[int, Any]()

        def serve(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = body(rank)
            except BaseException as error:
                threaded.ProcessLocalGroup.exception_handle(error)  # others wait for this one
                results[rank] = error
            finally:
                dist.destroy_process_group()

        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        threaded.ProcessLocalGroup.reset()
        assert len(results) == world_size, f"only ranks {sorted(results)} came to their end"
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[rank] for rank in range(world_size)]

    yield run
    threaded._uninstall_threaded_pg()
    isolate(False)


def _model() -> nn.Module:
    model = MLP()  # threads share torch's generator
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    return model


def _train_plainly(ranks: int, dtype: torch.dtype | None) -> list[list[torch.Tensor]]:
    """Losses of each of three steps by rank, and last the parameters then: of one process that has all batches, and
    computes in ``dtype`` where that is given. torch's FSDP2 is no truth here, since its caches are not for threads."""
    model, results = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        losses, gradients = [], []
        for rank in range(ranks):
            used = copy.deepcopy(model).to(dtype or torch.float32)
            loss = used(inputs_for(model, 10 * step + rank).to(dtype or torch.float32)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            gradients.append([parameter.grad.float() for parameter in used.parameters()])  # type: ignore[union-attr]
        for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.stack(of_ranks).mean(0)
        optimizer.step()
        results.append(losses)
    return [*results, [parameter.detach() for parameter in model.parameters()]]


def _check_training(rank: int, truth: list[list[torch.Tensor]], **options: Any) -> None:
    """Train as `_train_plainly` did, on this rank's batches."""
    model = wrap(_model(), shardwise.fully_shard, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, losses in enumerate(truth[:-1]):
        optimizer.zero_grad()
        loss = model(inputs_for(model, 10 * step + rank)).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.detach(), losses[rank])
    torch.testing.assert_close([*shardwise.full_state_dict(model, rank0_only=False).values()], truth[-1])


@pytest.mark.parametrize(
    "shape", [(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2)], ids=lambda shape: "x".join(map(str, shape))
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_threads_train_as_one_process_does(
    on_threads: Callable[[int, Body], list[Any]], shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    truth = _train_plainly(math.prod(shape), dtype)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        _check_training(rank, truth, mesh=mesh, mp_policy=policy)

    on_threads(math.prod(shape), body)


def test_threads_make_groups_at_the_same_time(on_threads: Callable[[int, Body], list[Any]]) -> None:
    """Each names its own; afterwards torch names groups itself."""
    naming, truth = distributed_c10d._hash_ranks_to_str, _train_plainly(4, None)

    def body(rank: int) -> None:
        _check_training(rank, truth, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
        groups = [new_group_of([0, 1, 2, 3], "test") for _ in range(5)]
        names: list[Any] = [None] * 4
        dist.all_gather_object(names, [group.group_name for group in groups])
        assert names == [names[0]] * 4
        assert len(set(names[0])) == len(groups)

    on_threads(4, body)
    assert distributed_c10d._hash_ranks_to_str is naming


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
def test_every_preset_trains_on_threads(on_threads: Callable[[int, Body], list[Any]], preset: str) -> None:
    truth, placements = _train_plainly(3, None), getattr(shardwise.Placements, preset)
    on_threads(3, lambda rank: _check_training(rank, truth, mesh=init_device_mesh("cpu", (3,)), placements=placements))


def test_checkpoints_of_threads(on_threads: Callable[[int, Body], list[Any]], tmp_path: Path) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        model, other = (wrap(MLP(), shardwise.fully_shard, mesh=mesh) for _ in range(2))
        optimizer, loaded = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
        model(inputs_for(model, rank)).sum().backward()
        optimizer.step()
        shardwise.save(tmp_path / "whole run", model=model, optimizer=optimizer)
        shardwise.load(tmp_path / "whole run", model=other, optimizer=loaded)
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.to_local(), twin.to_local())  # type: ignore[attr-defined]
            moment, copied = optimizer.state[parameter]["exp_avg"], loaded.state[twin]["exp_avg"]
            assert torch.equal(moment.to_local(), copied.to_local())

    on_threads(3, body)


def test_gradients_to_their_owners_on_threads(on_threads: Callable[[int, Body], list[Any]]) -> None:
    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.stack([plain(inputs_for(plain, rank)).square().mean() for rank in range(3)]).mean().backward()
    optimizer.step()

    def body(rank: int) -> None:
        model = _model()
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
        wrapped = ShardedDataParallel(model, optimizer)
        wrapped(inputs_for(model, rank)).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())

    on_threads(3, body)


def test_no_symmetric_memory_on_threads(on_threads: Callable[[int, Body], list[Any]]) -> None:
    def body(rank: int) -> None:
        model: Any = shardwise.fully_shard(MLP(), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="needs NCCL on CUDA, and the unit's process group uses 'Python'"):
            model.set_symm_mem_for_comm()

    on_threads(2, body)

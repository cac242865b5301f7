"""ShardedGradScaler with every kind of sharding, against torch's scaler where nothing is sharded."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import shardwise
from shardwise import Placements, fully_shard
from shardwise.fairscale import OSS, DummyProcessGroup, FullyShardedDataParallel, ShardedDDP
from shardwise.grad_scaler import ShardedGradScaler, sharded_scaler

from ..models import MLP, inputs_for, wrap
from ..ranks.harness import on_ranks

Pair = tuple[nn.Module, Optimizer]


def model_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def with_oss(optim: type[Optimizer], **options: Any) -> Pair:
    model = model_of()
    oss = OSS(model.parameters(), optim=optim, lr=0.1, **options)
    return ShardedDDP(model, oss), oss


def with_oss_in_ddp(optim: type[Optimizer], **options: Any) -> Pair:
    model = model_of()
    return DistributedDataParallel(model), OSS(model.parameters(), optim=optim, lr=0.1, **options)


def with_units(optim: type[Optimizer], **options: Any) -> Pair:
    model = model_of()
    wrap(model, fully_shard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, optim(model.parameters(), lr=0.1, **options)


def with_zero2(optim: type[Optimizer], **options: Any) -> Pair:
    model = model_of()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap(model, fully_shard, mesh=mesh, placements=Placements.zero2)
    return model, optim(model.parameters(), lr=0.1, **options)


WAYS = [with_oss, with_oss_in_ddp, with_units, with_zero2]


def plain(optim: type[Optimizer]) -> Pair:
    model = model_of()
    return DistributedDataParallel(model), optim(model.parameters(), lr=0.1)


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, (ShardedDDP, DistributedDataParallel)) else model


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in inner(model).parameters()]


def train(pair: Pair, scaler: Any, infinite: dict[int, set[int]], clip: Any = None, dtype: Any = None) -> list[float]:
    """Steps with autocast; in those of ``infinite`` the named ranks' losses overflow. Gives the scales."""
    model, optimizer = pair
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        x = inputs_for(model_of(), 10 * step + dist.get_rank())
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(x).float().square().mean()
        if dist.get_rank() in infinite.get(step, ()):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def clip(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, ShardedDDP):
        assert isinstance(optimizer, OSS)
        optimizer.clip_grad_norm(0.1)
    else:
        shardwise.clip_grad_norm_(model.parameters(), 0.1)


@on_ranks(1, 2, 3, way=WAYS, clipped=[False, True])
def test_skips_grows_and_backs_off_as_torch_on_whole_gradients(way: Callable[..., Pair], clipped: bool) -> None:
    """One rank's infinity, all ranks' at once (which FairScale takes for a reason to grow), and none."""
    last = dist.get_world_size() - 1
    infinite = {1: {last}, 2: set(range(last + 1)), 5: {0}}
    ours, theirs = way(SGD), plain(SGD)
    settings = {"init_scale": 2.0**10, "growth_interval": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales = train(ours, ShardedGradScaler(**settings), infinite, clip if clipped else None)
    expected = train(theirs, torch.amp.GradScaler("cpu", **settings), infinite, clip if clipped else None)
    assert scales == expected == [2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**9, 2.0**8]
    for mine, other in zip(whole(ours[0]), whole(theirs[0]), strict=True):
        torch.testing.assert_close(mine, other)
        if way in (with_oss, with_oss_in_ddp) and dist.get_world_size() <= 2:
            assert torch.equal(mine, other)


@on_ranks(2, way=WAYS, dtype=[torch.bfloat16, torch.float16])
def test_with_autocast(way: Callable[..., Pair], dtype: torch.dtype) -> None:
    ours, theirs = way(SGD), plain(SGD)
    assert train(ours, ShardedGradScaler(2.0**8), {2: {1}}, dtype=dtype) == train(
        theirs, torch.amp.GradScaler("cpu", 2.0**8), {2: {1}}, dtype=dtype
    )
    for mine, other in zip(whole(ours[0]), whole(theirs[0]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


@on_ranks(2, way=[with_units, with_zero2])
def test_optimizers_that_scale_by_themselves(way: Callable[..., Pair]) -> None:
    """Fused ones get scale and found-inf; these are shared by all ranks too."""
    fused, separate = way(AdamW, fused=True), way(AdamW)
    settings = {"init_scale": 2.0**10, "growth_interval": 2}
    scales = [train(pair, ShardedGradScaler(**settings), {1: {1}, 4: {0}}) for pair in (fused, separate)]
    assert scales[0] == scales[1] == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**9, 2.0**9]
    for mine, other in zip(whole(fused[0]), whole(separate[0]), strict=True):
        torch.testing.assert_close(mine, other)


@on_ranks(2)
def test_oss_of_a_fused_optimizer() -> None:
    fused, separate = with_oss(AdamW, fused=True), with_oss(AdamW)
    for pair in (fused, separate):
        train(pair, ShardedGradScaler(2.0**10), {1: {1}})
    for mine, other in zip(whole(fused[0]), whole(separate[0]), strict=True):
        torch.testing.assert_close(mine, other)


@on_ranks(3, way=[with_oss, with_units])
def test_ranks_without_any_gradient(way: Callable[..., Pair]) -> None:
    """FairScale asserts on a rank that owns none; that rank has to learn of infinities all the same."""

    def build() -> Pair:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        if way is with_units:
            fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
            return model, SGD(model.parameters(), lr=0.1)
        oss = OSS(model.parameters(), lr=0.1)
        return ShardedDDP(model, oss), oss

    model, optimizer = build()
    scaler = ShardedGradScaler(8.0)
    for factor, scale in ((1.0, 8.0), (torch.inf, 4.0), (1.0, 4.0)):
        optimizer.zero_grad()
        before = whole(model)[0].clone()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert torch.equal(whole(model)[0], before) == (factor == torch.inf)


@on_ranks(2)
def test_gradients_of_any_dtype_and_layout() -> None:
    """float16 gradients are what sharded mixed precision gives; torch's own scaler refuses them."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for bad in (None, *range(5)):
        parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
        parameters += [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2))]
        for parameter in parameters[:4]:
            parameter.grad = torch.full_like(parameter, 8.0)
        # Rows that come twice.
        parameters[4].grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 2), 4.0), (4, 2))
        parameters[5].grad = torch.ones(0)
        if bad is not None and dist.get_rank() == 1:
            gradient = parameters[bad].grad
            assert gradient is not None
            (gradient._values() if gradient.is_sparse else gradient).view(-1)[0] = torch.nan
        optimizer = SGD(parameters, lr=1.0)
        scaler = ShardedGradScaler(8.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        expected = 1.0 if bad is not None else 0.0
        assert all((parameter == expected).all() for parameter in parameters[:4])
        assert (parameters[4][1] == expected).all()
        scaler.update()
        assert scaler.get_scale() == (4.0 if bad is not None else 8.0)


@on_ranks(2)
def test_several_optimizers_agree_one_by_one() -> None:
    first, second = with_oss(SGD), with_oss(SGD)
    scaler = ShardedGradScaler(8.0)
    for (model, optimizer), factor in ((first, 1.0), (second, torch.inf if dist.get_rank() else 1.0)):
        scaler.scale(model(inputs_for(model_of(), 0)).sum() * factor).backward()
        before = copy.deepcopy(whole(model))
        scaler.step(optimizer)
        changed = not all(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True))
        assert changed == (model is first[0])
    scaler.update()
    assert scaler.get_scale() == 4.0


@on_ranks(3)
def test_a_subgroup_skips_by_itself() -> None:
    group = dist.new_group([1, 2])
    single = dist.new_group([0])
    mine = single if dist.get_rank() == 0 else group
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), torch.inf if dist.get_rank() == 1 else 1.0)
    scaler = ShardedGradScaler(8.0, process_group=mine)
    scaler.scale(torch.ones(()))
    scaler.step(SGD([parameter], lr=1.0))
    scaler.update()
    assert scaler.get_scale() == (8.0 if dist.get_rank() == 0 else 4.0)
    assert (parameter.item() == 1.0) == (dist.get_rank() > 0)
    with pytest.raises(TypeError, match=r"over a subgroup .* save its state_dict"):
        pickle.dumps(scaler)
    everyone = ShardedGradScaler(8.0, process_group=dist.group.WORLD)
    assert pickle.loads(pickle.dumps(everyone)).state_dict() == everyone.state_dict()
    if dist.get_rank() == 0:
        with pytest.raises(TypeError, match=r"process_group=.*: pass a group that this rank is in, or None"):
            ShardedGradScaler(process_group=group)


@on_ranks(2)
def test_state_after_a_skipped_step() -> None:
    """FairScale's breaks there."""
    pair = with_oss(SGD)
    scaler = ShardedGradScaler(2.0**10, growth_interval=5)
    train(pair, scaler, {4: {0}})
    state = scaler.state_dict()
    expected = {"scale": 2.0**9, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}
    assert state == {**expected, "_growth_tracker": 1}
    other = ShardedGradScaler()
    other.load_state_dict(state)
    third = torch.amp.GradScaler("cpu")
    third.load_state_dict(state)
    stream = io.BytesIO(pickle.dumps(scaler))
    for loaded in (other, third, pickle.load(stream)):
        assert loaded.state_dict() == state


# -- Without processes


def step_once(scaler: ShardedGradScaler, gradient: float) -> float:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), gradient)
    scaler.scale(torch.ones(()))
    scaler.step(SGD([parameter], lr=1.0))
    scaler.update()
    return parameter.item()


def test_without_a_process_group() -> None:
    scaler = ShardedGradScaler(2.0)
    assert step_once(scaler, 6.0) == -3.0
    assert step_once(scaler, torch.inf) == 0.0
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("bad", [False, True])
def test_over_a_stand_in_for_one_rank(bad: bool) -> None:
    group = DummyProcessGroup(0, 1)
    model = FullyShardedDataParallel(nn.Linear(3, 3), group, mixed_precision=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(8.0, process_group=group)
    before = model.state_dict()
    loss = model(torch.ones(2, 3)).float().sum()
    scaler.scale(loss * torch.inf if bad else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if bad else 8.0)
    assert torch.equal(model.state_dict()["weight"], before["weight"]) == bad
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
    with pytest.raises(TypeError, match="pass a group that this rank is in"):
        ShardedGradScaler(process_group=DummyProcessGroup(0, 2))


def test_there_is_one() -> None:
    from shardwise import fairscale

    assert fairscale.ShardedGradScaler is ShardedGradScaler


def test_defaults_are_torchs_and_fairscales() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = ShardedGradScaler()
    assert scaler.is_enabled()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu").state_dict()
    positional = ShardedGradScaler(4.0, 3.0, 0.25, 7, True, None)
    state = positional.state_dict()
    assert (state["scale"], state["growth_factor"], state["backoff_factor"], state["growth_interval"]) == (
        4,
        3,
        0.25,
        7,
    )


def test_disabled_it_does_nothing() -> None:
    scaler = ShardedGradScaler(enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    assert step_once(scaler, 6.0) == -6.0
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    pickle.loads(pickle.dumps(scaler))


def test_misuse_is_told() -> None:
    scaler = ShardedGradScaler()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=1.0)
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        scaler.step(optimizer)
    scaler.scale([torch.ones(()), (torch.ones(2),)])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"init_scale": "8"}, TypeError),
        ({"growth_factor": None}, TypeError),
        ({"growth_interval": 1.5}, TypeError),
        ({"process_group": "world"}, TypeError),
        ({"enabled": "False"}, TypeError),
        ({"init_scale": float("nan")}, ValueError),
        ({"init_scale": 0.0}, ValueError),
        ({"init_scale": -1.0}, ValueError),
        ({"growth_factor": float("inf")}, ValueError),
        ({"backoff_factor": 0.0}, ValueError),
        ({"growth_factor": 1.0}, ValueError),
        ({"backoff_factor": 1.0}, ValueError),
    ],
)
def test_wrong_arguments(given: dict[str, Any], kind: type[Exception]) -> None:
    """A scale of 0 or NaN would put NaN into all parameters, in silence."""
    (name,) = given
    with pytest.raises(kind, match=rf"ShardedGradScaler\({name}="):
        ShardedGradScaler(**given)
    if name not in ("process_group", "enabled"):
        ShardedGradScaler(enabled=False, **given)


def test_factors_may_be_numbers_of_other_kinds() -> None:
    """torch takes them."""
    scaler = ShardedGradScaler(torch.tensor(4.0), growth_factor=np.float32(2), growth_interval=np.int64(1))  # type: ignore[arg-type]
    parameter = nn.Parameter(torch.ones(()))
    scaler.scale(parameter * 1.0).backward()
    scaler.step(SGD([parameter], lr=1.0))
    scaler.update()
    assert (scaler.get_scale(), parameter.item()) == (8.0, 0.0)


def test_a_scale_may_be_set() -> None:
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(32.0))
    assert scaler.get_scale() == 32.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_cuda(dtype: torch.dtype) -> None:
    """Gradients there, and offloaded ones on the host, with the scale where the loss is."""
    scaler = ShardedGradScaler(8.0)
    parameters = [nn.Parameter(torch.zeros(2, dtype=dtype, device=device)) for device in ("cuda", "cpu")]
    for bad, expected in ((None, -2.0), (0, 0.0), (1, 0.0)):
        for index, parameter in enumerate(parameters):
            parameter.data.zero_()
            parameter.grad = torch.full_like(parameter, torch.inf if index == bad else 16.0)
        scale = scaler.get_scale()
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(SGD(parameters, lr=scale / 8.0))
        scaler.update()
        assert all((parameter == expected).all() for parameter in parameters)
        assert scaler.get_scale() == (scale if bad is None else scale / 2)
    scaler.update(torch.tensor(4.0, device="cuda"))
    assert scaler.get_scale() == 4.0


def test_a_plugin_gets_a_scaler_that_is_set_as_its_own() -> None:
    from shardwise.lightning_common.precision import share_scaler

    plugin = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", 256.0, 3.0, 0.25, 7))
    share_scaler(plugin)
    scaler = plugin.scaler
    assert isinstance(scaler, ShardedGradScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (256.0, 3.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)
    share_scaler(plugin)
    assert plugin.scaler is scaler
    plugin.scaler = torch.amp.GradScaler("cpu", enabled=False)
    share_scaler(plugin)
    assert isinstance(plugin.scaler, ShardedGradScaler)
    assert not plugin.scaler.is_enabled()


class AtLeastFour(torch.amp.GradScaler):
    """As programs write them."""

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        if self.get_scale() < 4.0:
            super().update(4.0)


@on_ranks(2)
def test_a_scaler_of_the_programs_own_class_stays() -> None:
    """The object, which the program may ask for its scale, and what its class overrides; its ranks now agree."""
    given = AtLeastFour("cpu", 8.0, growth_interval=7)
    assert sharded_scaler(given) is given
    assert isinstance(given, ShardedGradScaler)
    assert isinstance(given, AtLeastFour)
    assert type(given).__name__ == "AtLeastFour"
    for expected in (4.0, 4.0):
        assert step_once(given, torch.inf if dist.get_rank() else 1.0) == 0.0
        assert given.get_scale() == expected
    assert given.get_growth_interval() == 7
    for copied in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert type(copied) is type(given)
        assert copied.get_scale() == 4.0


@on_ranks(2)
def test_a_scaler_of_torchs_fsdp_keeps_its_group() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    given = TorchShardedGradScaler("cpu", 8.0, process_group=alone)
    assert sharded_scaler(given) is given
    assert type(given) is ShardedGradScaler
    assert (step_once(given, torch.inf if dist.get_rank() else 8.0) == 0.0) == bool(dist.get_rank())
    assert given.get_scale() == (4.0 if dist.get_rank() else 8.0)
    lost = TorchShardedGradScaler("cpu", 8.0, process_group=alone)
    assert sharded_scaler(pickle.loads(pickle.dumps(sharded_scaler(TorchShardedGradScaler("cpu"))))).is_enabled()
    dist.destroy_process_group(alone)
    step_once(sharded_scaler(lost), torch.inf if dist.get_rank() else 8.0)
    assert lost.get_scale() == 4.0

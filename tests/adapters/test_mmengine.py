"""The wrapper and the strategy in real Runners, against real Runners of one process on the joined batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import json
import os
import pickle
import re
import socket
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

pytest.importorskip("mmengine")

from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.model import (
    BaseDataPreprocessor,
    BaseModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
    is_model_wrapper,
)
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import FUNCTIONS, MODEL_WRAPPERS
from mmengine.runner import FlexibleRunner, Runner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

import shardwise
from shardwise import Placements
from shardwise.core.root import unit_of
from shardwise.grad_scaler import ShardedGradScaler
from shardwise.mmengine import FSDP_WRAP_POLICIES, MMFullyShardedDataParallel, ShardwiseStrategy, init_process_group
from shardwise.mmengine.arguments import (
    WRAPPER_ARGUMENTS,
    find_mesh,
    find_offload,
    find_precision,
    find_prefetch,
    find_strategy,
)
from shardwise.mmengine.policies import find_policy
from tests.adapters import mmengine_cases
from tests.adapters.launching import ROOT
from tests.adapters.mmengine_runs import (
    LINEAR,
    VARIANTS,
    Case,
    Toy,
    check,
    check_outcome,
    check_same,
    check_same_file,
    flexible,
    keep,
    named,
    one_process,
    outcome,
    outcomes,
    output_of_ranks,
    replicated,
    run_in_turn,
    sharded,
    train,
    worlds_of,
)
from tests.unit.conftest import fake_mesh as fake_mesh_of_unit_tests

# -- One process: what is true


def truth(directory: Path) -> None:
    """Half of the variants in each of two processes."""
    with worlds_of(directory, 1) as number:
        for name in list(VARIANTS)[number::2]:
            runner = one_process(name, directory / f"one_{name}")
            keep(directory, name, runner, train(runner))


def one_resumes(directory: Path) -> None:
    """What two ranks saved, a Runner of one process resumes."""
    cases: list[tuple[Any, str, str]] = [
        (Runner, "clipped", "two_clipped"),
        (FlexibleRunner, "clipped", "flexible_clipped"),
        (Runner, "averaged", "two_averaged"),
    ]
    with worlds_of(directory, 1) as number:
        for kind, name, made in cases[number::2]:
            file = str(directory / made / "epoch_1.pth")
            resume = {"resume": True, "load_from": file} if kind is Runner else {"resume": file}
            runner = one_process(name, directory / f"one_{made}_2", kind, **resume)
            check_outcome(directory, name, runner, train(runner), last=3)


# -- Two ranks


def like_one_process(name: str, directory: Path) -> None:
    runner = sharded(name, directory / f"two_{name}")
    recorder = train(runner)
    check_outcome(directory, name, runner, recorder)
    dist.barrier()
    own, other = directory / f"two_{name}", directory / f"one_{name}"
    files = sorted(path.name for path in other.glob("*.pth") if "-" not in path.name)
    assert files
    assert sorted(path.name for path in own.glob("*.pth") if "-" not in path.name) == files
    if dist.get_rank() == 0:
        for file in files:
            check_same_file(own / file, other / file)
        # What is published has a hash in its name.
        assert len(list(own.glob("*-*.pth"))) == len(list(other.glob("*-*.pth")))
    model = runner.model
    assert is_model_wrapper(model)
    assert type(model) is MMFullyShardedDataParallel
    own_ids = {id(parameter) for parameter in model.module.parameters()}
    held = [p for group in runner.optim_wrapper.optimizer.param_groups for p in group["params"]]
    assert held
    assert all(id(parameter) in own_ids and isinstance(parameter, DTensor) for parameter in held)
    dist.barrier()


def like_ddp(directory: Path) -> None:
    """Bit for bit MMEngine's MMDistributedDataParallel on the same ranks."""
    runner = replicated("accumulated", directory / "two_ddp")
    expected = outcome(runner, train(runner))
    runner = sharded("accumulated", directory / "two_like_ddp")
    assert outcome(runner, train(runner)) == expected
    dist.barrier()
    a, b = (torch.load(directory / work / "epoch_2.pth") for work in ("two_like_ddp", "two_ddp"))
    for name, value in b["state_dict"].items():
        assert torch.equal(a["state_dict"][name], value), name


def resumes(directory: Path) -> None:
    """At the same world size, from its own checkpoint, by searching for the latest one."""
    import shutil

    work = directory / "two_resumed"
    if dist.get_rank() == 0:
        work.mkdir()
        shutil.copy(directory / "two_clipped" / "epoch_1.pth", work)
        (work / "last_checkpoint").write_text(str(work / "epoch_1.pth"))
    dist.barrier()
    runner = sharded("clipped", work, resume=True)
    check_outcome(directory, "clipped", runner, train(runner), last=3)
    if dist.get_rank() == 0:
        check_same_file(work / "epoch_2.pth", directory / "one_clipped" / "epoch_2.pth")


def resumes_average(directory: Path) -> None:
    runner = sharded(
        "averaged", directory / "two_averaged_2", resume=True, load_from=str(directory / "one_averaged/epoch_1.pth")
    )
    check_outcome(directory, "averaged", runner, train(runner), last=3)
    if dist.get_rank() == 0:
        check_same_file(directory / "two_averaged_2/epoch_2.pth", directory / "one_averaged/epoch_2.pth")


def validates_and_tests(directory: Path) -> None:
    """From a checkpoint, without training, by a Runner that has no optimizer."""
    expected = json.loads((directory / "clipped.json").read_text())["errors"][-1]
    changes: dict[str, Any] = {
        "load_from": str(directory / "one_clipped" / "epoch_2.pth"),
        "train_dataloader": None,
        "train_cfg": None,
        "optim_wrapper": None,
        "param_scheduler": None,
    }
    for make in (sharded, flexible):
        runner = make("clipped", directory / f"{make.__name__}_val", **changes)
        assert runner.val()["val/error"] == pytest.approx(expected, rel=1e-5)
        runner = make("clipped", directory / f"{make.__name__}_test", **changes)
        assert runner.test()["val/error"] == pytest.approx(expected, rel=1e-5)


def flexible_like_one_process(directory: Path) -> None:
    runner = flexible("clipped", directory / "flexible_clipped")
    check_outcome(directory, "clipped", runner, train(runner))
    assert type(runner.strategy) is ShardwiseStrategy
    if dist.get_rank() == 0:
        check = torch.load(directory / "flexible_clipped" / "epoch_2.pth")
        check_same(check["state_dict"], torch.load(directory / "one_clipped" / "epoch_2.pth")["state_dict"])
        check_same(check["optimizer"], torch.load(directory / "one_clipped" / "epoch_2.pth")["optimizer"])
    dist.barrier()


def flexible_resumes(directory: Path) -> None:
    runner = flexible("clipped", directory / "flexible_2", resume=str(directory / "flexible_clipped/epoch_1.pth"))
    check_outcome(directory, "clipped", runner, train(runner), last=3)


def flexible_averages(directory: Path) -> None:
    """Also resumed, which MMEngine's own strategies cannot: they load before the average is made."""
    runner = flexible("averaged", directory / "flexible_averaged")
    check_outcome(directory, "averaged", runner, train(runner))
    dist.barrier()
    again = flexible(
        "averaged", directory / "flexible_averaged_2", resume=str(directory / "flexible_averaged/epoch_1.pth")
    )
    check_outcome(directory, "averaged", again, train(again), last=3)
    if dist.get_rank() == 0:
        found = torch.load(directory / "flexible_averaged_2" / "epoch_2.pth")
        check_same(found["ema_state_dict"], torch.load(directory / "one_averaged/epoch_2.pth")["ema_state_dict"])


def flexible_saves_and_loads_when_asked(directory: Path) -> None:
    """The strategy's own methods, with what they add to a checkpoint, change in it, and leave out."""
    file = directory / "flexible_asked.pth"
    runner = flexible("clipped", directory / "flexible_asked")
    train(runner)
    strategy, whole = runner.strategy, shardwise.full_state_dict(runner.model.module, rank0_only=False)
    seen: list[set[type]] = []

    def change(checkpoint: dict[str, Any]) -> None:
        seen.append({type(value) for value in checkpoint["state_dict"].values()})
        checkpoint["changed"] = checkpoint.pop("mine") + 1
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    options = {"save_optimizer": False, "save_param_scheduler": False}
    strategy.save_checkpoint(str(file), **options, extra_ckpt={"mine": 3, "meta": {"note": "x"}}, callback=change)
    dist.barrier()
    assert seen == ([{torch.Tensor}] if dist.get_rank() == 0 else [])  # on one process, with whole tensors
    saved = torch.load(file)
    assert saved.keys() == {"state_dict", "meta", "changed"}
    assert (saved["changed"], saved["meta"]["note"]) == (4, "x")
    old = {f"old.{name}": value for name, value in whole.items()}
    check_same(dict(saved["state_dict"]), old)

    def double(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: 2 * value for name, value in checkpoint["state_dict"].items()}

    for location in ("default", "cpu", lambda storage, _: storage):
        for strict in (True, False):
            with torch.no_grad():
                for parameter in runner.model.parameters():
                    parameter.zero_()
            given = {"map_location": location, "strict": strict, "revise_keys": [(r"^old\.", "")], "callback": double}
            assert strategy.load_checkpoint(str(file), **given).keys() == {"meta", "changed"}
            found = shardwise.full_state_dict(runner.model.module, rank0_only=False)
            check_same(dict(found), {name: 2 * value for name, value in whole.items()})
    # MMEngine raises on the main process, and goes on elsewhere.
    with pytest.raises(RuntimeError, match=r"old\.net") if dist.get_rank() == 0 else contextlib.nullcontext():
        strategy.load_checkpoint(str(file), strict=True)
    # An optimizer of a part of the model.
    part = runner.model.module.net[0]
    built = strategy.build_optim_wrapper({"optimizer": {"type": "SGD", "lr": 0.1}}, part)
    (group,) = built.optimizer.param_groups
    assert [id(one) for one in group["params"]] == [id(one) for one in part.parameters()]
    assert all(isinstance(one, DTensor) for one in group["params"])


def initializes_on_meta(directory: Path) -> None:
    """The strategy gives a model without memory the values that it would have had."""
    with shardwise.init_on_meta():
        torch.manual_seed(11)
        model = Toy()
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(11)
    expected = Toy()
    runner = flexible("plain", directory / "flexible_meta", model=model, train_cfg={"by_epoch": True, "max_epochs": 1})
    torch.manual_seed(12)
    runner.strategy.prepare(runner.model)
    torch.manual_seed(12)
    expected.init_weights()
    found = shardwise.full_state_dict(runner.strategy.model.module, rank0_only=False)
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name

    for ignored in ("net.0", "net.0.weight"):
        torch.manual_seed(11)
        with shardwise.init_on_meta():
            model = Toy()
        wrapper = MMFullyShardedDataParallel(model, ignored_states=[ignored])
        torch.manual_seed(11)
        whole = shardwise.full_state_dict(wrapper.module, rank0_only=False)
        check_same(whole, Toy().state_dict())
        assert not isinstance(model.net[0].weight, DTensor)


def initializes_by_function(directory: Path) -> None:
    """``param_init_fn``, by name, for what is on the meta device."""

    @FUNCTIONS.register_module()
    def fill_all(module: nn.Module, value: float = 0.5) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(value)

    for given, expected in (("fill_all", 0.5), ({"type": "fill_all", "value": 0.25}, 0.25), (fill_all, 0.5)):
        with torch.device("meta"):
            model = Toy()
        assert all(tensor.is_meta for tensor in model.state_dict().values())
        wrapper = MMFullyShardedDataParallel(model, auto_wrap_policy=LINEAR, param_init_fn=given)
        found = shardwise.full_state_dict(wrapper.module, rank0_only=False)
        assert all(bool((value == expected).all()) for value in found.values())


class Learned(BaseDataPreprocessor):
    """Has a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))


def initializes_preprocessors_on_meta(directory: Path) -> None:
    """A data preprocessor on the meta device gets its values where the strategy wraps the model, as the model does."""

    def fill(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.5)

    for context, init_fn, value in ((shardwise.init_on_meta(), None, 1.0), (torch.device("meta"), fill, 0.5)):
        with context:
            model = Toy(Learned())
        assert model.data_preprocessor.weight.is_meta
        strategy = ShardwiseStrategy(work_dir=str(directory), model_wrapper={"param_init_fn": init_fn})
        wrapper = strategy._wrap_model(model)
        assert model.data_preprocessor.device == torch.device("cpu")
        expected = torch.full((3,), value)
        found = shardwise.full_state_dict(wrapper.module, rank0_only=False)
        assert torch.equal(found["data_preprocessor.weight"], expected)
        assert torch.equal(found["data_preprocessor.scale"], expected)
        assert torch.isfinite(wrapper(**model.data_preprocessor({"inputs": torch.ones(1, 7)}))).all()


class Drawing(Toy):
    """Draws weights by another seed on each rank, loads a part from a file, and looks at all of it."""

    file = ""

    def init_weights(self) -> None:
        torch.manual_seed(40 + dist.get_rank())
        super().init_weights()
        with torch.no_grad():
            self.scale.fill_(1.0 + dist.get_rank())
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    assert type(layer.weight) is nn.Parameter
                    layer.bias.copy_(torch.randn(layer.bias.shape))
        self.net[3].load_state_dict(torch.load(self.file))
        self.seen = [tuple(parameter.shape) for parameter in self.parameters()]


def initializes(directory: Path) -> None:
    """Of what ranks draw in init_weights, after wrapping, the first rank's counts, in shards and in the rest."""
    Drawing.file = str(directory / f"layer{dist.get_rank()}.pth")
    torch.manual_seed(60 + dist.get_rank())
    torch.save(nn.Linear(5, 3).state_dict(), Drawing.file)
    torch.manual_seed(70 + dist.get_rank())
    whole = Drawing()
    torch.manual_seed(70 + dist.get_rank())
    runner = sharded("clipped", directory / "two_drawing", model=Drawing())
    runner.call_hook("before_run")
    runner._init_model_weights()
    model = runner.model.module
    assert model.seen == [tuple(parameter.shape) for parameter in whole.parameters()]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = shardwise.full_state_dict(model, rank0_only=False)
    if dist.get_rank() == 0:
        whole.init_weights()
    for name, value in whole.state_dict().items():
        shardwise_value, value = found[name], value.clone()
        dist.broadcast(value, 0)
        assert torch.equal(shardwise_value, value), name
    assert [tuple(p.shape) for p in model.parameters()] == model.seen
    # An error on one rank is an error on all.
    model.seen = None

    def fail(*args: Any) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("no luck")

    whole_again = Toy()
    whole_again.init_weights = fail  # type: ignore[method-assign]
    wrapper = MMFullyShardedDataParallel(whole_again)
    with pytest.raises(ZeroDivisionError, match="no luck"):
        wrapper.module.init_weights()
    assert all(isinstance(parameter, DTensor) for parameter in wrapper.parameters())


class Watch(Hook):
    """What hooks get to see of a checkpoint."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        states = (checkpoint["state_dict"], *checkpoint.get("optimizer", {}).get("state", {}).values())
        self.seen.append({type(value) for state in states for value in state.values()})
        checkpoint["added"] = 4


def saves_when_asked(directory: Path) -> None:
    """`Runner.save_checkpoint` itself, in all its forms, and an error of the writing rank on all ranks."""
    work = directory / "two_asked"
    watch = Watch()
    runner = sharded("clipped", work, custom_hooks=[watch])
    train(runner)
    # On one process, with whole tensors, as without sharding.
    assert watch.seen == ([{torch.Tensor}] * 2 if dist.get_rank() == 0 else [])
    model = runner.model.module
    model.state_dict = replaced = partial(type(model).state_dict, model)
    runner.save_checkpoint(str(work), "bare.pth", save_optimizer=False, save_param_scheduler=False, by_epoch=False)
    assert vars(model).pop("state_dict") is replaced
    runner.save_checkpoint(str(work), "full.pth", None, True, True, {"mine": 3})
    dist.barrier()
    bare, full = torch.load(work / "bare.pth"), torch.load(work / "full.pth")
    assert bare.keys() == {"meta", "state_dict", "message_hub", "added"}
    assert full.keys() == bare.keys() | {"optimizer", "param_schedulers"}
    assert full["meta"]["mine"] == 3
    assert all(type(value) is torch.Tensor for value in bare["state_dict"].values())
    assert isinstance(runner.model.module.state_dict()["net.0.weight"], DTensor)  # as before
    with pytest.raises(TypeError, match="meta should be a dict"):
        runner.save_checkpoint(str(work), "bad.pth", meta=3)
    (work / "file").write_text("")
    with pytest.raises(OSError):
        runner.save_checkpoint(str(work / "file"), "bad.pth")


def amp(directory: Path) -> None:
    """`AmpOptimWrapper`, which MMEngine refuses without an accelerator: ranks skip a step together."""
    import mmengine.optim.optimizer.amp_optimizer_wrapper as module

    module.is_cuda_available = lambda: True  # in this process of a test only
    for use_fsdp in (False, True):
        torch.manual_seed(0)
        wrapper = MMFullyShardedDataParallel(Toy(), auto_wrap_policy=LINEAR)
        optimizer = torch.optim.SGD(wrapper.module.parameters(), lr=0.1)
        optim_wrapper = AmpOptimWrapper(
            optimizer=optimizer, loss_scale={"init_scale": 256.0, "growth_interval": 2}, use_fsdp=use_fsdp
        )
        # torch turns the one that it made off where there is no GPU.
        kind = TorchShardedGradScaler if use_fsdp else torch.amp.GradScaler
        optim_wrapper.loss_scaler = kind("cpu", init_scale=256.0, growth_interval=2)
        data = {"inputs": torch.randn(4, 7), "target": torch.randn(4, 3)}
        wrapper.train_step(data, optim_wrapper)
        assert isinstance(optim_wrapper.loss_scaler, ShardedGradScaler)
        assert optim_wrapper.loss_scaler.get_growth_interval() == 2
        before = shardwise.full_state_dict(wrapper.module, rank0_only=False)
        bad = {"inputs": data["inputs"] * (float("inf") if dist.get_rank() else 1.0), "target": data["target"]}
        wrapper.train_step(bad, optim_wrapper)
        after = shardwise.full_state_dict(wrapper.module, rank0_only=False)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert optim_wrapper.loss_scaler.get_scale() == 128.0
        wrapper.train_step(data, optim_wrapper)
        after = shardwise.full_state_dict(wrapper.module, rank0_only=False)
        assert not torch.equal(before["net.0.weight"], after["net.0.weight"])
        saved = optim_wrapper.state_dict()
        optim_wrapper.load_state_dict(copy.copy(saved))
        assert saved["loss_scaler"]["scale"] == 128.0


class Pairs(BaseDataPreprocessor):
    """Gives what ``kind`` says, and writes down for what it was asked."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.asked = kind, []
        self.shift = nn.Parameter(torch.full((7,), 0.25)) if kind == "learned" else None

    def forward(self, data: Any, training: bool = False) -> Any:
        self.asked.append(training)
        values = list(data.values()) if isinstance(data, dict) else list(data)
        if self.shift is not None:
            assert not isinstance(self.shift, DTensor)
            values[0] = values[0] + self.shift
        if self.kind in ("dict", "learned"):
            return dict(zip(("inputs", "target"), values, strict=True))
        return {"list": values, "tuple": tuple(values), "wrong": 3}[self.kind]


def steps(directory: Path) -> None:
    """`train_step`, `val_step`, `test_step` against those of `BaseModel` in one process, for all kinds of data."""
    rank = dist.get_rank()
    whole = {"inputs": torch.arange(28.0).reshape(4, 7) / 10, "target": torch.ones(4, 3)}
    part = {key: value[rank::2] for key, value in whole.items()}
    for kind in ("dict", "list", "tuple", "learned"):
        for pack in (dict, lambda data: list(data.values()), lambda data: tuple(data.values())):
            torch.manual_seed(1)
            plain = Toy(Pairs(kind))
            model = copy.deepcopy(plain)
            wrapper = MMFullyShardedDataParallel(model, auto_wrap_policy=LINEAR)
            assert wrapper.module is model
            ours, truth_ = (OptimWrapper(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, plain))
            for _ in range(2):
                logged, expected = wrapper.train_step(pack(part), ours), plain.train_step(pack(whole), truth_)
                assert list(logged) == list(expected) == ["loss"]
                mean = logged["loss"].detach().clone()
                dist.all_reduce(mean)
                torch.testing.assert_close(mean / 2, expected["loss"].detach())
            with torch.no_grad():
                expected = plain.val_step(pack(whole))[rank::2]
                assert wrapper.val_step(pack(part)) == pytest.approx(expected)
                assert wrapper.test_step(pack(part)) == pytest.approx(expected)
            assert model.data_preprocessor.asked == [*plain.data_preprocessor.asked, False]
            found = shardwise.full_state_dict(model, rank0_only=False)
            check_same(found, dict(plain.state_dict()))
    wrapper = MMFullyShardedDataParallel(Toy(Pairs("wrong")))
    for step in (wrapper.val_step, lambda data: wrapper.train_step(data, ours)):
        with pytest.raises(TypeError, match="list, tuple or dict, but got <class 'int'>"):
            step(part)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        wrapper.nothing_like_it  # noqa: B018
    assert wrapper.net is wrapper.module.net


def accumulates(directory: Path) -> None:
    """Without communication but in the last micro-batch, whose backward runs after the context."""
    torch.manual_seed(1)
    wrapper = MMFullyShardedDataParallel(Toy(), auto_wrap_policy=LINEAR)
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1), accumulative_counts=3)
    data = {"inputs": torch.randn(4, 7), "target": torch.randn(4, 3)}
    weight = wrapper.module.net[0].weight
    gradients = []
    step = optim_wrapper.step
    optim_wrapper.step = lambda **kwargs: (gradients.append(weight.grad is not None), step(**kwargs))
    for expected in (False, False, True):
        assert optim_wrapper.should_sync() is expected
        wrapper.train_step(data, optim_wrapper)
        assert len(gradients) == int(expected)
        assert weight.grad is None  # unsharded, or used up
    with wrapper.no_sync(), wrapper.no_sync():
        wrapper(**data, mode="loss")["loss"].backward()
    assert weight.grad is None
    wrapper(**data, mode="loss")["loss"].backward()
    assert weight.grad is not None
    twice = weight.grad.full_tensor()
    for zero in (wrapper, optim_wrapper):
        zero.zero_grad()
        with wrapper.no_sync():
            wrapper(**data, mode="loss")["loss"].backward()
        zero.zero_grad()
        wrapper(**data, mode="loss")["loss"].backward()
        torch.testing.assert_close(weight.grad.full_tensor() * 2, twice)


def units_by_policy(directory: Path) -> None:
    @FSDP_WRAP_POLICIES.register_module()
    def wide(module: nn.Module, recurse: bool, unwrapped_params: int, width: int = 6) -> bool:
        return recurse or getattr(module, "out_features", 0) >= width

    @FUNCTIONS.register_module()
    def wide_too(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or getattr(module, "out_features", 0) >= 6

    cases: list[tuple[Any, list[str]]] = [
        (None, [""]),
        ("wide", ["", "net.0"]),
        ("wide_too", ["", "net.0"]),
        (wide, ["", "net.0"]),
        ({"type": wide, "width": 5}, ["", "net.0", "net.2"]),
        ({"type": "wide", "width": 5}, ["", "net.0", "net.2"]),
        (LINEAR, ["", "net.0", "net.2", "net.3"]),
        ({"type": "module_wrap_policy", "module_classes": nn.Linear}, ["", "net.0", "net.2", "net.3"]),
        (
            {"type": "transformer_auto_wrap_policy", "transformer_layer_cls": {"torch.nn.modules.linear.Linear"}},
            ["", "net.0", "net.2", "net.3"],
        ),
        ({"type": "size_based_auto_wrap_policy", "min_num_params": 70}, ["", "net.0", "net.2"]),
        ("size_based_auto_wrap_policy", [""]),
        (
            {"type": "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", "min_num_params": 70},
            ["", "net.0", "net.2"],
        ),
        (
            {"type": "torch.distributed.fsdp.wrap.transformer_auto_wrap_policy", "transformer_layer_cls": ["Linear"]},
            ["", "net.0", "net.2", "net.3"],
        ),
        (ModuleWrapPolicy({nn.Linear}), ["", "net.0", "net.2", "net.3"]),
        (partial(wide, width=5), ["", "net.0", "net.2"]),
        (ConfigDict(LINEAR), ["", "net.0", "net.2", "net.3"]),
        ({"type": "torch.distributed.fsdp.wrap.always_wrap_policy"}, ["", "net", *(f"net.{i}" for i in range(4))]),
    ]
    for policy, expected in cases:
        for name in ("auto_wrap_policy", "fsdp_auto_wrap_policy"):
            given = copy.copy(policy) if isinstance(policy, dict) else policy
            wrapper = MODEL_WRAPPERS.build(
                {"type": "MMFullyShardedDataParallel", name: given}, default_args={"module": Toy()}
            )
            units = [name for name, module in wrapper.module.named_modules() if unit_of(module) is not None]
            assert set(expected) - {"data_preprocessor"} == set(units) - {"data_preprocessor"}, (policy, units)
            assert given == policy  # configs are not changed
            assert wrapper(torch.randn(2, 7)).shape == (2, 3)


def ignored_by_name(directory: Path) -> None:
    wrapper = MMFullyShardedDataParallel(
        Toy(), auto_wrap_policy=LINEAR, ignored_modules=["net.0"], ignored_parameters=["net.3.bias"]
    )
    kinds = {name: isinstance(parameter, DTensor) for name, parameter in wrapper.module.named_parameters()}
    assert [name for name, is_sharded in kinds.items() if not is_sharded] == [
        "net.0.weight",
        "net.0.bias",
        "net.3.bias",
    ]
    wrapper.train_step(
        {"inputs": torch.randn(2, 7), "target": torch.randn(2, 3)},
        OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1)),
    )


def strategies(directory: Path) -> None:
    """What each sharding strategy, precision and group means for the parameters, and that all of them train."""
    data = {"inputs": torch.randn(2, 7), "target": torch.randn(2, 3)}
    hybrid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    cases: list[dict[str, Any]] = [
        {"sharding_strategy": "FULL_SHARD"},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD"},
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": hybrid},
        {"sharding_strategy": Placements.zero1},
        {"process_group": dist.group.WORLD},
        {"cpu_offload": True},
        {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "bfloat16"}},
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    ]
    results = []
    for case in cases:
        torch.manual_seed(3)
        wrapper = MMFullyShardedDataParallel(Toy(), auto_wrap_policy=LINEAR, **case)
        optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1), clip_grad={"max_norm": 0.1})
        losses = [float(wrapper.train_step(data, optim_wrapper)["loss"]) for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]
        results.append(losses)
        assert all(isinstance(parameter, DTensor) for parameter in wrapper.module.parameters())
    for losses in results[:-2]:
        assert losses == pytest.approx(results[0], rel=1e-6)
    for losses in results[-2:]:
        assert losses == pytest.approx(results[0], rel=3e-2)
        assert losses != results[0]


class Normalized(BaseModel):
    """Batch normalization, which has no use for half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.normalization = nn.Conv1d(1, 5, 3), nn.BatchNorm1d(5)
        self.head = nn.Linear(25, 3)

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        outputs = self.head(self.normalization(self.convolution(inputs[:, None])).flatten(1))
        return {"loss": (outputs - target).square().mean()} if mode == "loss" else outputs


def note_dtypes(seen: list[Any], module: Any, args: Any, output: torch.Tensor) -> None:
    seen.append((args[0].dtype, module.weight.dtype, output.dtype))


def normalizes_in_its_own_dtype(directory: Path) -> None:
    data = {"inputs": torch.randn(4, 7), "target": torch.randn(4, 3)}
    for precision in (
        {"param_dtype": "bfloat16", "buffer_dtype": "bfloat16"},
        {"param_dtype": "float16", "reduce_dtype": "float32", "output_dtype": "float32"},
    ):
        wrapper = MMFullyShardedDataParallel(Normalized(), mixed_precision=precision)
        seen: list[Any] = []
        wrapper.module.normalization.register_forward_hook(partial(note_dtypes, seen))
        optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
        for _ in range(2):
            assert torch.isfinite(wrapper.train_step(data, optim_wrapper)["loss"])
        assert wrapper.module.normalization.running_mean.dtype is torch.float32
        half = getattr(torch, precision["param_dtype"])
        assert set(seen) == {(torch.float32, torch.float32, half)}
        assert int(wrapper.module.normalization.num_batches_tracked) == 2


def averages_by_hand(directory: Path) -> None:
    """MMEngine's averages of a sharded model, against those of the whole model."""
    for kind, options in (
        (ExponentialMovingAverage, {"momentum": 0.25}),
        (MomentumAnnealingEMA, {"gamma": 3, "update_buffers": True}),
        (StochasticWeightAverage, {"interval": 2}),
    ):
        torch.manual_seed(2)
        plain = Toy()
        model = copy.deepcopy(plain)
        wrapper = MMFullyShardedDataParallel(model, auto_wrap_policy=LINEAR)
        ours, truth_ = (kind(m, **options) for m in (model, plain))
        assert not any(unit_of(module) is not None for module in ours.modules())
        assert type(copy.deepcopy(wrapper)) is MMFullyShardedDataParallel
        for step in range(4):
            with torch.no_grad():
                for m in (model, plain):
                    for tensor in (*m.parameters(), *m.buffers()):
                        tensor.mul_(1.5)
            ours.update_parameters(model)
            truth_.update_parameters(plain)
            assert int(ours.steps) == step + 1
        for name, value in truth_.state_dict().items():
            found = ours.state_dict()[name]
            torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, value)
        ours.load_state_dict(truth_.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(wrapper(torch.ones(2, 7)), plain(torch.ones(2, 7)))


def loads_whole_tensors(directory: Path) -> None:
    plain = Toy()
    wrapper = MMFullyShardedDataParallel(Toy(), auto_wrap_policy=LINEAR)
    assert list(wrapper.state_dict()) == list(plain.state_dict())
    wrapper.load_state_dict(plain.state_dict())
    check_same(shardwise.full_state_dict(wrapper.module, rank0_only=False), dict(plain.state_dict()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        wrapper.load_state_dict({**plain.state_dict(), "net.0.bias": torch.zeros(3)})
    # Not all of them, and others; then those that replace the parameters.
    bias = torch.full_like(plain.net[0].bias, 3.0).detach()
    result = wrapper.load_state_dict({"net.0.bias": bias, "other": bias}, strict=False)
    assert (set(result.missing_keys), result.unexpected_keys) == ({*plain.state_dict()} - {"net.0.bias"}, ["other"])
    check_same(shardwise.full_state_dict(wrapper.module, rank0_only=False)["net.0.bias"], bias)
    for assign in (False, True):
        before = [*wrapper.parameters()]
        given = {name: value.clone() for name, value in wrapper.state_dict().items()}
        wrapper.load_state_dict(given, assign=assign)
        assert [old is not new for old, new in zip(before, wrapper.parameters(), strict=True)] == [assign] * len(before)
    check_same(shardwise.full_state_dict(wrapper.module, rank0_only=False)["net.0.bias"], bias)
    wrapper.load_state_dict(plain.state_dict())
    # Gradients become zeros where that is asked for.
    wrapper(torch.ones(2, 7)).sum().backward()
    reached = [one for one in wrapper.parameters() if one.grad is not None]
    assert [bool(one.grad.full_tensor().any()) for one in reached] == [True] * len(reached) != []
    wrapper.zero_grad(set_to_none=False)
    assert [bool(one.grad.full_tensor().any()) for one in reached] == [False] * len(reached)
    wrapper.zero_grad()
    assert {one.grad for one in wrapper.parameters()} == {None}
    # Also as a part of a module that is not wrapped.
    around, saved = (
        nn.Sequential(wrapper, nn.Linear(3, 3)),
        copy.deepcopy(nn.Sequential(plain, nn.Linear(3, 3)).state_dict()),
    )
    for state in (saved, around.state_dict()):
        around.load_state_dict(state)
        check_same(shardwise.full_state_dict(around, rank0_only=False), dict(saved))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0.net.4.bias"'):
        around.load_state_dict({**saved, "0.net.4.bias": torch.zeros(3)})
    # An optimizer made from the parameters before they were sharded, and loaded.
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    wrapper = MMFullyShardedDataParallel(model)
    data = {"inputs": torch.randn(2, 7), "target": torch.randn(2, 3)}
    optim_wrapper = OptimWrapper(optimizer)
    wrapper.train_step(data, optim_wrapper)
    assert isinstance(optimizer.state[model.net[0].weight]["exp_avg"], DTensor)


# -- Four ranks


def four_resume_flexible(directory: Path) -> None:
    """The strategy joins the process group, though MMEngine's default asks for NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    runner = flexible("clipped", directory / "four_flexible", resume=str(directory / "two_clipped/epoch_1.pth"))
    assert dist.get_backend() == "gloo"
    check_outcome(directory, "clipped", runner, train(runner), last=3)


def four_resume(directory: Path) -> None:
    runner = sharded(
        "clipped", directory / "four_resumed", resume=True, load_from=str(directory / "two_clipped/epoch_1.pth")
    )
    check_outcome(directory, "clipped", runner, train(runner), last=3)
    if dist.get_rank() == 0:
        check_same_file(directory / "four_resumed/epoch_2.pth", directory / "one_clipped/epoch_2.pth")


def hybrid_on_four(directory: Path) -> None:
    """Two nodes of two ranks, as torchrun would say."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    data = {"inputs": torch.ones(2, 7) * dist.get_rank(), "target": torch.ones(2, 3)}
    results = []
    for strategy in ("FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        torch.manual_seed(3 + dist.get_rank())  # all begin with the first rank's
        wrapper = MMFullyShardedDataParallel(Toy(), sharding_strategy=strategy, auto_wrap_policy=LINEAR)
        optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
        for _ in range(2):
            wrapper.train_step(data, optim_wrapper)
        results.append(shardwise.full_state_dict(wrapper.module, rank0_only=False))
        mesh = wrapper.module.net[0].weight.device_mesh
        assert mesh.shape == ((4,) if strategy == "FULL_SHARD" else (2, 2))
    for result in results[1:]:
        check_same(result, results[0])


def refused_on_one_rank(directory: Path) -> None:
    """By a policy, or because of a parameter: an error on all ranks, and a model that can be wrapped still."""

    def fails_inside(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if dist.get_rank() == 1 and module is model.net[3]:
            raise LookupError("no such layer")
        return True

    model = Toy()
    before = dict(model.named_parameters())
    with pytest.raises(LookupError, match="no such layer"):
        MMFullyShardedDataParallel(model, auto_wrap_policy=fails_inside)
    first = dist.get_rank() == 0

    def differing(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or module is model.net[0 if first else 2]

    for name, chooses, chosen in (
        ("auto_wrap_policy", differing, r"'net\.0'"),
        ("ignored_modules", ["net.2"] if first else [], r"'net\.2'"),
        ("ignored_parameters", ["net.3.bias"] if first else [], r"'net\.3\.bias'"),
    ):
        with pytest.raises(ValueError, match=rf"{name} chooses {chosen} on rank 0, and not on rank 1"):
            MMFullyShardedDataParallel(model, **{name: chooses})
    for name, value in (
        ("sharding_strategy", "SHARD_GRAD_OP"),
        ("mixed_precision", {"param_dtype": "bfloat16"}),
        ("backward_prefetch", "post"),
    ):
        given = {} if first else {name: value}
        with pytest.raises(ValueError, match=rf"{name} is .* on rank \d, and .* on rank \d"):
            MMFullyShardedDataParallel(model, **given)
    if dist.get_rank() == 0:
        model.extra = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="'extra' is a scalar"):
        MMFullyShardedDataParallel(model)
    if dist.get_rank() == 0:
        del model.extra
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    MMFullyShardedDataParallel(model)


def in_subgroup(directory: Path) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[dist.get_rank() // 2]
    wrapper = MMFullyShardedDataParallel(Toy(), process_group=own)
    assert wrapper.module.net[0].weight.device_mesh.shape == (2,)
    wrapper.module.init_weights()
    assert wrapper(torch.ones(1, 7)).shape == (1, 3)


TWO: dict[str, Case] = {
    "truth": truth,
    **{name: partial(like_one_process, name) for name in VARIANTS},
    **named(
        like_ddp,
        resumes,
        resumes_average,
        validates_and_tests,
        flexible_like_one_process,
        flexible_resumes,
        flexible_averages,
        flexible_saves_and_loads_when_asked,
        one_resumes,
        initializes_on_meta,
        initializes_preprocessors_on_meta,
        initializes_by_function,
        initializes,
        saves_when_asked,
        amp,
        steps,
        accumulates,
        units_by_policy,
        refused_on_one_rank,
        ignored_by_name,
        strategies,
        normalizes_in_its_own_dtype,
        averages_by_hand,
        loads_whole_tensors,
        *mmengine_cases.TWO,
    ),
}
FOUR = named(four_resume, hybrid_on_four, in_subgroup, *mmengine_cases.FOUR, four_resume_flexible)


def on_two(directory: str) -> None:
    run_in_turn(TWO, Path(directory), "on_two")


def on_four(directory: str) -> None:
    run_in_turn(FOUR, Path(directory), "on_four")


on_two.body = on_two  # type: ignore[attr-defined]
on_four.body = on_four  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(case: str) -> None:
    check(__name__, "on_two", 2, case)


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(case: str) -> None:
    outcomes(__name__, "on_two", 2)  # some continue what two ranks saved
    check(__name__, "on_four", 4, case)


# -- Arguments, in this process

fake_mesh = fake_mesh_of_unit_tests


def test_only_the_adapter_imports_mmengine() -> None:
    """So that shardwise can be imported without it."""
    source = ROOT / "src" / "shardwise"
    for file in source.rglob("*.py"):
        if source / "mmengine" not in file.parents:
            imports = re.findall(r"^\s*(?:from|import)\s.*$", file.read_text(), re.MULTILINE)
            assert not [line for line in imports if re.search(r"(^|[\s.])mmengine\b", line)], file


def test_registered_under_both_names() -> None:
    for name in ("MMFullyShardedDataParallel", "ShardwiseDataParallel"):
        assert MODEL_WRAPPERS.get(name) is MMFullyShardedDataParallel
    assert MMFullyShardedDataParallel.__name__ == "MMFullyShardedDataParallel"


@pytest.mark.parametrize("name", ["auto_wrap_policy", "fsdp_auto_wrap_policy"])
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("no_such", ValueError, "='no_such' is not registered: FSDP_WRAP_POLICIES has .*size_based_auto_wrap_policy"),
        ({"type": "no_such"}, ValueError, "='no_such' is not registered"),
        ("", ValueError, "='' is not registered"),
        ("a_number", TypeError, "='a_number' is registered as a int, 3, and should be a callable"),
        ({"type": "a_number"}, TypeError, "registered as a int, 3"),
        (3, TypeError, "should be None, a str .* or a callable, but has type int: 3"),
        ([nn.Linear], TypeError, "but has type list"),
        (nn.Linear, TypeError, "but has type type"),
        (nn.Linear(2, 2), TypeError, "but has type Linear"),
        ({"min_num_params": 3}, ValueError, "is a dict without 'type'"),
        (
            {"type": "size_based_auto_wrap_policy", "min_params": 3},
            ValueError,
            "has 'min_params'; its type takes min_num_params, force_leaf_modules, exclude_wrap_modules",
        ),
        (
            {"type": "size_based_auto_wrap_policy", "min_num_params": "1e8"},
            TypeError,
            r"\['min_num_params'\] must be a number, not '1e8'",
        ),
        (
            {"type": "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", "min_num_params": None},
            TypeError,
            r"\['min_num_params'\] must be a number, not None",
        ),
        (
            {"type": "default_auto_wrap_policy", "min_num_params": float("nan")},
            ValueError,
            r"\['min_num_params'\]=nan: pass the number of elements",
        ),
        ("module_wrap_policy", ValueError, "lacks 'module_classes': name a policy with options, dict"),
        ({"type": "module_wrap_policy"}, ValueError, "lacks 'module_classes'"),
        ({"type": "transformer_auto_wrap_policy", "classes": ()}, ValueError, "has 'classes'; its type takes trans"),
        ("a_class", TypeError, "='a_class' is registered as a type, .*Linear.*, and should be a callable"),
        ({"type": None}, TypeError, "but is None"),
        (
            {"type": "module_wrap_policy", "module_classes": ["Liner"]},
            ValueError,
            "no module of Toy is a 'Liner'; they",
        ),
        (
            {"type": "module_wrap_policy", "module_classes": [3]},
            TypeError,
            "classes of modules or their names, but has 3",
        ),
        ({"type": "module_wrap_policy", "module_classes": 3}, TypeError, "has type int"),
    ],
)
def test_wrong_policies(name: str, given: Any, kind: type[Exception], message: str) -> None:
    FSDP_WRAP_POLICIES.module_dict.update(a_number=3, a_class=nn.Linear)
    try:
        with pytest.raises(kind, match=f"{name}.*{message}"):
            MMFullyShardedDataParallel(Toy(), **{name: given})
    finally:
        del FSDP_WRAP_POLICIES.module_dict["a_number"], FSDP_WRAP_POLICIES.module_dict["a_class"]


def test_classes_of_modules_in_config_files(tmp_path: Path) -> None:
    """By their names, or imported, of which MMEngine leaves those in a list as objects of its own."""
    file = tmp_path / "config.py"
    file.write_text(
        "from torch import nn\n"
        "policy = dict(type='module_wrap_policy', module_classes=[nn.Linear, 'GELU'])\n"
        "by_size = dict(type='size_based_auto_wrap_policy', exclude_wrap_modules={nn.GELU}, force_leaf_modules=None)\n"
        "precision = dict(param_dtype='bfloat16', _module_classes_to_ignore=(nn.GELU,))\n"
    )
    config = Config.fromfile(file, lazy_import=True)
    policy: Any = find_policy("auto_wrap_policy", config.policy, Toy())
    assert policy.keywords == {"module_classes": (nn.Linear, nn.GELU)}
    policy = find_policy("auto_wrap_policy", config.by_size, Toy())
    assert policy.keywords == {"exclude_wrap_modules": (nn.GELU,), "force_leaf_modules": None}
    assert find_precision(config.precision).exempt == (nn.GELU,)
    by_name = {"type": "size_based_auto_wrap_policy", "min_num_params": 1, "force_leaf_modules": ["Linear"]}
    policy = find_policy("auto_wrap_policy", by_name, Toy())
    assert policy.keywords == {"min_num_params": 1, "force_leaf_modules": (nn.Linear,)}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload should be None, a bool, a CPUOffload .* has type str: 'yes'"),
        ({"cpu_offload": 1}, TypeError, "cpu_offload should be .* has type int: 1"),
        ({"backward_prefetch": "before"}, ValueError, "backward_prefetch='before' is unknown: it takes 'pre', 'post'"),
        ({"backward_prefetch": True}, TypeError, "backward_prefetch should be None, a str or a BackwardPrefetch"),
        ({"sharding_strategy": "FULL"}, ValueError, "sharding_strategy='FULL' is unknown: it takes FULL_SHARD, "),
        ({"sharding_strategy": 3}, TypeError, "sharding_strategy should be None, a str, .* has type int: 3"),
        ({"mixed_precision": "bf16"}, TypeError, "mixed_precision should be None, a dict, .* has type str: 'bf16'"),
        ({"mixed_precision": {"param": "float16"}}, ValueError, "mixed_precision has 'param'; it takes param_dtype, "),
        (
            {"mixed_precision": {"param_dtype": "half16"}},
            ValueError,
            r"mixed_precision\['param_dtype'\]='half16' is no",
        ),
        (
            {"mixed_precision": {"reduce_dtype": 16}},
            TypeError,
            r"mixed_precision\['reduce_dtype'\] should be None, a str",
        ),
        (
            {"mixed_precision": {"keep_low_precision_grads": True}},
            ValueError,
            "keep_low_precision_grads.* not supported",
        ),
        ({"mixed_precision": {"cast_forward_inputs": 1}}, TypeError, "cast_forward_inputs.* should be a bool"),
        ({"param_init_fn": "no_such"}, ValueError, "param_init_fn='no_such' is not registered in FUNCTIONS"),
        ({"param_init_fn": ""}, ValueError, "param_init_fn='' is not registered in FUNCTIONS"),
        ({"param_init_fn": {"type": None}}, TypeError, r"param_init_fn\['type'\] should be .* but is None"),
        (
            {"mixed_precision": {"param_dtype": "int32"}},
            ValueError,
            "param_dtype.*=torch.int32 is no dtype of floating",
        ),
        ({"mixed_precision": {"a": 1, 2: 3}}, ValueError, "mixed_precision has 'a', 2; it takes param_dtype"),
        ({"param_init_fn": 3}, TypeError, "param_init_fn should be None, a str .* has type int: 3"),
        ({"ignored_modules": ["net.9"]}, ValueError, "ignored_modules has 'net.9', which the model does not have"),
        ({"ignored_modules": "net"}, TypeError, "ignored_modules should be None, names, or Modules, but has type str"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, ValueError, "ignored_modules has a Linear that is not the model's"),
        ({"ignored_parameters": [3]}, TypeError, "an item of ignored_parameters should be a name or a Parameter"),
        ({"process_group": "world"}, TypeError, "process_group should be None, a ProcessGroup"),
        ({"process_group": (3, 4)}, TypeError, "process_group should be None, a ProcessGroup, or .* has type tuple"),
        ({"ignored_states": ["net.9"]}, ValueError, "ignored_states has 'net.9', which the model does not have"),
        ({"ignored_states": [3]}, TypeError, "an item of ignored_states should be a name or a Module or a Parameter"),
        ({"ignored_states": [], "ignored_modules": []}, ValueError, "ignored_states means .*: pass it, or them"),
        ({"ignored_modules": nn.Sequential()}, TypeError, "None, names, or Modules, but has type Sequential"),
        (
            {"mixed_precision": {"_module_classes_to_ignore": ["BatchNorm1d"]}},
            TypeError,
            "_module_classes_to_ignore.* should be classes of modules",
        ),
        ({"device_mesh": 2}, TypeError, "device_mesh should be None or a DeviceMesh"),
        ({"use_orig_params": "no"}, TypeError, r"\(use_orig_params='no'\): pass True or False, not str"),
        ({"sync_module_states": "no"}, TypeError, r"\(sync_module_states='no'\): pass True or False, not str"),
        ({"sync_module_states": torch.ones(2)}, TypeError, r"\(sync_module_states=.*: pass True or False, not Tensor"),
        ({"forward_prefetch": 1.5}, TypeError, r"\(forward_prefetch=1.5\): pass True or False, not float"),
        ({"limit_all_gathers": {}}, TypeError, r"\(limit_all_gathers={}\): pass True or False, not dict"),
        ({"device_id": 1.5}, TypeError, "device_id should be None, an int, a str or a torch.device, .* type float"),
        ({"device_id": True}, TypeError, "device_id should be None, .* has type bool: True"),
        ({"device_id": -1}, ValueError, "device_id=-1 is no device of torch"),
        ({"device_id": ""}, ValueError, "device_id='' is no device of torch"),
        ({"device_id": "gpu"}, ValueError, "device_id='gpu' is no device of torch"),
        ({"auto_wrap_policy": "x", "fsdp_auto_wrap_policy": "y"}, ValueError, "two names of one argument"),
        ({"min_num_params": 3, "shard": 2}, TypeError, "got 'min_num_params', 'shard'; it takes module, process_group"),
        ({"device_ids": [0]}, ValueError, "device_ids=.* not supported: .*ShardwiseStrategy"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*arguments without effect")
def test_wrong_arguments(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = Toy()
    before = dict(model.named_parameters())
    with pytest.raises(kind, match=message):
        MMFullyShardedDataParallel(model, **given)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(TypeError, match=r"module should be a torch.nn.Module, but has type int: 3"):
        MMFullyShardedDataParallel(3)  # type: ignore[arg-type]


def test_positions_of_arguments() -> None:
    """As the specification lists them, with the names of both eras for the policy at one place."""
    assert list(inspect.signature(MMFullyShardedDataParallel).parameters)[:11] == [
        "module",
        "process_group",
        "cpu_offload",
        "fsdp_auto_wrap_policy",
        "backward_prefetch",
        "sharding_strategy",
        "mixed_precision",
        "param_init_fn",
        "use_orig_params",
        "ignored_modules",
        "ignored_parameters",
    ]


def test_ignored_states(fake_mesh: Any) -> None:
    """torch's name for ignored modules and parameters."""
    fake_mesh(2)
    for given in ("net.0", "net.0.weight"):
        for by_name in (True, False):
            model = Toy()
            item = model.get_submodule(given) if given == "net.0" else model.get_parameter(given)
            MMFullyShardedDataParallel(model, ignored_states=[given if by_name else item])
            whole = [name for name, value in model.named_parameters() if not isinstance(value, DTensor)]
            assert whole == (["net.0.weight", "net.0.bias"] if given == "net.0" else [given])


def test_arguments_without_effect_warn() -> None:
    with (
        pytest.warns(UserWarning, match="without effect: .*forward_prefetch.*limit_all_gathers.*device_id"),
        pytest.raises(TypeError),
    ):
        MMFullyShardedDataParallel(3, limit_all_gathers=False, forward_prefetch=True, device_id=0)  # type: ignore[arg-type]
    documentation = MMFullyShardedDataParallel.__doc__ or ""
    for name in inspect.signature(MMFullyShardedDataParallel.__init__).parameters:
        assert name in ("self", "kwargs") or f"    {name}" in documentation


def test_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "mmengine.md").read_text()
    for name, argument in WRAPPER_ARGUMENTS.items():
        assert f"| `{name}` | {argument.support.value} | {argument.meaning} |" in text
    for name in FSDP_WRAP_POLICIES.module_dict:
        assert f"`{name}`" in text


def test_values_of_arguments() -> None:
    assert find_strategy(None).placements is Placements.zero3
    assert find_strategy(ShardingStrategy.HYBRID_SHARD).replicates
    assert not find_strategy("SHARD_GRAD_OP").reshard_after_forward
    assert find_strategy("zero1").placements is Placements.zero1
    for given in (True, CPUOffload(offload_params=True), CPUOffloadPolicy()):
        assert isinstance(find_offload(given), CPUOffloadPolicy)
    for given in (None, False, CPUOffload(offload_params=False), OffloadPolicy()):
        assert not isinstance(find_offload(given), CPUOffloadPolicy)
    for given in (None, "pre", "BACKWARD_PRE", BackwardPrefetch.BACKWARD_PRE):
        assert find_prefetch(given) is BackwardPrefetch.BACKWARD_PRE
    for given in ("post", "BACKWARD_POST", BackwardPrefetch.BACKWARD_POST):
        assert find_prefetch(given) is BackwardPrefetch.BACKWARD_POST
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    assert find_precision(policy).policy is policy
    config = {"param_dtype": "float16", "reduce_dtype": "torch.float32", "buffer_dtype": torch.float32}
    found = find_precision(config)
    assert found.policy == MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    assert found.buffers is torch.float32
    assert config == {"param_dtype": "float16", "reduce_dtype": "torch.float32", "buffer_dtype": torch.float32}
    root = find_precision(MixedPrecision(param_dtype=torch.float16, cast_root_forward_inputs=False)).root
    assert not root.cast_forward_inputs


def test_meshes(fake_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mesh(8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_mesh(find_strategy(None), None, None).shape == (8,)
    mesh = find_mesh(find_strategy("HYBRID_SHARD"), None, None)
    assert mesh.shape == (2, 4)
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert find_mesh(find_strategy(None), None, mesh) is mesh
    with pytest.raises(ValueError, match="process_group and device_mesh both"):
        find_mesh(find_strategy(None), dist.group.WORLD, mesh)
    with pytest.raises(ValueError, match="needs two"):
        find_mesh(find_strategy("HYBRID_SHARD"), dist.group.WORLD, None)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    for given, strategy in ((outside, None), ((outside, dist.group.WORLD), "HYBRID_SHARD")):
        with pytest.raises(ValueError, match="process_group: this process is not in the group"):
            find_mesh(find_strategy(strategy), given, None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="8 ranks do not divide into nodes of 3"):
        find_mesh(find_strategy("HYBRID_SHARD"), None, None)


def test_process_group_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="needs the environment variables WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        init_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("60", TypeError, "timeout should be None, a number of seconds or a timedelta, but is '60'"),
        (True, TypeError, "timeout should be None, a number .* but is True"),
        (float("nan"), ValueError, "timeout=nan: pass a number of seconds above 0"),
        (float("inf"), ValueError, "timeout=inf: pass a number of seconds above 0"),
        (0, ValueError, "timeout=0: pass a number of seconds above 0"),
    ],
)
def test_limits_of_time_that_are_none(
    given: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(kind, match=message):
        init_process_group("gloo", timeout=given)


def test_arguments_of_process_groups_that_there_are_none_of(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"dist_cfg has 'timeot'; it takes backend and timeout"):
        ShardwiseStrategy(work_dir=str(tmp_path))._setup_distributed(timeot=60)


def test_arguments_of_the_strategys_wrapper_are_a_dict(fake_mesh: Any, tmp_path: Path) -> None:
    fake_mesh(1)
    for given in ("zero3", [1]):
        strategy = ShardwiseStrategy(work_dir=str(tmp_path), model_wrapper=given)
        with pytest.raises(TypeError, match="ShardwiseStrategy's model_wrapper should be a dict of arguments of MM"):
            strategy._wrap_model(Toy())


def test_checkpoints_do_not_allow_more_than_they_need() -> None:
    history = HistoryBuffer([1.0, 2.0], [1, 1])
    for value in (history, np.arange(3), np.float32(2.5), np.array(["a"]), np.array(1.5)):
        buffer = io.BytesIO()
        torch.save({"x": value}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)["x"]
        assert type(loaded) is type(value)
        if isinstance(value, HistoryBuffer):
            assert loaded.mean() == 1.5
        else:
            assert np.array_equal(loaded, value)

    class Evil:
        def __reduce__(self) -> Any:
            return getattr, (torch.Tensor, "__class__")

    for evil in (Evil(), HistoryBuffer.min.__get__(history)):
        buffer = io.BytesIO()
        torch.save({"x": evil}, buffer)
        buffer.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            torch.load(buffer)


def test_strategy_of_torch_is_told_apart(fake_mesh: Any) -> None:
    fake_mesh(2)
    wrapper = MMFullyShardedDataParallel(Toy())
    with pytest.raises(TypeError, match=r"FSDPStrategy is for torch's own FSDP: use .*ShardwiseStrategy"):
        wrapper.set_state_dict_type(wrapper, None)


def test_wrapper_is_freed(fake_mesh: Any) -> None:
    fake_mesh(2)
    model = Toy()
    reference = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        wrapper = MMFullyShardedDataParallel(model, auto_wrap_policy=LINEAR)
        del wrapper, model
        assert reference() is None
    finally:
        gc.enable()


def test_example() -> None:
    """The program prints what it reached, and that a rank holds about half. Started as torchrun starts it."""
    program = ROOT / "examples" / "mmengine_runner.py"
    reached, held = output_of_ranks(program, 2)[-2:]
    found = re.fullmatch(r"resumed at epoch 2, trained to epoch 4: accuracy (\d\.\d+)", reached)
    assert found, reached
    assert float(found[1]) > 0.9
    numbers = re.fullmatch(r"rank 0 holds (\d+) of (\d+) parameters; .*", held)
    assert numbers, held
    assert int(numbers[2]) / 2 <= int(numbers[1]) < int(numbers[2]) * 0.51

"""The wrapper and the strategy in real Runners, against real Runners of one process on the joined batch."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import os
import pickle
import re
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

if __name__ != "__main__":
    pytest.importorskip("mmengine")

from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseDataPreprocessor, BaseModel, ExponentialMovingAverage, is_model_wrapper
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
from shardwise.core.module import unit_of
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
from tests.adapters.launching import ROOT, check_case, launched, output_of, run_cases
from tests.unit.conftest import fake_mesh as fake_mesh_of_unit_tests

LINEAR = {"type": "module_wrap_policy", "module_classes": ["Linear"]}


# -- What is trained


class Data(Dataset):
    """Pairs for a regression, as dicts."""

    def __init__(self, size: int = 24):
        self.metainfo = {"classes": ("a", "b")}
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(size, 7, generator=generator), torch.randn(size, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.x[index], "target": self.y[index]}


class Toy(BaseModel):
    """A regression with layers of odd sizes, a frozen one, a tied one and a buffer."""

    def __init__(self, preprocessor: Any = None):
        super().__init__(
            data_preprocessor=preprocessor,
            init_cfg={"type": "Xavier", "layer": "Linear", "distribution": "uniform"},
        )
        self.net = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5), nn.Linear(5, 3))
        self.net[2].bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        outputs = self.net(inputs) * self.scale
        if mode == "loss":
            return {"loss": (outputs - target).square().mean()}
        if mode == "predict":
            return [float((a - b).square().mean()) for a, b in zip(outputs, target, strict=True)]
        return outputs


class Error(BaseMetric):
    """The mean of what the model predicts."""

    default_prefix = "val"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_samples

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"error": sum(results) / len(results)}


class Recorder(Hook):
    """Losses and metrics of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.errors: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loss = outputs["loss"].detach().float().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.losses.append(loss.item())

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.errors.append(metrics["val/error"])


VARIANTS: dict[str, dict[str, Any]] = {
    "clipped": {"optim_wrapper": {"clip_grad": {"max_norm": 0.5}}},
    # Six steps: the last update comes from two of four.
    "accumulated": {"optim_wrapper": {"accumulative_counts": 4, "clip_grad": {"type": "value", "clip_value": 0.02}}},
    "averaged": {"custom_hooks": [{"type": "EMAHook", "momentum": 0.3, "update_buffers": True}]},
    "swa": {"custom_hooks": [{"type": EMAHook, "ema_type": "StochasticWeightAverage", "begin_epoch": 1}]},
    "iterations": {
        "train_cfg": {"by_epoch": False, "max_iters": 3, "val_interval": 2},
        "default_hooks": {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 2}},
        "param_scheduler": {"type": "StepLR", "step_size": 2, "gamma": 0.5, "by_epoch": False},
    },
    # Reentrant, as MMEngine does it: what computes again must get an input that requires gradients.
    "recomputed": {"cfg": {"activation_checkpointing": ["net.2", "net.3"]}},
    "best": {
        "default_hooks": {
            "checkpoint": {
                "type": "CheckpointHook",
                "interval": 1,
                "max_keep_ckpts": 1,
                "save_best": "val/error",
                "rule": "less",
                "published_keys": ["meta", "state_dict"],
            }
        },
    },
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "clipped": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": LINEAR, "backward_prefetch": "BACKWARD_POST"},
    "accumulated": {"type": "ShardwiseDataParallel", "fsdp_auto_wrap_policy": LINEAR, "backward_prefetch": "pre"},
    "averaged": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": LINEAR, "sharding_strategy": "zero2"},
    "swa": {
        "type": "MMFullyShardedDataParallel",
        "auto_wrap_policy": {"type": "size_based_auto_wrap_policy", "min_num_params": 60},
    },
    "iterations": {"type": "MMFullyShardedDataParallel", "sharding_strategy": "SHARD_GRAD_OP"},
    "best": {"type": "MMFullyShardedDataParallel", "cpu_offload": True, "sharding_strategy": "NO_SHARD"},
}
WRAPPERS["recomputed"] = WRAPPERS["clipped"]
WRAPPERS["best"] = {"type": "MMFullyShardedDataParallel", "cpu_offload": True}


def loader(size: int, world_size: int) -> dict[str, Any]:
    """Both ranks' batches together are those of one process."""
    return {
        "dataset": Data(size),
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": {"type": "default_collate"},
        "batch_size": 8 // world_size,
        "num_workers": 0,
    }


def settings(name: str, work: Path, **changes: Any) -> dict[str, Any]:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    variant = copy.deepcopy(VARIANTS.get(name, {}))
    optimizer = {"type": "AdamW", "lr": 0.05, "weight_decay": 0.1}
    base: dict[str, Any] = {
        "model": Toy(),
        "work_dir": str(work),
        "train_dataloader": loader(24, world_size),
        "val_dataloader": loader(16, world_size),
        "test_dataloader": loader(16, world_size),
        "val_evaluator": [Error()],
        "test_evaluator": [Error()],
        "val_cfg": {},
        "test_cfg": {},
        "train_cfg": {"by_epoch": True, "max_epochs": 2},
        "param_scheduler": {"type": "StepLR", "step_size": 1, "gamma": 0.5},
        "default_scope": "mmengine",
        "randomness": {"seed": 5},
        "experiment_name": f"{name}_{work.name}",
        **variant,
        "optim_wrapper": {"optimizer": optimizer, **variant.get("optim_wrapper", {})},
    }
    base.update(changes)
    return base


def one_process(name: str, work: Path, runner: Any = Runner, **changes: Any) -> Any:
    """A Runner without sharding."""
    return runner(**settings(name, work, launcher="none", **changes))


def sharded(name: str, work: Path, **changes: Any) -> Any:
    """A Runner whose model is wrapped."""
    cfg = {"model_wrapper_cfg": dict(WRAPPERS.get(name, {"type": "MMFullyShardedDataParallel"}))}
    cfg.update(VARIANTS.get(name, {}).get("cfg", {}))
    return Runner(**settings(name, work, launcher="pytorch", cfg=cfg, **changes))


def flexible(name: str, work: Path, **changes: Any) -> Any:
    """A FlexibleRunner with our strategy."""
    wrapper = {key: value for key, value in WRAPPERS.get(name, {}).items() if key != "type"}
    strategy = {"type": "ShardwiseStrategy", "model_wrapper": wrapper}
    return FlexibleRunner(**settings(name, work, launcher="pytorch", strategy=strategy, **changes))


def train(runner: Any) -> Recorder:
    recorder = Recorder()
    runner.register_hook(recorder)
    runner.train()
    return recorder


def keep(directory: Path, key: str, runner: Any, recorder: Recorder) -> None:
    (directory / f"{key}.json").write_text(json.dumps(outcome(runner, recorder)))


def outcome(runner: Any, recorder: Recorder) -> dict[str, Any]:
    scalars = runner.message_hub.log_scalars
    norms = scalars["train/grad_norm"].data[0].tolist() if "train/grad_norm" in scalars else []
    return {"losses": recorder.losses, "errors": recorder.errors, "norms": norms}


def check_outcome(directory: Path, key: str, runner: Any, recorder: Recorder, last: int | None = None) -> None:
    """As in one process; of a resumed run only the ``last`` losses and metrics."""
    expected, found = json.loads((directory / f"{key}.json").read_text()), outcome(runner, recorder)
    for kind in ("losses", "errors", "norms"):
        wanted = expected[kind] if last is None or kind == "norms" else expected[kind][-len(found[kind]) :]
        assert len(wanted) == len(found[kind]), (kind, wanted, found[kind])
        torch.testing.assert_close(torch.tensor(found[kind]), torch.tensor(wanted))
    if last is not None:
        assert len(found["losses"]) == last


def check_same_file(found: Path, wanted: Path) -> None:
    """Two checkpoints, by torch.load's defaults, have the same keys, and values that are close."""
    a, b = torch.load(found), torch.load(wanted)
    assert a.keys() == b.keys()
    assert type(a["state_dict"]) is OrderedDict
    assert list(a["state_dict"]) == list(b["state_dict"])
    assert a["state_dict"]._metadata.keys() == b["state_dict"]._metadata.keys()
    for part in ("state_dict", "optimizer", "param_schedulers", "ema_state_dict"):
        if part in b:
            check_same(a[part], b[part])
    assert a["meta"].keys() == b["meta"].keys()
    assert (a["meta"]["epoch"], a["meta"]["iter"]) == (b["meta"]["epoch"], b["meta"]["iter"])


def check_same(found: Any, wanted: Any) -> None:
    assert not isinstance(found, DTensor)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            check_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            check_same(a, b)
    else:
        assert found == wanted or found == pytest.approx(wanted)


# -- One process: what is true


def truth(name: str, directory: Path) -> None:
    runner = one_process(name, directory / f"one_{name}")
    keep(directory, name, runner, train(runner))


def one_resumes(directory: Path) -> None:
    """What two ranks saved, a Runner of one process resumes."""
    runner = one_process(
        "clipped", directory / "one_resumed", resume=True, load_from=str(directory / "two_clipped" / "epoch_1.pth")
    )
    check_outcome(directory, "clipped", runner, train(runner), last=3)


def one_resumes_flexible(directory: Path) -> None:
    runner = one_process(
        "clipped", directory / "one_flexible", FlexibleRunner, resume=str(directory / "flexible_clipped/epoch_1.pth")
    )
    check_outcome(directory, "clipped", runner, train(runner), last=3)


def one_loads_average(directory: Path) -> None:
    runner = one_process(
        "averaged", directory / "one_averaged_2", resume=True, load_from=str(directory / "two_averaged/epoch_1.pth")
    )
    check_outcome(directory, "averaged", runner, train(runner), last=3)


# -- Two ranks


def start() -> None:
    init_process_group(timeout=60)


def like_one_process(name: str, directory: Path) -> None:
    start()
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
    cfg = {"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}}
    runner = Runner(**settings("accumulated", directory / "two_ddp", launcher="pytorch", cfg=cfg))
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
    runner.save_checkpoint(str(work), "bare.pth", save_optimizer=False, save_param_scheduler=False, by_epoch=False)
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
    wrapper.zero_grad()
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
        ({"type": "torch.distributed.fsdp.wrap.always_wrap_policy"}, ["", "net", *(f"net.{i}" for i in range(4))]),
    ]
    for policy, expected in cases:
        for name in ("auto_wrap_policy", "fsdp_auto_wrap_policy"):
            given = copy.copy(policy)
            wrapper = MODEL_WRAPPERS.build(
                {"type": "MMFullyShardedDataParallel", name: given}, default_args={"module": Toy()}
            )
            units = [name for name, module in wrapper.module.named_modules() if unit_of(module) is not None]
            assert set(expected) - {"data_preprocessor"} == set(units) - {"data_preprocessor"}, (policy, units)
            assert given == policy  # configs are not changed
            assert wrapper(torch.randn(2, 7)).shape == (2, 3)
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


def without_default_hook(directory: Path) -> None:
    """`ShardwiseHook` does what `RuntimeInfoHook` does otherwise."""
    hooks = {"runtime_info": None, "logger": None}
    runner = sharded("clipped", directory / "two_hook", default_hooks=hooks, custom_hooks=[{"type": "ShardwiseHook"}])
    check_outcome(directory, "clipped", runner, train(runner))


def averages_by_hand(directory: Path) -> None:
    """`ExponentialMovingAverage` of a sharded model, against one of the whole model."""
    torch.manual_seed(2)
    plain = Toy()
    model = copy.deepcopy(plain)
    wrapper = MMFullyShardedDataParallel(model, auto_wrap_policy=LINEAR)
    ours, truth_ = (ExponentialMovingAverage(m, momentum=0.25) for m in (model, plain))
    assert not any(unit_of(module) is not None for module in ours.modules())
    assert type(copy.deepcopy(wrapper)) is MMFullyShardedDataParallel
    for step in range(3):
        with torch.no_grad():
            for m in (model, plain):
                for parameter in m.parameters():
                    parameter.mul_(1.5)
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
    assert not dist.is_initialized()
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


def in_subgroup(directory: Path) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[dist.get_rank() // 2]
    wrapper = MMFullyShardedDataParallel(Toy(), process_group=own)
    assert wrapper.module.net[0].weight.device_mesh.shape == (2,)
    wrapper.module.init_weights()
    assert wrapper(torch.ones(1, 7)).shape == (1, 3)


def shared(case: Callable[[Path], None]) -> Callable[[Path], None]:
    """``case`` in a directory that all groups here have, since some read what others write."""

    def run(own: Path) -> None:
        directory = own.parent / "mmengine"
        directory.mkdir(exist_ok=True)
        case(directory)

    return run


def named(*cases: Callable[[Path], None]) -> dict[str, Callable[[Path], None]]:
    return {case.__name__: shared(case) for case in cases}


CASES: dict[str, dict[str, Callable[[Path], None]]] = {
    "mmengine_one": {name: shared(partial(truth, name)) for name in VARIANTS},
    "mmengine_two": {
        **{name: shared(partial(like_one_process, name)) for name in VARIANTS},
        **named(
            like_ddp,
            resumes,
            resumes_average,
            validates_and_tests,
            flexible_like_one_process,
            flexible_resumes,
            flexible_averages,
            initializes_on_meta,
            initializes_by_function,
            initializes,
            saves_when_asked,
            amp,
            steps,
            accumulates,
            units_by_policy,
            strategies,
            normalizes_in_its_own_dtype,
            without_default_hook,
            averages_by_hand,
            loads_whole_tensors,
        ),
    },
    "mmengine_four": named(four_resume_flexible, four_resume, hybrid_on_four, in_subgroup),
    "mmengine_one_again": named(one_resumes, one_resumes_flexible, one_loads_average),
}
RANKS = {"mmengine_one": 1, "mmengine_two": 2, "mmengine_four": 4, "mmengine_one_again": 1}


@pytest.mark.parametrize(("group", "case"), [(group, case) for group, cases in CASES.items() for case in cases])
def test_case(group: str, case: str) -> None:
    for needed in list(CASES)[: min(2, list(CASES).index(group))]:
        launched(__file__, needed, RANKS[needed], RANKS[needed] > 1)
    check_case(__file__, group, case, RANKS[group], torchrun=RANKS[group] > 1)


# -- Arguments, in this process

fake_mesh = fake_mesh_of_unit_tests


def test_importing_shardwise_does_not_import_mmengine() -> None:
    program = "import sys, shardwise; assert not any(name.split('.')[0] == 'mmengine' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "PYTHONPATH": "src"})


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
        ("a_number", TypeError, "='a_number' is registered as a int, 3, and should be a callable"),
        ({"type": "a_number"}, TypeError, "registered as a int, 3"),
        (3, TypeError, "should be None, a str .* or a callable, but has type int: 3"),
        ([nn.Linear], TypeError, "but has type list"),
        (nn.Linear, TypeError, "but has type type"),
        ({"min_num_params": 3}, ValueError, "is a dict without 'type'"),
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
    FSDP_WRAP_POLICIES.module_dict["a_number"] = 3
    try:
        with pytest.raises(kind, match=f"{name}.*{message}"):
            MMFullyShardedDataParallel(Toy(), **{name: given})
    finally:
        del FSDP_WRAP_POLICIES.module_dict["a_number"]


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
        ({"param_init_fn": 3}, TypeError, "param_init_fn should be None, a str .* has type int: 3"),
        ({"ignored_modules": ["net.9"]}, ValueError, "ignored_modules has 'net.9', which the model does not have"),
        ({"ignored_modules": "net"}, TypeError, "ignored_modules should be None, names, or Modules, but has type str"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, ValueError, "ignored_modules has a Linear that is not the model's"),
        ({"ignored_parameters": [3]}, TypeError, "an item of ignored_parameters should be a name or a Parameter"),
        ({"process_group": "world"}, TypeError, "process_group should be None or a ProcessGroup"),
        ({"device_mesh": 2}, TypeError, "device_mesh should be None or a DeviceMesh"),
        ({"use_orig_params": "no"}, TypeError, "use_orig_params should be a bool"),
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


def test_arguments_without_effect_warn() -> None:
    with (
        pytest.warns(UserWarning, match="without effect: .*forward_prefetch.*limit_all_gathers"),
        pytest.raises(TypeError),
    ):
        MMFullyShardedDataParallel(3, limit_all_gathers=False, forward_prefetch=True)  # type: ignore[arg-type]
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
    """The program prints what it reached, and that a rank holds about half."""
    reached, held = output_of(ROOT / "examples" / "mmengine_runner.py")[-2:]
    found = re.fullmatch(r"resumed at epoch 2, trained to epoch 4: accuracy (\d\.\d+)", reached)
    assert found, reached
    assert float(found[1]) > 0.9
    numbers = re.fullmatch(r"rank 0 holds (\d+) of (\d+) parameters; .*", held)
    assert numbers, held
    assert int(numbers[2]) / 2 <= int(numbers[1]) < int(numbers[2]) * 0.51


if __name__ == "__main__":
    run_cases(CASES)

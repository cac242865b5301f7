"""What the tests of MMEngine's adapter train, in real Runners, and in how many processes."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.runner import FlexibleRunner, Runner
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import shardwise
from shardwise.core.tree import tensors_in
from tests.adapters.launching import ROOT, shared_directory
from tests.ranks.harness import RankError, ranks

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
    "swa": {"custom_hooks": [{"type": EMAHook, "ema_type": "StochasticWeightAverage", "begin_epoch": 2}]},
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
    "best": {"type": "MMFullyShardedDataParallel", "cpu_offload": True},
    "recomputed": {
        "type": "MMFullyShardedDataParallel",
        "auto_wrap_policy": LINEAR,
        "cpu_offload": True,
        "sharding_strategy": "NO_SHARD",
    },
}


def loader(size: int, world_size: int) -> dict[str, Any]:
    """A dataloader whose batches, taken over all ranks, are those of one process."""
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
        # MMEngine keeps what was logged by name, to the second.
        "experiment_name": f"{name}_{next(_numbers)}",
        **variant,
        "optim_wrapper": {"optimizer": optimizer, **variant.get("optim_wrapper", {})},
    }
    base.update(changes)
    return base


def one_process(name: str, work: Path, runner: Any = Runner, **changes: Any) -> Any:
    """A Runner without sharding."""
    return runner(**settings(name, work, launcher="none", **changes))


def replicated(name: str, work: Path, **changes: Any) -> Any:
    """A Runner of MMEngine's own data parallelism."""
    cfg = {"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}}
    return Runner(**settings(name, work, launcher="pytorch", cfg=cfg, **changes))


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
    """Two checkpoints, read by torch.load's defaults, have the same keys and close values."""
    a, b = torch.load(found), torch.load(wanted)
    assert a.keys() == b.keys()
    assert type(a["state_dict"]) is OrderedDict
    assert list(a["state_dict"]) == list(b["state_dict"])
    assert a["state_dict"]._metadata.keys() == b["state_dict"]._metadata.keys()
    for part in ("state_dict", "optimizer", "param_schedulers", "ema_state_dict"):
        if part in b:
            check_same(a[part], b[part])
            # The file has all of the memory that a view is of.
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors_in(a[part]))
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


# -- Processes

Case = Callable[[Path], None]
_numbers, _partings = itertools.count(), itertools.count()


@contextmanager
def worlds_of(directory: Path, size: int) -> Iterator[int]:
    """Inside, each ``size`` ranks are a world of their own, with a process group unless they are one; gives its number.

    What one process does is run like this too, since starting one takes longer than most of that.
    """
    rank, world_size, number = dist.get_rank(), dist.get_world_size(), next(_partings)
    dist.barrier()
    dist.destroy_process_group()
    first = rank // size * size
    own = min(size, world_size - first)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    if own > 1:
        os.environ.update(RANK=str(rank - first), WORLD_SIZE=str(own), LOCAL_RANK=str(rank - first))
        _join(directory / f"inside_{world_size}_{number}_{first}", rank - first, own)
    yield rank // size
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(before)
    _join(directory / f"after_{world_size}_{number}", rank, world_size)


def _join(file: Path, rank: int, world_size: int) -> None:
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size, timeout=limit)
    # A rank that leaves before the others are connected to it fails them.
    dist.barrier()


def run_in_turn(cases: dict[str, Case], directory: Path, file: str) -> None:
    """On a rank: the cases one after the other; stops at the first that fails. How each went is written down."""
    for name, case in cases.items():
        started, error = time.monotonic(), None
        try:
            case(directory)
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
            raise
        finally:
            with open(directory / f"{file}.{os.environ.get('RANK', 0)}.jsonl", "a") as log:
                log.write(json.dumps({"case": name, "error": error, "seconds": time.monotonic() - started}) + "\n")


@functools.cache
def outcomes(module: str, function: str, world_size: int) -> tuple[dict[str, Any], str]:
    """The outcomes, by rank and case, of the cases that ``function`` of a test module runs on ranks; run once."""
    directory = shared_directory() / "mmengine"
    directory.mkdir(exist_ok=True)
    failure = ""
    try:
        ranks(world_size).run(module, function, {"directory": str(directory)}, 240.0)
    except RankError as error:
        failure = str(error)
    found: dict[str, Any] = {}
    for rank in range(world_size):
        log = directory / f"{function}.{rank}.jsonl"
        for line in log.read_text().splitlines() if log.is_file() else []:
            item = json.loads(line)
            found.setdefault(item["case"], {})[rank] = item["error"]
    return found, failure


def check(module: str, function: str, world_size: int, case: str) -> None:
    """A case succeeded on every rank."""
    found, failure = outcomes(module, function, world_size)
    went = found.get(case, {})
    errors = [f"rank {rank}:\n{error}" for rank, error in went.items() if error]
    assert not errors, "\n".join(errors)
    assert len(went) == world_size, f"not all ranks finished it: {failure}"


def output_of_ranks(program: Path, world_size: int) -> list[str]:
    """The lines printed by the first rank of a program, whose processes are started as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank in range(world_size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **common, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world_size, "\n".join(outputs)
    return outputs[0].strip().splitlines()


def named(*cases: Case) -> dict[str, Case]:
    return {case.__name__: case for case in cases}


def full(model: nn.Module) -> dict[str, Any]:
    return shardwise.full_state_dict(model, rank0_only=False)

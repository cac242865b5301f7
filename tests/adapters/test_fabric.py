"""Fabric's strategy with real Fabric loops, against plain torch on the joined batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("lightning")

import shardwise
from shardwise import CheckpointError, CorruptFileError
from shardwise.adapters.whole import gather_in
from shardwise.checkpoint.reading import StoredData
from tests.adapters.lightning_ranks import check_in_ranks

NAMESPACE: str = globals().get("NAMESPACE", "lightning.fabric")
BATCH, STEPS = 4, 5


class Block(nn.Module):
    """With a buffer that checkpoints have, one that they have not, and a parameter made after its children."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.randn(width) / 10 + 1)
        self.register_buffer("shift", torch.arange(width) / 100)
        self.register_buffer("noise", torch.randn(width) / 100, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x))) + self.shift + self.noise


class Net(nn.Module):
    """Blocks between two layers; the last one is initialized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 13)
        self.blocks = nn.Sequential(Block(), Block())
        self.tail = nn.Linear(13, 3, bias=False)
        nn.init.normal_(self.tail.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.blocks(self.head(x)))


class FromMeta(nn.Module):
    """For `torch.device("meta")`, under which nothing is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 3, generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.03)


_fabrics: list[Any] = []


def fabric(**arguments: Any) -> Any:
    """A Fabric with our strategy; the first one starts the processes."""
    module = importlib.import_module("shardwise.fabric")
    precision = arguments.pop("precision", None)
    strategy = module.strategy_for(NAMESPACE)(**arguments) if arguments else "shardwise"
    made = importlib.import_module(NAMESPACE).Fabric(
        accelerator="cpu", strategy=strategy, devices=dist.get_world_size(), precision=precision
    )
    made.launch()
    _fabrics.append(made)
    return made


def by_block(**arguments: Any) -> Any:
    return fabric(auto_wrap_policy={Block}, **arguments)


def train(
    used: Any, model: Any, optimizer: Any, steps: range = range(STEPS), max_norm: float | None = None
) -> list[Any]:
    losses = []
    for step in steps:
        inputs, targets = data(step, used.global_rank)
        loss = F.mse_loss(model(inputs), targets)
        used.backward(loss)
        if max_norm is not None:
            used.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(used.all_reduce(loss.detach().clone()))
    return losses


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        parts = [data(step, rank) for rank in range(dist.get_world_size())]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole(model: Any) -> dict[str, torch.Tensor]:
    """All values, buffers that checkpoints do not have too."""
    module = getattr(model, "module", model)
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in named}


def assert_whole(model: Any, expected: dict[str, torch.Tensor], *, bitwise: bool = True) -> None:
    found = whole(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if bitwise:
            assert torch.equal(value, expected[name]), name
        else:
            torch.testing.assert_close(value, expected[name], msg=lambda text, n=name: f"{n}: {text}")


# -- Cases


def train_like_one_process(directory: Path) -> None:
    truth = make_net()
    losses = train_plain(truth, adam(truth))
    for used in (fabric(), by_block(), by_block(reshard_after_forward=False), by_block(cpu_offload=True)):
        model = make_net()
        model, optimizer = used.setup(model, adam(model))
        torch.testing.assert_close(train(used, model, optimizer), losses)
        assert_whole(model, whole(truth), bitwise=False)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    checkpointed = by_block(activation_checkpointing_policy={Block})
    model = checkpointed.setup(make_net())
    torch.testing.assert_close(train(checkpointed, model, checkpointed.setup_optimizers(adam(model))), losses)


def meta_init(directory: Path) -> None:
    """Bit for bit what one process makes, buffers too, whatever wraps; other ways to initialize."""
    expected = whole(make_net(3))
    following = torch.rand(3)
    for used in (fabric(), by_block(), by_block(state_dict_type="sharded")):
        torch.manual_seed(3)
        with used.init_module(empty_init=True):
            model = Net()
        assert all(parameter.is_meta for parameter in model.parameters())
        model = used.setup(model)
        assert_whole(model, expected)
        assert torch.equal(torch.rand(3), following)
    # Built on the meta device by others: by its modules' own methods.
    used = by_block()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 9), nn.Embedding(4, 9), nn.LayerNorm(9))
    torch.manual_seed(5)
    model = used.setup(model)
    assert not any(value.is_meta for value in whole(model).values())
    assert torch.equal(model.module[2].weight.full_tensor(), torch.ones(9))

    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    used = fabric(param_init_fn=ones)
    for context in (used.init_module(empty_init=True), torch.device("meta")):
        with context:
            model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 2))
        model = used.setup(model)
        assert all(bool((value == 1).all()) for value in whole(model).values())


def nothing_initializes(directory: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 5), FromMeta())
    with pytest.raises(ValueError, match=r"'1' \(FromMeta\).*'weight'.*reset_parameters"):
        fabric().setup(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    # Once there is a way, the same model is set up, and nothing says that it was before.
    FromMeta.reset_parameters = lambda self: nn.init.ones_(self.weight)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = fabric().setup(model)
    del FromMeta.reset_parameters
    assert bool((made.module[1].weight.full_tensor() == 1).all())


def meta_optimizer(directory: Path) -> None:
    """An optimizer made of parameters on the meta device, with groups of its own."""
    truth = make_net()

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        return torch.optim.AdamW([{"params": matrices, "lr": 0.03}, {"params": others, "weight_decay": 0.0}], lr=0.02)

    losses = train_plain(truth, grouped(truth))
    for jointly in (True, False):
        used = by_block()
        torch.manual_seed(0)
        with used.init_module(empty_init=True):
            model = Net()
        optimizer = grouped(model)
        if jointly:
            model, optimizer = used.setup(model, optimizer)
        else:
            model = used.setup_module(model)
            optimizer = used.setup_optimizers(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.02]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        torch.testing.assert_close(train(used, model, optimizer), losses)
        assert_whole(model, whole(truth), bitwise=False)
    # State that the constructor made of parameters without values.
    truth = make_net()
    losses = train_plain(truth, torch.optim.Adagrad(truth.parameters(), lr=0.1, initial_accumulator_value=0.3))
    used = by_block()
    torch.manual_seed(0)
    with used.init_module(empty_init=True):
        model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
    model, optimizer = used.setup(model, optimizer)
    torch.testing.assert_close(train(used, model, optimizer), losses)
    used = fabric()
    with used.init_module(empty_init=True):
        unknown = Net()
    known = make_net()
    with pytest.raises(RuntimeError, match="meta"):
        used.setup(known, adam(known), adam(unknown))
    assert not any(isinstance(parameter, DTensor) for parameter in known.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        used.setup_optimizers(adam(unknown))
    with pytest.raises(RuntimeError, match="meta"):
        used.setup_optimizers(torch.optim.SGD([nn.Parameter(torch.empty(3, device="meta"))], lr=0.1))


def peak_bytes(action: Callable[[], Any], file: Path | None = None) -> tuple[Any, int, int]:
    """What ``action`` gives, the most bytes that torch held on the host meanwhile, and those at the end, both beyond
    those of before and without ``file``, which is mapped."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = action()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        # torch counts a mapped file as if it were read.
        is_file = file is not None and abs(abs(event.nbytes()) - file.stat().st_size) < 1e5
        if event.name() == "[memory]" and not is_file:
            held += event.nbytes()
            peak = max(peak, held)
    return result, peak, held


def memory(directory: Path) -> None:
    """A model of 400 MB: nothing on the meta device; then the shards and one unit."""
    width, layers = 2236, 20
    unit = (width * width + width) * 4
    used = fabric(auto_wrap_policy={nn.Linear})

    def build() -> nn.Module:
        with used.init_module(empty_init=True):
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    # One tensor at a time is asked for, and given back before anything is written to it.
    model, of_building, after_building = peak_bytes(build)
    assert after_building < 1e6
    assert of_building < 1.1 * unit
    _, of_setup, after_setup = peak_bytes(lambda: used.setup(model))
    shards = layers * unit / 2
    assert 2 * shards > 4e8
    assert shards <= after_setup < shards + 0.1 * unit
    assert shards <= of_setup < shards + 1.2 * unit, (of_setup / unit, shards / unit)


def saved_path(directory: Path, kind: str = "full") -> Path:
    return directory / f"fabric_{kind}"


def checkpoints(directory: Path) -> None:
    """Save in the middle, go on bit for bit: full and sharded, loaded after setup, and before."""
    for kind in ("full", "sharded"):
        used = by_block(state_dict_type=kind)
        model = make_net()
        model, optimizer = used.setup(model, adam(model))
        train(used, model, optimizer, range(3))
        state = {"model": model, "optimizer": optimizer, "step": 3, "more": {"a": [1, 2]}}
        path = saved_path(directory, kind)
        for _ in range(2):  # again over itself
            used.save(path, state)
        assert path.is_dir() == (kind == "sharded")
        saved = whole(model)
        losses = train(used, model, optimizer, range(3, 6))
        for when in ("after", "before", "joint"):
            other = by_block()  # of the other kind too: what is read tells
            torch.manual_seed(9)
            with other.init_module(empty_init=True):
                again = Net()
            again_optimizer: Any = adam(again)
            target: dict[str, Any] = {"model": again, "step": 0, "more": None}
            if when == "after":
                again, again_optimizer = other.setup(again, again_optimizer)
                target.update(model=again, optimizer=again_optimizer)
                rest = other.load(path, target)
            else:
                rest = other.load(path, target)
                again, again_optimizer = other.setup(again, again_optimizer)
                assert other.load(path, {"optimizer": again_optimizer, "model": again}).keys() == {"step", "more"}
            assert target["step"] == 3
            assert target["more"] == {"a": [1, 2]}
            if when == "after":
                assert rest == {}
            expected = {name: value for name, value in saved.items() if "noise" not in name}
            found = {name: value for name, value in whole(again).items() if "noise" not in name}
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            for block, same in zip(again.module.blocks, model.module.blocks, strict=True):
                block.noise.copy_(same.noise)  # not in any checkpoint
            assert all(map(torch.equal, train(other, again, again_optimizer, range(3, 6)), losses)), when
        with pytest.raises(KeyError, match="absent"):
            other.load(path, {"model": again, "absent": 1})
        other.load(path, {"model": again, "absent": 1}, strict=False)
        if kind == "sharded":
            for use in (other.load, used.save):
                with pytest.raises(ValueError, match="AdamW without its model"):
                    use(path, {"optimizer": again_optimizer})
        with pytest.raises(FileNotFoundError):
            other.load(directory / "nowhere", {"model": again})
        with pytest.raises(ValueError, match=r"is a directory without \.metadata, so it is not a sharded checkpoint"):
            other.load(directory, {"model": again})
    plain = torch.load(saved_path(directory), weights_only=False)
    alone = make_net(1)
    alone.load_state_dict(plain["model"])
    optimizer = adam(alone)
    optimizer.load_state_dict(plain["optimizer"])
    used = fabric()
    assert used.load(saved_path(directory)).keys() == {"model", "optimizer", "step", "more"}


def raw_files(directory: Path) -> None:
    """`load_raw` of a state dict, of an optimizer's and of safetensors, before setup and after."""
    import safetensors.torch

    source = make_net(4)
    if dist.get_rank() == 0:
        torch.save(source.state_dict(), directory / "raw.pt")
        safetensors.torch.save_file(source.state_dict(), directory / "raw.safetensors")
    dist.barrier()
    for name in ("raw.pt", "raw.safetensors"):
        for before in (True, False):
            used = by_block()
            with used.init_module(empty_init=True):
                model: Any = Net()
            parameters = list(model.parameters())
            if before:
                used.load_raw(directory / name, model)
                assert all(map(torch.equal, model.state_dict().values(), source.state_dict().values()))
                assert all(map(lambda a, b: a is b, model.parameters(), parameters))
            model = used.setup(model)
            if not before:
                used.load_raw(directory / name, model)
            found = {name: value for name, value in whole(model).items() if "noise" not in name}
            assert all(torch.equal(value, source.state_dict()[key]) for key, value in found.items())
    # Of another dtype than the model's, and of several files.
    halves = {key: value.half() for key, value in source.state_dict().items()}
    parts = {f"part{index}.safetensors": dict(list(halves.items())[index::2]) for index in range(2)}
    several = directory / "several"
    if dist.get_rank() == 0:
        several.mkdir()
        for file, tensors in parts.items():
            safetensors.torch.save_file(tensors, several / file)
        index = {"weight_map": {key: file for file, tensors in parts.items() for key in tensors}}
        (several / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    for path in (several, several / "model.safetensors.index.json"):
        used = by_block()
        with used.init_module(empty_init=True):
            model = Net()
        used.load_raw(path, model)
        found = {name: value for name, value in whole(used.setup(model)).items() if "noise" not in name}
        assert all(torch.equal(value, halves[key].float()) for key, value in found.items())
    with pytest.raises(ValueError, match="missing keys: 'more'"):
        used.load_raw(directory / "raw.pt", nn.ParameterDict({"more": torch.zeros(3)}))
    saver = by_block(state_dict_type="sharded")
    saver.save(directory / "raw_sharded", {"net": saver.setup(make_net(4))})
    with used.init_module(empty_init=True):
        model = Net()
    used.load_raw(directory / "raw_sharded", model)
    found = whole(used.setup(model))
    assert all(torch.equal(found[key], value) for key, value in source.state_dict().items())
    with pytest.raises(ValueError, match="not a state dict of AdamW"):
        used.load_raw(directory / "raw.pt", adam(nn.Linear(7, 13)))
    partial = nn.Sequential(nn.Linear(7, 13))
    used.load_raw(directory / "raw.pt", used.setup(partial), strict=False)


def only_own_rows(directory: Path) -> None:
    """Loading 100 MB into a model on the meta device, and setting it up, holds the shards and one unit."""
    import safetensors.torch

    width, layers = 1582, 10
    unit = (width * width + width) * 4

    def build(used: Any) -> nn.Module:
        with used.init_module(empty_init=True):
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    for kind in ("full", "sharded"):
        used, path = fabric(auto_wrap_policy={nn.Linear}, state_dict_type=kind), directory / f"large_{kind}"
        source = used.setup(build(used))
        used.save(path, {"model": source})
        expected = source.module[3].weight.to_local().clone()
        state = used.strategy.get_module_state_dict(source.module) if kind == "full" else {}
        if state:
            safetensors.torch.save_file(state, directory / "large.safetensors")
        if kind == "full":
            expected_raw = expected
        del source, state
        model = build(used)

        def load(used: Any = used, path: Path = path, model: Any = model) -> Any:
            used.load(path, {"model": model})
            return used.setup(model)

        made, peak, _ = peak_bytes(load, path)
        assert peak < layers * unit / 2 + 1.2 * unit, (kind, peak / unit)
        assert torch.equal(made.module[3].weight.to_local(), expected)
        del made
    model = build(used)

    def load_raw() -> Any:
        used.load_raw(directory / "large.safetensors", model)
        return used.setup(model)

    made, peak, _ = peak_bytes(load_raw, directory / "large.safetensors")
    assert peak < layers * unit / 2 + 1.2 * unit, peak / unit
    assert torch.equal(made.module[3].weight.to_local(), expected_raw)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory / "large_sharded")
        (directory / "large_full").unlink()
        (directory / "large.safetensors").unlink()


def filters(directory: Path) -> None:
    for kind in ("full", "sharded"):
        used = by_block(state_dict_type=kind)
        model = used.setup(make_net())
        path = directory / f"filtered_{kind}"
        used.save(path, {"model": model, "n": 1}, filter={"model": lambda name, value: name.startswith("blocks")})
        again = used.setup(make_net(8))
        before = whole(again)
        used.load(path, {"model": again}, strict=False)
        for name, value in whole(again).items():
            expected = whole(model) if name.startswith("blocks") and "noise" not in name else before
            assert torch.equal(value, expected[name]), name
        with pytest.raises(ValueError, match=r"head\.weight"):
            used.load(path, {"model": again})
        with pytest.raises(ZeroDivisionError):  # on all ranks, though of a full one only rank 0 has tensors
            used.save(path, {"model": model}, filter={"model": lambda name, value: 1 / 0})
        with pytest.raises(RuntimeError, match="state of rank 0"):
            used.save(path, {"model": model, "object": FailsOnFirst()})
        used.barrier()


def filters_one_of_several(directory: Path) -> None:
    """Of the filtered model there are fewer names than of another one with the same names."""
    for kind in ("full", "sharded"):
        used = by_block(state_dict_type=kind)
        first, second = used.setup(make_net()), used.setup(make_net(1))
        path = directory / f"filtered_one_{kind}"
        chosen = {"first": lambda name, value: name.startswith("blocks")}
        used.save(path, {"first": first, "second": second}, filter=chosen)
        again, other = used.setup(make_net(8)), used.setup(make_net(9))
        before = whole(again)
        with pytest.raises(ValueError, match=r"head\.weight"):
            used.load(path, {"first": again})
        used.load(path, {"first": again, "second": other}, strict=False)
        for name, value in whole(again).items():
            expected = whole(first) if name.startswith("blocks") and "noise" not in name else before
            assert torch.equal(value, expected[name]), name
        saved, loaded = whole(second), whole(other)
        assert all(torch.equal(loaded[name], value) for name, value in saved.items() if "noise" not in name)


def overlapping_names(directory: Path) -> None:
    """In a directory the weights of one would be taken for a part of the other, which could not be loaded."""
    for kind in ("full", "sharded"):
        used = by_block(state_dict_type=kind)
        model, other = used.setup(make_net()), used.setup(make_net(1))
        path, state = directory / f"overlapping_{kind}", {"model": model, "model.ema": other}
        if kind == "sharded":
            with pytest.raises(ValueError, match=r"'model' and 'model\.ema'.* rename one of them, as to 'model_ema'"):
                used.save(path, state)
            assert not path.exists()
            state = {"model": model, "model_ema": other, "model.step": 3}  # not sharded, so stored elsewhere
        used.save(path, state)
        again, another = used.setup(make_net(8)), used.setup(make_net(9))
        used.load(path, dict(zip(state, (again, another, 0), strict=False)))
        for saved, loaded in ((model, again), (other, another)):
            expected = {name: value for name, value in whole(saved).items() if "noise" not in name}
            assert all(torch.equal(whole(loaded)[name], value) for name, value in expected.items())


class LoadsElsewhere:
    """Takes its state where ``takes``."""

    def __init__(self, takes: bool) -> None:
        self.takes = takes

    def load_state_dict(self, state: Any) -> None:
        if not self.takes:
            raise RuntimeError("not on rank 0")


def ranks_that_differ(directory: Path) -> None:
    """Rank 0 decides what is filtered; names that only one rank saves are an error on all, not a wait for ever."""
    for kind in ("full", "sharded"):
        used, path = by_block(state_dict_type=kind), directory / f"differ_{kind}"
        model, is_first = used.setup(make_net()), used.is_global_zero
        given = {"model": model, "more": {"a": 1, "b": 2} if is_first else None}
        used.save(path, given, filter={"more": lambda name, _: name == "a"} if is_first else None)
        state: dict[str, Any] = {"more": None}
        used.load(path, state)
        assert state == {"more": {"a": 1}}
        with pytest.raises(ValueError, match="ranks differ in what they save"):
            used.save(path, {"model": model, **({"step": 1} if is_first else {})})
        shards = list(model.named_parameters())
        own = dict(shards if is_first else reversed(shards))  # of the same names, as those from a set are
        used.save(path, {"own": own})
        state = {"own": None}
        used.load(path, state)
        assert all(torch.equal(state["own"][name], shard.full_tensor()) for name, shard in shards)
        with pytest.raises(ValueError, match=r"rank 0 and rank 1 save different sharded tensors as 'own\.\w+"):
            used.save(path, {"own": own if is_first else {}})
        used.save(path, {"object": {}})
        with pytest.raises(RuntimeError, match="not on rank 0"):
            used.load(path, {"object": LoadsElsewhere(not is_first)})


def postponed_loads(directory: Path) -> None:
    """What is loaded from directories into models on the meta device is there once they are set up, as a part of
    another model or in parts, and is not replaced by random values where it cannot be read."""
    used = by_block(state_dict_type="sharded")
    model = make_net(1)
    model, optimizer = used.setup(model, adam(model))
    train(used, model, optimizer)
    path, parts = directory / "postponed", {"head": "head", "rest": ("blocks", "tail")}
    used.save(path, {"model": model, "optimizer": optimizer})
    used.save(directory / "blocks", {"model": model.module.blocks})
    for name, prefix in parts.items():
        chosen = {"model": lambda key, value, prefix=prefix: key.startswith(prefix)}
        used.save(directory / name, {"model": model}, filter=chosen)
    used.barrier()
    if used.is_global_zero:
        torch.save({"tail.weight": torch.ones(3, 13)}, directory / "ones.pt")
    expected = {name: value for name, value in whole(model).items() if "noise" not in name}

    def check(found: dict[str, torch.Tensor], prefix: str = "") -> None:
        assert all(torch.equal(found[n], value) for n, value in expected.items() if n.startswith(prefix))

    def empty() -> Net:
        with used.init_module(empty_init=True):
            return Net()

    inside, outside, twice, own, replaced = (empty() for _ in range(5))
    used.load(directory / "blocks", {"model": inside.blocks})
    check(whole(used.setup(inside)), "blocks")
    used.load(path, {"model": outside})
    check({name.removeprefix("0."): value for name, value in whole(used.setup(nn.Sequential(outside))).items()})
    for name in parts:
        used.load(directory / name, {"model": twice}, strict=False)
    check(whole(used.setup(twice)))
    used.load(path, {"model": own})
    check(
        {
            f"{name}.{key}": v
            for name in ("head", "blocks", "tail")
            for key, v in whole(used.setup(own.get_submodule(name))).items()
        }
    )
    used.load(path, {"model": replaced})
    used.load_raw(directory / "ones.pt", replaced, strict=False)
    check(whole(used.setup(replaced)), "blocks")
    assert whole(replaced)["tail.weight"].eq(1).all()

    again, gone = empty(), empty()
    again_optimizer: Any = adam(again)
    with contextlib.chdir(directory):
        used.load("postponed", {"model": again, "optimizer": again_optimizer})
        used.load("postponed", {"model": gone})
    again, again_optimizer = used.setup(again, again_optimizer)
    check(whole(again))
    for block, same in zip(again.module.blocks, model.module.blocks, strict=True):
        block.noise.copy_(same.noise)  # not in any checkpoint
    losses = train(used, model, optimizer, range(5, 8))
    assert all(map(torch.equal, train(used, again, again_optimizer, range(5, 8)), losses))
    used.barrier()
    if used.is_global_zero:
        shutil.rmtree(path)
    used.barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"reading the checkpoint .*postponed failed"):
            used.setup(gone, _reapply_compile=False)


def other_objects(directory: Path) -> None:
    """State beside modules and optimizers: averages, whose tensors are sharded, and what cannot be saved."""
    for kind in ("full", "sharded"):
        used, path = by_block(state_dict_type=kind), directory / f"averages_{kind}"
        model = make_net(1)
        model, optimizer = used.setup(model, adam(model))
        train(used, model, optimizer, range(2))
        average, again = shardwise.EMA(model.module, 0.9), shardwise.EMA(used.setup(make_net(2)).module, 0.5)
        used.save(path, {"average": average})
        used.load(path, {"average": again})
        pairs = zip(average.state_dict()["averages"].values(), again.state_dict()["averages"].values(), strict=True)
        assert all(torch.equal(ours.full_tensor(), theirs.full_tensor()) for ours, theirs in pairs)
        assert again.decay == 0.9
        # Other ranks than the one that writes have no memory for whole models.
        kept = gather_in(average.state_dict(), keeps=False)["averages"]
        assert all(isinstance(value, DTensor) for value in kept.values())
        for inside in ([optimizer], {"more": (model,)}):
            with pytest.raises(TypeError, match=r"state\['inside'\] has (AdamW|FSDPNet) inside, which is sharded"):
                used.save(path, {"inside": inside})
    with pytest.raises(ValueError, match="is a sharded checkpoint, in which an optimizer's state is by the names"):
        used.load_raw(path, optimizer)


def links(directory: Path) -> None:
    """A checkpoint goes where a symbolic link leads, as often as it is saved; a URL is not a directory."""
    model = None
    for kind in ("full", "sharded"):
        used, path = by_block(state_dict_type=kind), directory / f"target_{kind}"
        model = model or used.setup(make_net())
        link = directory / f"link_{kind}"
        if used.is_global_zero:
            link.symlink_to(path.name)
        used.barrier()
        for step in range(3):
            used.save(link, {"model": model, "step": step})
        assert link.is_symlink()
        assert path.is_dir() == (kind == "sharded")
        state = {"step": 0}
        used.load(path, state)
        assert state == {"step": 2}
        for use in (used.save, used.load):
            with pytest.raises(ValueError, match="memory://here is a URL"):
                use("memory://here", {"model": model})
    assert not [entry.name for entry in directory.iterdir() if entry.name.startswith((".link", ".target"))]


def working_directory(directory: Path) -> None:
    """A sharded checkpoint may be saved into the working directory, or around it, as often as anywhere else."""
    used, path = by_block(state_dict_type="sharded"), directory / "working"
    model = used.setup(make_net())
    if used.is_global_zero:
        (path / "inside").mkdir(parents=True)
    used.barrier()
    for place, own in (".", path), ("..", path / "inside"):
        with contextlib.chdir(own):
            for step in range(3):
                used.save(place, {"model": model, "step": step})
                assert Path.cwd() == own.resolve()
                Path(f"log_{dist.get_rank()}").write_text("written")
            state = {"step": 0}
            used.load(place, state)
            assert state == {"step": 2}
        assert (own / "log_0").read_text() == "written"


def failing_disks(directory: Path) -> None:
    """A file that cannot be written whole, what is no file, and one of those beside the tensors that was changed, are
    named."""
    for kind in ("full", "sharded"):
        used, path = by_block(state_dict_type=kind), directory / f"failing_{kind}"
        model = used.setup(make_net())
        used.save(path, {"model": model, "step": 1})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            if used.is_global_zero:
                resource.setrlimit(resource.RLIMIT_FSIZE, (700, limit[1]))
            with pytest.raises(CheckpointError, match=rf"{path.name}.unfinished failed: .*File too large"):
                used.save(path, {"model": model, "step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        with pytest.raises(TypeError, match=r"unfinished.* cannot be saved, since something in it cannot be pickled"):
            used.save(path, {"model": model, "step": lambda: 2})
        with pytest.raises(TypeError, match="path must be a path, not int"):
            used.save(3, {"model": model})
        state = {"step": 0}
        used.load(path, state)
        assert state == {"step": 1}
        pipe = directory / f"pipe_{kind}"
        if used.is_global_zero:
            os.mkfifo(pipe)
        used.barrier()
        with pytest.raises(OSError, match=rf"{pipe.name} is a device, a pipe or a socket, whose place"):
            used.save(pipe, {"model": model})
        assert pipe.is_fifo()
    used.barrier()
    with pytest.raises(CheckpointError, match=r"writing a checkpoint into .*inside failed: .*Not a directory"):
        used.save(directory / "failing_full" / "inside", {"model": model})
    if used.is_global_zero:
        damaged = bytearray((path / "meta.pt").read_bytes())
        damaged[damaged.index(b"step")] ^= 1
        (path / "meta.pt").write_bytes(damaged)
    used.barrier()
    with pytest.raises(CorruptFileError, match=r"meta\.pt is damaged"):
        used.load(path, state)


def hosts_with_files_of_their_own(directory: Path) -> None:
    """What only one rank finds, or does not find, is the same error on all."""
    from shardwise.checkpoint.integrity import CheckpointError
    from shardwise.lightning_common import files, replacing

    used, differently = by_block(state_dict_type="sharded"), r"for rank 0.*for rank 1"
    model, path = used.setup(make_net()), directory / "on_one_host"
    used.save(path, {"model": model})
    used.barrier()

    def on_rank_one(target: Any, name: str, answer: Any) -> Any:
        return mock.patch.object(target, name, answer) if dist.get_rank() == 1 else nullcontext()

    def fails(*_: Any, **__: Any) -> Any:
        raise CheckpointError("no such disk")

    with on_rank_one(replacing, "DCP_METADATA", "missing"), pytest.raises(FileNotFoundError, match=differently):
        used.load(path, {"model": model})
    with on_rank_one(StoredData, "open", fails), pytest.raises(CheckpointError, match="no such disk"):
        used.load(path, {"model": model})
    with on_rank_one(files, "MANIFEST", "nothing"):
        used.load(path, {"model": model})
    whole_file, path = by_block(), directory / "whole_on_one_host"
    with on_rank_one(Path, "is_dir", lambda _: True), pytest.raises(IsADirectoryError):
        whole_file.save(path, {"model": model})
    whole_file.save(path, {"model": model})
    used.barrier()
    with on_rank_one(Path, "exists", lambda _: False), pytest.raises(FileNotFoundError, match=differently):
        whole_file.load(path, {"model": model})
    with on_rank_one(files, "_kind", fails), pytest.raises(CheckpointError, match="no such disk"):
        whole_file.load(path, {"model": model})
    with on_rank_one(files.torch, "load", fails), pytest.raises(CheckpointError, match="no such disk"):
        whole_file.load(path, {"model": model})
    used.barrier()


class FailsOnFirst:
    """Has a state on all ranks but the first."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 0:
            raise RuntimeError("state of rank 0")
        return {}


def clipping(directory: Path) -> None:
    used, truth = by_block(), make_net()
    model = make_net()
    model, optimizer = used.setup(model, adam(model))
    parts = [data(0, rank) for rank in range(used.world_size)]
    inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def gradients() -> None:
        optimizer.zero_grad()
        truth.zero_grad()
        F.mse_loss(truth(inputs), targets).backward()
        mine, wanted = data(0, used.global_rank)
        used.backward(F.mse_loss(model(mine), wanted))

    def same() -> None:
        for ours, theirs in zip(model.module.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    for norm_type in (2.0, 1, "inf"):
        gradients()
        norm = used.clip_gradients(model, optimizer, max_norm=0.01, norm_type=norm_type)
        expected = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.01, norm_type=float(norm_type))
        torch.testing.assert_close(norm, expected)
        same()
    gradients()
    assert used.clip_gradients(model, optimizer, clip_val=0.001) is None
    torch.nn.utils.clip_grad_value_(truth.parameters(), 0.001)
    same()
    # What YAML makes of such numbers, which torch takes.
    read: Any = {"max_norm": "1e-2", "clip_val": "1e-3"}
    gradients()
    norm = used.clip_gradients(model, optimizer, max_norm=read["max_norm"])
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(truth.parameters(), read["max_norm"]))
    same()
    used.clip_gradients(model, optimizer, clip_val=read["clip_val"])
    torch.nn.utils.clip_grad_value_(truth.parameters(), read["clip_val"])
    same()
    gradients()
    if dist.get_rank() == 0:
        next(iter(model.module.parameters())).grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError, match="nan"):
        used.clip_gradients(model, optimizer, max_norm=1.0)
    assert torch.isnan(used.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False))


def accumulation(directory: Path) -> None:
    """`enabled=True` adds up without reducing, `enabled=False` reduces (upstream: turns it off for what follows)."""
    truth = make_net()
    for step in range(3):
        parts = [data(step, rank) for rank in range(dist.get_world_size())]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        F.mse_loss(truth(inputs), targets).backward()
    for enabled in (True, False):
        used = by_block()
        model = used.setup(make_net())
        for step in range(3):
            with used.no_backward_sync(model, enabled=enabled and step < 2):
                inputs, targets = data(step, used.global_rank)
                used.backward(F.mse_loss(model(inputs), targets))
            reduced = all(parameter.grad is not None for parameter in model.module.parameters())
            assert reduced == (not enabled or step == 2)
        for ours, theirs in zip(model.module.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    with pytest.raises(ZeroDivisionError), used.no_backward_sync(model):
        raise ZeroDivisionError
    model.zero_grad()
    used.backward(F.mse_loss(model(data(0, 0)[0]), data(0, 0)[1]))
    assert all(parameter.grad is not None for parameter in model.module.parameters())


def zeroed_accumulation(directory: Path) -> None:
    """What `no_backward_sync` has left over is dropped with all gradients, and what another optimizer has is not."""
    used, truth = by_block(), make_net()
    model = used.setup(make_net())
    halves = [[*model.module.parameters()][half::2] for half in range(2)]
    first, second = used.setup_optimizers(*(torch.optim.SGD(half, 0.1) for half in halves))

    def backward(each: nn.Module, step: int) -> None:
        loss = F.mse_loss(each(data(0, step)[0]), data(0, step)[1])
        used.backward(loss) if each is model else loss.backward()

    for set_to_none in (True, False):
        for step, zero in enumerate((first, second, model)):
            for each in (truth, model):
                each.zero_grad()
            with used.no_backward_sync(model):
                for each in (truth, model):
                    backward(each, 10 + step)
            zero.zero_grad(set_to_none)
            for parameter in [*truth.parameters()][step::2] if zero is not model else truth.parameters():
                parameter.grad = None
            for each in (truth, model):
                backward(each, step)
            for ours, theirs in zip(model.module.parameters(), truth.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def messages(directory: Path) -> None:
    used = fabric()
    rank, size = used.global_rank, used.world_size
    used.barrier()
    assert used.broadcast({"from": rank}, src=size - 1) == {"from": size - 1}
    assert used.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item() == sum(range(size))
    assert used.all_reduce(torch.tensor(float(rank))).item() == sum(range(size)) / size
    alone = [dist.new_group([one]) for one in range(size)][rank]
    for operation in ("sum", "mean"):
        assert used.strategy.all_reduce(torch.tensor(float(rank)), alone, operation).item() == rank
    assert used.strategy.all_reduce("text", alone) == "text"
    assert used.all_gather(torch.tensor(rank)).tolist() == list(range(size))
    sampler = used.setup_dataloaders(torch.utils.data.DataLoader(range(12), batch_size=2)).sampler
    assert (sampler.num_replicas, sampler.rank) == (size, rank)


def twice(directory: Path) -> None:
    used, original = fabric(), make_net()
    model = used.setup_module(original)
    before = whole(model)
    with pytest.warns(UserWarning, match="Net was set up already"):
        again = used.setup_module(original)
    assert_whole(again, before)
    with pytest.raises(ValueError, match="only once"):
        used.setup_module(model)
    optimizer = used.setup_optimizers(adam(again))
    truth = make_net()
    torch.testing.assert_close(train(used, again, optimizer), train_plain(truth, adam(truth)))


def refusals(directory: Path) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    from shardwise import fully_shard
    from shardwise.fabric import strategy_for

    used, model = fabric(), make_net()
    torch_fully_shard(model.head)
    with pytest.raises(TypeError, match=r"'head'.*torch's own"):
        used.setup(model)
    for wrong in (nn.Linear(3 + dist.get_rank(), 2), nn.ParameterDict({"one": torch.tensor(1.0)})):
        model = nn.Sequential(nn.Linear(4, 4), wrong)
        with pytest.raises(ValueError, match=r"'1\.(weight|one)'"):
            by_block(min_num_params=1).setup(model)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    frozen = make_net()
    frozen.head.weight.requires_grad_(dist.get_rank() != 0)
    with pytest.raises(ValueError, match=r"'head.weight' .* requires_grad=False on rank 0"):
        by_block().setup(frozen)
    container = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(ValueError, match=r"ModuleList has no forward.*set up a module"):
        by_block(min_num_params=1).setup(container)
    assert not any(isinstance(parameter, DTensor) for parameter in container.parameters())
    by_hand = make_net()
    fully_shard(by_hand.head)
    with pytest.warns(UserWarning, match="Net has modules that were wrapped by hand"):
        by_block().setup(by_hand)
    with pytest.raises(ValueError, match="state_dict_type"):
        fabric(state_dict_type="whole")
    with pytest.raises(TypeError, match="param_init_fn"):
        fabric(param_init_fn="ones")
    with pytest.raises(TypeError, match=r"precision must be .*Precision, not 'bf16-mixed': .* Fabric\(precision=...\)"):
        strategy_for(NAMESPACE)(precision="bf16-mixed")
    plugins, fabric_of = (importlib.import_module(f"{NAMESPACE}{part}") for part in (".plugins", ""))
    for refused in (
        lambda plugin: strategy_for(NAMESPACE)(checkpoint_io=plugin),
        lambda plugin: fabric_of.Fabric(accelerator="cpu", strategy=strategy_for(NAMESPACE)(), plugins=plugin),
    ):
        with pytest.raises(NotImplementedError, match=r"checkpoint_io=.*TorchCheckpointIO"):
            refused(plugins.TorchCheckpointIO())
    directory_ = directory / "occupied"
    directory_.mkdir(exist_ok=True)
    with pytest.raises(IsADirectoryError):
        used.save(directory_, {"model": used.setup(make_net())})
    model = used.setup(make_net())
    path = directory / "refusals"
    used.save(path, {"model": model})
    for use, state in ((used.save, [model]), (used.save, None), (used.load, [model]), (used.load, "model")):
        with pytest.raises(TypeError, match="state should be a dict of objects by name"):
            use(path, state)
    with pytest.raises(TypeError, match="storage_options"):
        used.strategy.save_checkpoint(directory / "x", {}, storage_options={})
    number = directory / f"number_{dist.get_rank()}"
    torch.save(5, number)
    assert used.load(number) == 5
    with pytest.raises(ValueError, match=r"number_0 has an object of type int instead of a dict"):
        used.load(number, {"model": model})
    with pytest.raises(ValueError, match="not a state dict of AdamW: it has 5 instead"):
        used.load_raw(number, adam(model))
    with pytest.raises(TypeError, match="has the name 1"):
        by_block(state_dict_type="sharded").save(path, {1: model})


def precisions(directory: Path) -> None:
    from shardwise.grad_scaler import ShardedGradScaler

    used = by_block(precision="bf16-true")
    torch.manual_seed(0)
    with used.init_module(empty_init=True):
        model = Net()
    model = used.setup(model)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    expected = Net()
    torch.set_default_dtype(torch.float32)
    assert_whole(model, whole(expected))
    used = by_block(precision="bf16-mixed")
    model = make_net()
    model, optimizer = used.setup(model, adam(model))
    assert all(loss < 10 for loss in train(used, model, optimizer))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    plugin = importlib.import_module(f"{NAMESPACE}.plugins").MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
    )
    used = importlib.import_module(NAMESPACE).Fabric(
        accelerator="cpu", strategy="shardwise", devices=dist.get_world_size(), plugins=plugin
    )
    used.launch()
    assert isinstance(plugin.scaler, ShardedGradScaler)
    assert (plugin.scaler.get_scale(), plugin.scaler.get_growth_interval()) == (256.0, 7)
    model = make_net()
    model, optimizer = used.setup(model, adam(model))
    train(used, model, optimizer, range(2), max_norm=1.0)
    before = whole(model)
    inputs, targets = data(0, used.global_rank)
    used.backward(F.mse_loss(model(inputs), targets) * (float("inf") if used.global_rank else 1.0))
    optimizer.step()
    assert_whole(model, before)
    optimizer.zero_grad()
    used.backward(F.mse_loss(model(inputs), targets))
    expected = [parameter.grad / plugin.scaler.get_scale() for parameter in model.parameters()]
    used.clip_gradients(model, optimizer, clip_val=1.0)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), gradient.to_local().clamp(-1.0, 1.0))


def other_world_size(directory: Path) -> None:
    """What two ranks saved, others go on with; the weights are the same ones, bit for bit."""
    plain = torch.load(saved_path(directory.parent / "fabric"), weights_only=False)
    alone = make_net()
    optimizer = adam(alone)
    alone.load_state_dict(plain["model"])
    optimizer.load_state_dict(plain["optimizer"])
    losses = train_plain(alone, optimizer, range(3, 6))
    for kind in ("full", "sharded"):
        used = by_block(state_dict_type=kind)
        model = make_net()
        model, ours = used.setup(model, adam(model))
        used.load(saved_path(directory.parent / "fabric", kind), {"model": model, "optimizer": ours})
        found = whole(model)
        assert all(torch.equal(found[name], value) for name, value in plain["model"].items())
        torch.testing.assert_close(train(used, model, ours, range(3, 6)), losses)


def lightning_module(directory: Path) -> None:
    """A LightningModule in Fabric: its steps see whole parameters, by the Trainer's names."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    used, module = by_block(), Module()
    model, optimizer = used.setup(module, module.configure_optimizers())
    model.mark_forward_method(module.training_step)  # as programs do for any strategy
    losses = []
    for step in range(STEPS):
        loss = model.training_step(data(step, used.global_rank))
        used.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(used.all_reduce(loss.detach().clone()))
    truth = make_net()
    torch.testing.assert_close(losses, train_plain(truth, adam(truth)))


def given_class(directory: Path) -> None:
    """The public class serves Fabric of both names."""
    from shardwise.fabric import FullyShardedStrategy

    strategy = FullyShardedStrategy(auto_wrap_policy={Block})
    used = importlib.import_module(NAMESPACE).Fabric(accelerator="cpu", strategy=strategy, devices=2)
    used.launch()
    assert isinstance(strategy, importlib.import_module(f"{NAMESPACE}.strategies").ParallelStrategy)
    model = make_net()
    model, optimizer = used.setup(model, adam(model))
    truth = make_net()
    torch.testing.assert_close(train(used, model, optimizer), train_plain(truth, adam(truth)))

    class Derived(FullyShardedStrategy):
        pass

    derived = Derived()
    if derived.namespace.fabric != NAMESPACE:
        with pytest.raises(TypeError, match=r"strategy_for\('lightning_fabric'\)"):
            importlib.import_module(NAMESPACE).Fabric(accelerator="cpu", strategy=derived, devices=2)


def whole_state_dicts(directory: Path) -> None:
    used, source = by_block(), make_net(6)
    model = used.setup(make_net())
    model.load_state_dict(source.state_dict())
    found = whole(model)
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())


def optimizers_go_back(directory: Path) -> None:
    """An optimizer takes again what its `state_dict` gave, on every rank."""
    used, truth = by_block(), make_net()
    model, optimizer = used.setup(*(lambda net: (net, adam(net)))(make_net()))
    expected = adam(truth)
    train(used, model, optimizer)
    train_plain(truth, expected)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert kept[1].keys() == {"state", "param_groups"}
    train(used, model, optimizer)
    train_plain(truth, expected)
    there = whole(truth)
    assert_whole(model, there, bitwise=False)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(used, model, optimizer)
    assert_whole(model, there, bitwise=False)


def gone_at_once(directory: Path) -> None:
    """Without the model and the strategy, its memory is free without a collection of cycles."""
    import weakref

    used = by_block()
    model = used.setup(make_net())
    held = weakref.ref(model.module.blocks[0].linear.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert held() is None
    finally:
        gc.enable()
    assert copy.copy(used) is not None


def policies(directory: Path) -> None:
    """Containers, which have no forward, are passed over; a policy that fails, on one rank, changes nothing."""
    from torch.distributed.fsdp.wrap import always_wrap_policy

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    tokens = torch.tensor([[1, 2], [3, 4]])
    truth = Listed()
    truth(tokens).square().mean().backward()
    for policy in (always_wrap_policy, lambda module: True, {nn.Linear, nn.Embedding}):
        used = fabric(auto_wrap_policy=policy)
        model = used.setup(Listed())
        used.backward(model(tokens).square().mean())
        for ours, theirs in zip(model.module.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    def failing(module: nn.Module) -> bool:
        if isinstance(module, nn.Linear) and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("of one rank")
        return isinstance(module, nn.Embedding)

    def differing(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear if dist.get_rank() else nn.Embedding)

    for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
        model = Listed()
        with pytest.raises(ValueError, match=rf"{name} chooses .* on rank \d, and not on rank \d"):
            fabric(**{name: differing}).setup(model)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    settings = {"reshard_after_forward": False, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for name, value in settings.items():
        given = {name: value} if dist.get_rank() else {}
        with pytest.raises(ValueError, match=rf"{name} is .* on rank \d, and .* on rank \d"):
            fabric(**given).setup(Listed())
    model = Listed()
    with pytest.raises(KeyError, match="of one rank"):
        fabric(auto_wrap_policy=failing).setup(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ValueError, match="ModuleList"):
        fabric(auto_wrap_policy={nn.ModuleList})


def several_models(directory: Path) -> None:
    """Two models with an optimizer each, and one optimizer for both; saved and loaded together, full and sharded."""
    used = by_block()
    models = [used.setup(make_net(seed)) for seed in (1, 2)]
    truths = [make_net(seed) for seed in (1, 2)]

    def made(nets: Any) -> list[torch.optim.Optimizer]:
        first, second = nets
        return [adam(first), torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)]

    optimizers, theirs = list(used.setup_optimizers(*made(models))), made(truths)
    for step in range(3):
        for index in range(2):
            inputs, targets = data(step, used.global_rank)
            used.backward(F.mse_loss(models[0](inputs) + models[1](inputs), targets))
            optimizers[index].step()
            parts = [data(step, rank) for rank in range(used.world_size)]
            inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            F.mse_loss(truths[0](inputs) + truths[1](inputs), targets).backward()
            theirs[index].step()
            for optimizer in (optimizers[1], theirs[1]):
                optimizer.zero_grad()
    for model, truth in zip(models, truths, strict=True):
        assert_whole(model, whole(truth), bitwise=False)
    for kind in ("full", "sharded"):
        saver, path = by_block(state_dict_type=kind), directory / f"several_{kind}"
        names = ("a", "b", "of_a", "of_both")
        saver.save(path, {**dict(zip(names, (*models, *optimizers), strict=True)), "step": 3})
        again = [saver.setup(make_net(seed)) for seed in (8, 9)]
        state: dict[str, Any] = dict(zip(names, (*again, *saver.setup_optimizers(*made(again))), strict=True))
        state["step"] = 0
        assert saver.load(path, state) == {}
        assert state["step"] == 3
        for model, loaded in zip(models, again, strict=True):
            found, wanted = whole(loaded), whole(model)
            assert all(torch.equal(found[name], value) for name, value in wanted.items() if "noise" not in name)
        momenta = [o.state[p]["momentum_buffer"] for o, m in ((state["of_both"], again[1]),) for p in m.parameters()]
        wanted_momenta = [optimizers[1].state[p]["momentum_buffer"] for p in models[1].parameters()]
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(momenta, wanted_momenta, strict=True))
        # In another order: parameters of two models with one optimizer are known by the models' names in the state.
        swapped = [saver.setup(make_net(seed)) for seed in (8, 9)]
        optimizer = saver.setup_optimizers(made(swapped)[1])
        saver.load(path, {"b": swapped[1], "of_both": optimizer, "a": swapped[0]})
        momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in swapped[1].parameters()]
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(momenta, wanted_momenta, strict=True))
        with pytest.raises(ValueError, match=r"'a'|missing"):  # a part of what has the name is not the model
            saver.load(path, {"a": saver.setup(nn.Linear(7, 13))})


def life(directory: Path) -> None:
    """What programs do beside training: launching functions, compiled models, schedules, methods of their own."""
    import shardwise.fabric  # noqa: F401

    module = importlib.import_module(NAMESPACE)
    size = dist.get_world_size()

    def fabric_of(kind: Any) -> Any:
        return kind(accelerator="cpu", devices=size, strategy="shardwise")

    assert fabric_of(module.Fabric).launch(lambda used, number: used.global_rank + number, 5) == dist.get_rank() + 5
    with pytest.raises(RuntimeError, match="launch"):
        fabric_of(module.Fabric).setup(make_net())
    truth = make_net()
    losses = train_plain(truth, adam(truth))

    class Running(module.Fabric):
        def run(self) -> list[Any]:
            net = make_net()
            return train(self, *self.setup(net, adam(net)))

    torch.testing.assert_close(fabric_of(Running).run(), losses)
    used = by_block()
    for local in (False, True):
        with used.rank_zero_first(local), used.init_tensor():
            assert not torch.zeros(3).is_meta
    assert used.is_global_zero == (used.global_rank == 0)
    net = torch.compile(make_net(), backend="eager")
    compiled, optimizer = used.setup(net, adam(net))
    torch.testing.assert_close(train(used, compiled, optimizer), losses)
    used.save(directory / "compiled.ckpt", {"model": compiled, "optimizer": optimizer})
    assert list(torch.load(directory / "compiled.ckpt")["model"]) == list(truth.state_dict())
    net, truth = make_net(), make_net()
    schedules = [torch.optim.lr_scheduler.StepLR(torch.optim.SGD(m.parameters(), 0.3), 1, 0.5) for m in (net, truth)]
    model, optimizer, schedule = used.setup(net, schedules[0].optimizer, scheduler=schedules[0])
    for step in range(3):
        ours = train(used, model, optimizer, range(step, step + 1))
        torch.testing.assert_close(ours, train_plain(truth, schedules[1].optimizer, range(step, step + 1)))
        schedule.step()
        schedules[1].step()
    searching = torch.optim.LBFGS((net := make_net()).parameters())
    net, searching = used.setup(net, searching)
    assert searching.optimizer._params[0] is next(iter(net.parameters()))  # it keeps the list itself
    with pytest.raises(TypeError, match="set up"):
        used.no_backward_sync(make_net())
    net = make_net()
    for given in ([adam(net)], None):  # Lightning raises TypeError too, after it has set up the model
        with pytest.raises(TypeError, match="takes a model and then its optimizers"):
            used.setup(net, given)
    assert not any(isinstance(parameter, DTensor) for parameter in net.parameters())


def smaller_groups(directory: Path) -> None:
    """A process group smaller than the world: sharded over it, and copies of all groups stay one model."""
    size = max(1, dist.get_world_size() // 2)
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, 2 * size, size)]
    own = groups[dist.get_rank() // size]
    used, truth = by_block(process_group=own), make_net()
    losses = train_plain(truth, adam(truth))
    torch.manual_seed(0)
    with used.init_module(empty_init=True):
        model = Net()
    model, optimizer = used.setup(model, adam(model))
    assert_whole(model, whole(make_net()))
    assert next(model.parameters()).device_mesh.shape == (2, size)
    torch.testing.assert_close(train(used, model, optimizer), losses)
    for kind in ("full", "sharded"):
        saver, path = by_block(process_group=own, state_dict_type=kind), directory / f"by_groups_{kind}"
        saver.save(path, {"model": model, "optimizer": optimizer})
        with saver.init_module(empty_init=True):
            again = Net()
        saver.load(path, {"model": again})
        again, loaded = saver.setup(again, adam(again))
        saver.load(path, {"model": again, "optimizer": loaded})
        found, wanted = whole(again), whole(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items() if "noise" not in name)


CASES = (
    train_like_one_process,
    meta_init,
    nothing_initializes,
    meta_optimizer,
    memory,
    checkpoints,
    raw_files,
    only_own_rows,
    filters,
    filters_one_of_several,
    overlapping_names,
    ranks_that_differ,
    postponed_loads,
    other_objects,
    links,
    working_directory,
    failing_disks,
    hosts_with_files_of_their_own,
    clipping,
    accumulation,
    zeroed_accumulation,
    messages,
    twice,
    refusals,
    precisions,
    lightning_module,
    given_class,
    whole_state_dicts,
    optimizers_go_back,
    gone_at_once,
    policies,
    several_models,
    life,
    smaller_groups,
)
AT_OTHER_SIZES = (train_like_one_process, meta_init, clipping, messages)
OTHER_NAME = (train_like_one_process, checkpoints, given_class)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_fabric(world_size: int, case: str) -> None:
    check_in_ranks(__file__, "fabric", case, world_size)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("case", [case.__name__ for case in OTHER_NAME])
def test_lightning_fabric(world_size: int, case: str) -> None:
    """By the name that `pytorch_lightning` has."""
    check_in_ranks(__file__, "other_fabric", case, world_size, namespace="lightning_fabric")


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("case", [case.__name__ for case in AT_OTHER_SIZES])
def test_fabric_at_other_sizes(world_size: int, case: str) -> None:
    check_in_ranks(__file__, f"fabric_{world_size}", case, world_size)


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("case", [case.__name__ for case in (smaller_groups, other_world_size)])
def test_fabric_of_four(world_size: int, case: str) -> None:
    check_in_ranks(__file__, "fabric_4", case, world_size, after=("fabric", "checkpoints", 2))

"""More of what a config can ask of a Runner, with sharded models against MMEngine's own data parallelism."""

from __future__ import annotations

import copy
import functools
import os
import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mmengine.optim.optimizer.amp_optimizer_wrapper as amp_module
import mmengine.optim.optimizer.apex_optimizer_wrapper as apex_module
import mmengine.runner.runner as runner_module
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmengine.config import ConfigDict
from mmengine.hooks import CheckpointHook, EMAHook, Hook, RuntimeInfoHook
from mmengine.hooks.test_time_aug_hook import PrepareTTAHook
from mmengine.model import BaseModel, BaseTTAModel, ExponentialMovingAverage
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS, MODELS
from mmengine.runner import FlexibleRunner, Runner
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from bench.contenders import IS_NEWER
from shardwise import clip_grad_norm_
from shardwise.core.errors import StateError
from shardwise.core.root import unit_of
from shardwise.grad_scaler import ShardedGradScaler
from shardwise.mmengine import MMFullyShardedDataParallel
from shardwise.mmengine.whole import whole_parameters
from shardwise.optim import FlatOptimizer
from tests.adapters.mmengine_runs import (
    LINEAR,
    WRAPPERS,
    Data,
    Error,
    Toy,
    check_same,
    check_same_file,
    flexible,
    full,
    loader,
    outcome,
    replicated,
    settings,
    sharded,
    train,
    worlds_of,
)

BATCH = {"inputs": torch.arange(28.0).reshape(4, 7) / 10, "target": torch.ones(4, 3)}


def check_like(found: Any, wanted: Any) -> None:
    """Two outcomes."""
    for kind, values in wanted.items():
        torch.testing.assert_close(torch.tensor(found[kind]), torch.tensor(values), msg=lambda m, k=kind: f"{k}: {m}")


def run(make: Any, work: Path, name: str = "plain", **changes: Any) -> Any:
    """The outcome of a run from scratch, in the same state on all ranks."""
    torch.manual_seed(8)
    changes = {key: value() if isinstance(value, type) else copy.deepcopy(value) for key, value in changes.items()}
    runner = make(name, work, **changes)
    result = outcome(runner, train(runner))
    dist.barrier()
    return result


# -- What MMEngine does to a model


class Special(nn.Linear):
    """A layer of a class of its own."""


class Initialized(Toy):
    """Chooses what to initialize by classes, from a file too, and calls itself."""

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.net[0] = Special(7, 13)
        self.net[3].weight.requires_grad_(False)
        self.file, self.seen = file, 0.0

    def init_weights(self) -> None:
        super().init_weights()
        assert type(self.net[0]) is Special
        if self.file:
            MODELS.build({"type": "Toy2", "file": self.file}).init_weights_of(self.net[3])
        self.seen = float(self(torch.ones(1, 7)).detach().sum())


class FromFile(BaseModel):
    """Initializes another module by MMEngine's ``Pretrained``."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def forward(self) -> None: ...

    def init_weights_of(self, module: nn.Module) -> None:
        from mmengine.model import PretrainedInit

        PretrainedInit(self.file)(module)


def initializes_by_class(directory: Path) -> None:
    """``init_cfg`` names classes of layers, and their direct bases: those from before sharding."""
    MODELS.register_module(name="Toy2", module=FromFile, force=True)
    file = str(directory / f"pretrained{dist.get_rank()}.pth")
    torch.manual_seed(3)
    torch.save(nn.Linear(5, 3).state_dict(), file)
    for make in (sharded, flexible):
        torch.manual_seed(1)
        plain = Initialized(file)
        model = copy.deepcopy(plain)
        runner = make("clipped", directory / f"by_class_{make.__name__}", model=model)
        torch.manual_seed(9)
        plain.init_weights()
        torch.manual_seed(9)
        if make is sharded:
            runner._init_model_weights()
        else:
            runner.strategy.prepare(runner.model)
        found = full(model)
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name
        assert model.seen == plain.seen
        wrapped = runner.model if make is sharded else runner.strategy.model
        with torch.no_grad():
            assert torch.equal(wrapped(torch.ones(2, 7)), plain(torch.ones(2, 7)))  # hooks and classes are back
        assert unit_of(model.net[0]) is not None


class Restructured(Toy):
    """Does to itself what ``change`` does, when it is initialized."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def init_weights(self) -> None:
        super().init_weights()
        self.change(self)


class Filtered(Toy):
    """Saves less than it has, and more, by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_state_dict_post_hook(lambda module, state, prefix, _: state.update(made=torch.ones(2)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["renamed"] = state.pop("net.2.weight")
        return {name: value for name, value in state.items() if not name.startswith("net.3")}


def initializes_what_is_not_saved(directory: Path) -> None:
    torch.manual_seed(1)
    plain = Filtered()
    wrapper = MMFullyShardedDataParallel(copy.deepcopy(plain), auto_wrap_policy=LINEAR)
    with torch.no_grad():
        wrapper(torch.ones(1, 7))
    for model in (plain, wrapper.module):
        torch.manual_seed(9 + (dist.get_rank() if model is not plain else 0))  # the first rank's count
        model.init_weights()
    for name, parameter in wrapper.module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), name


def freezes_when_initialized(directory: Path) -> None:
    """As in a teacher whose weights are copied there; the first rank's choice counts. Modules may be copied."""

    def freeze(model: Any) -> None:
        frozen = model.net[0] if dist.get_rank() == 0 else model.net[3]
        frozen.requires_grad_(False)
        drawn = weakref.ref(frozen.weight)
        frozen.weight = nn.Parameter(torch.full_like(frozen.weight, 0.25), requires_grad=False)
        assert drawn() is None, "a whole parameter that was replaced stays"
        model.net[2].load_state_dict(copy.deepcopy(model.net[2]).state_dict())

    wrapper = MMFullyShardedDataParallel(Restructured(freeze), auto_wrap_policy=LINEAR)
    wrapper.module.init_weights()
    wrapper(**BATCH, mode="loss")["loss"].backward()
    trained = {"net.2.weight", "net.3.weight", "net.3.bias"}
    assert {name for name, p in wrapper.module.named_parameters() if p.requires_grad} == trained
    assert {name for name, p in wrapper.module.named_parameters() if p.grad is not None} == trained
    assert bool((full(wrapper.module)["net.0.weight"] == 0.25).all())


def keeps_its_structure_when_initialized(directory: Path) -> None:
    """What is registered or tied after sharding would be trained by each rank for itself, or not tied."""

    def tie(model: Any) -> None:
        model.net[3].bias = model.scale_too

    def replace(model: Any) -> None:
        if dist.get_rank() == 1:
            model.net[3] = nn.Linear(5, 3)

    for change, names in ((tie, "'net.3.bias'"), (replace, "'net.3.bias', 'net.3.weight'")):
        model = Restructured(change)
        model.scale_too = nn.Parameter(torch.ones(3))
        wrapper = MMFullyShardedDataParallel(model, auto_wrap_policy=LINEAR)
        with pytest.raises(StateError, match=f"tied or replaced .*{names}"):
            wrapper.module.init_weights()


def initializes_after_a_failure(directory: Path) -> None:
    """MMEngine keeps notes about the parameters of an attempt that failed."""
    wrapper = MMFullyShardedDataParallel(Toy(), auto_wrap_policy=LINEAR)
    model = wrapper.module
    model.init_cfg = {"type": "Pretrained", "checkpoint": str(directory / "later.pth")}
    with pytest.raises(FileNotFoundError, match=r"later\.pth"):
        model.init_weights()
    assert not any(hasattr(module, "_params_init_info") for module in model.modules())
    given = {name: torch.full_like(value, 0.5) for name, value in Toy().state_dict().items()}
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(given, directory / "later.pth")
    dist.barrier()
    model.init_weights()
    assert all(torch.equal(value, given[name]) for name, value in full(model).items())


class Unordered(BaseModel):
    """Whose parts ranks have in opposite orders."""

    def __init__(self) -> None:
        super().__init__()
        names = sorted("abc", reverse=dist.get_rank() % 2 == 1)
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.init_weights()

    def forward(self, *_: Any, **__: Any) -> None: ...

    def init_weights(self, first: int = 0) -> None:
        for number, name in enumerate("abc", first):
            for parameter in self.parts[name].parameters():
                nn.init.constant_(parameter, number)


def initializes_parts_that_ranks_have_in_another_order(directory: Path) -> None:
    model = MMFullyShardedDataParallel(Unordered(), auto_wrap_policy=LINEAR).module
    with whole_parameters(model):
        for number, name in enumerate("abc"):
            assert all(bool((parameter == number).all()) for parameter in model.parts[name].parameters())
    for first in (0, 5):
        for number, name in enumerate("abc", first):
            assert all(bool((one.full_tensor() == number).all()) for one in model.parts[name].parameters())
        model.init_weights(5)


class Outer(BaseModel):
    """Has a sharded model as a part, which it initializes with itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self) -> None: ...


def initializes_as_a_part(directory: Path) -> None:
    """MMEngine's notes about the whole model do not know the part's whole parameters, and are there afterwards."""
    part = Toy()
    part.init_cfg = {"type": "Constant", "layer": "Linear", "val": 0.5}
    outer = Outer(MMFullyShardedDataParallel(part, auto_wrap_policy=LINEAR))
    outer.init_weights()
    assert bool((full(part)["net.0.weight"] == 0.5).all())
    assert not any(hasattr(module, "_params_init_info") for module in outer.modules())


def compiles(directory: Path) -> None:
    """``cfg.compile`` compiles what the model computes."""
    linears = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal linears
        linears += sum("linear" in str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(counting, name="counting")
    settings_of_compiler = {"backend": "counting"}
    # One unit: torch compiles no module of its own that is called by itself.
    cfg = {"model_wrapper_cfg": WRAPPERS["iterations"], "compile": settings_of_compiler}
    expected = run(sharded, directory / "not_compiled", "iterations")
    for make in (functools.partial(_configured, cfg), functools.partial(flexible, compile=settings_of_compiler)):
        assert linears == 0
        check_like(run(make, directory / f"compiled_{make.func.__name__}", "iterations"), expected)
        assert linears >= 3
        linears = 0
        torch._dynamo.reset()


class Frozen(Toy):
    """A unit without gradients, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.unused.requires_grad_(False)


def frozen_units(directory: Path) -> None:
    expected = run(replicated, directory / "frozen_ddp", "averaged", model=Frozen)
    for number, wrapper in enumerate((LINEAR, None)):
        cfg = {"model_wrapper_cfg": {"type": "MMFullyShardedDataParallel", "auto_wrap_policy": wrapper}}
        make = functools.partial(_configured, cfg)
        work = directory / f"frozen_{number}"
        check_like(run(make, work, "averaged", model=Frozen), expected)
        check_same_file(work / "epoch_2.pth", directory / "frozen_ddp" / "epoch_2.pth")


def _configured(cfg: Any, name: str, work: Path, **changes: Any) -> Any:
    return Runner(**settings(name, work, launcher="pytorch", cfg=copy.deepcopy(cfg), **changes))


class Tested(BaseTTAModel):
    """The mean of the predictions for each."""

    def merge_preds(self, data_samples_list: Any) -> Any:
        return [sum(values) / len(values) for values in data_samples_list]


class Augmented(Dataset):
    """Each item twice, once turned."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        x = torch.arange(7.0) * index
        return {"inputs": [x, -x], "target": [torch.ones(3)] * 2}


def augments_tests(directory: Path) -> None:
    """`PrepareTTAHook`, MMEngine's way of test time augmentation with FSDP."""
    MODELS.register_module(module=Tested, force=True)
    torch.manual_seed(3)
    model = Toy()
    data = {"test_dataloader": {**loader(8, 1), "dataset": Augmented(), "batch_size": 2}}
    expected = replicated("plain", directory / "tta_ddp", model=Tested(copy.deepcopy(model)), **data).test()
    runner = sharded("clipped", directory / "tta", model=model, **data)
    runner.register_hook(PrepareTTAHook({"type": "Tested"}))
    assert runner.test() == pytest.approx(expected)


class Taught(Toy):
    """Follows an average of itself, which a hook or its forward updates."""

    averages_buffers = False

    def __init__(self) -> None:
        super().__init__()
        self.teacher = ExponentialMovingAverage(self.net, momentum=0.3, update_buffers=self.averages_buffers)
        self.updates_inside = False

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        if self.updates_inside:
            self.teacher.update_parameters(self.net)
        with torch.no_grad():
            taught = self.teacher(inputs)
        return super().forward(inputs, taught if mode == "loss" else target, mode)


class TaughtBuffers(Taught):
    """The same with an average that keeps tensors of a state dict, which are no parameters."""

    averages_buffers = True


class Teaching(Hook):
    """Updates the average, as in semi-supervised training."""

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        model = runner.model.module
        model.teacher.update_parameters(model.net)


def averages_inside_the_model(directory: Path) -> None:
    """MMEngine's average keeps the parameters that it was made of."""
    for model in (Taught, TaughtBuffers):
        truth_ = directory / f"{model.__name__}_ddp"
        expected = run(replicated, truth_, model=model, custom_hooks=[Teaching()])
        assert len({*expected["losses"]}) == 6
        for name in ("plain", "clipped"):
            cfg = {"model_wrapper_cfg": WRAPPERS.get(name, {"type": "MMFullyShardedDataParallel"})}
            work = directory / f"{model.__name__}_{name}"
            check_like(run(functools.partial(_configured, cfg), work, model=model, custom_hooks=[Teaching()]), expected)
            check_same_file(work / "epoch_2.pth", truth_ / "epoch_2.pth")
        wrapper = MMFullyShardedDataParallel(model())
        wrapper.module.updates_inside = True
        with pytest.raises(StateError, match=r"parameter 'teacher.module.0.weight'"):
            wrapper(**BATCH, mode="loss")


# -- Optimizers


def like_amp(directory: Path) -> None:
    """`AmpOptimWrapper` of MMEngine's data parallelism, in bfloat16."""
    amp_module.is_cuda_available = lambda: True  # in this process of a test only
    for number, extra in enumerate(({"clip_grad": {"max_norm": 0.5}}, {"accumulative_counts": 2, "loss_scale": 64.0})):
        optim = {"type": "AmpOptimWrapper", "dtype": "bfloat16", "optimizer": {"type": "SGD", "lr": 0.05}, **extra}
        expected = run(replicated, directory / f"amp_ddp_{number}", optim_wrapper=optim)
        assert len(expected["norms"]) == (6 if "clip_grad" in extra else 0)
        check_like(run(sharded, directory / f"amp_{number}", "plain", optim_wrapper=optim), expected)
    wrapper = MMFullyShardedDataParallel(Toy(), auto_wrap_policy=LINEAR)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    wrapper.train_step(BATCH, OptimWrapper(optimizer))
    scaled = AmpOptimWrapper(optimizer=optimizer, dtype="bfloat16", clip_grad={"max_norm": 0.5})
    wrapper.train_step(BATCH, scaled)
    assert isinstance(scaled.loss_scaler, ShardedGradScaler)  # whatever the optimizer was in before
    assert scaled.clip_func is clip_grad_norm_


def refuses_apex(directory: Path) -> None:
    wrapper = MMFullyShardedDataParallel(Toy())
    before = apex_module.apex_amp
    apex_module.apex_amp = object()  # as if it were installed
    try:
        optim_wrapper = ApexOptimWrapper(optimizer=torch.optim.SGD(wrapper.parameters(), lr=0.1))
    finally:
        apex_module.apex_amp = before
    with pytest.raises(TypeError, match=r"ApexOptimWrapper .*: use AmpOptimWrapper"):
        wrapper.train_step(BATCH, optim_wrapper)


def refuses_optimizers_that_shard(directory: Path) -> None:
    """MMEngine's, which assigns whole parameters to ranks."""
    optimizer = {"type": "ZeroRedundancyOptimizer", "optimizer_type": "SGD", "lr": 0.1}
    for make in (sharded, flexible):
        runner = make("plain", directory / f"zero_{make.__name__}", optim_wrapper={"optimizer": optimizer})
        with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer .* optimizer_type as optimizer=dict\(type=..."):
            runner.train()


class Own(MMFullyShardedDataParallel):
    """A step with two optimizers."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        loss = self(**self.module.data_preprocessor(data, True), mode="loss")["loss"]
        loss.backward()
        for name in ("a", "b"):
            optim_wrapper[name].step()
        optim_wrapper.zero_grad()
        return {"loss": loss}


def _two(runner: Any) -> Any:
    net = runner.model.module.net
    runner.optim_wrapper = OptimWrapperDict(
        a=OptimWrapper(torch.optim.AdamW(net[0].parameters(), lr=0.1)),
        b=OptimWrapper(torch.optim.SGD(net[3].parameters(), lr=0.1, momentum=0.9)),
    )
    return runner


def several_optimizers(directory: Path) -> None:
    """A user's wrapper may have several, which are saved and resumed; our own step takes one, as MMEngine's does."""
    MODEL_WRAPPERS.register_module(module=Own, force=True)
    cfg = {"model_wrapper_cfg": {"type": "Own", "auto_wrap_policy": LINEAR}}
    torch.manual_seed(8)
    first = train(_two(_configured(cfg, "plain", directory / "several")))
    dist.barrier()
    saved = torch.load(directory / "several" / "epoch_1.pth")
    assert saved["optimizer"].keys() == {"a", "b"}
    states = [state for part in saved["optimizer"].values() for state in part["state"].values()]
    assert len(states) == 4
    assert not any(isinstance(value, DTensor) for state in states for value in state.values())
    file = str(directory / "several" / "epoch_1.pth")
    again = train(_two(_configured(cfg, "plain", directory / "several_2", resume=True, load_from=file)))
    assert again.losses == pytest.approx(first.losses[3:], rel=1e-6)
    with pytest.raises(NotImplementedError, match=r"\(a, b\) has an `optim_context` .*model_wrapper_cfg"):
        train(_two(sharded("plain", directory / "several_3")))


def optimizer_from_before(directory: Path) -> None:
    """An `OptimWrapper` over the model's parameters, made before the Runner wraps it."""
    results = []
    for make in (replicated, sharded):
        torch.manual_seed(8)
        model = Toy()
        optim_wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=0.05), clip_grad={"max_norm": 0.5})
        work = directory / f"before_{make.__name__}"
        runner = make("plain", work, model=model, optim_wrapper=optim_wrapper)
        results.append(outcome(runner, train(runner)))
    check_like(results[1], results[0])


def flat_optimizer(directory: Path) -> None:
    """By its name in a config; what it saves, the plain one resumes."""
    rates = {"paramwise_cfg": {"bias_decay_mult": 0.0}, "clip_grad": {"max_norm": 0.5}}
    settings = {"lr": 0.05, "weight_decay": 0.1}
    plain = {"optimizer": {"type": "AdamW", **settings}, **rates}
    flattened = {"optimizer": {"type": "FlatAdamW", **settings}, **rates}
    wanted = run(replicated, directory / "flat_ddp", optim_wrapper=plain)
    for make in (sharded, flexible):
        work = directory / f"flat_{make.__name__}"
        runner = make("plain", work, optim_wrapper=copy.deepcopy(flattened))
        check_like(outcome(runner, train(runner)), wanted)
        assert isinstance(runner.optim_wrapper.optimizer, FlatOptimizer)
    dist.barrier()
    check_same_file(directory / "flat_sharded" / "epoch_2.pth", directory / "flat_ddp" / "epoch_2.pth")
    first = str(directory / "flat_sharded" / "epoch_1.pth")
    resumed = run(sharded, directory / "flat_resumed", optim_wrapper=plain, load_from=first, resume=True)
    torch.testing.assert_close(torch.tensor(resumed["losses"]), torch.tensor(wanted["losses"][3:]))


# -- Checkpoints


class Described(Data):
    """With all kinds of values that data are described by."""

    def __init__(self, size: int):
        super().__init__(size)
        self.metainfo = ConfigDict(classes=("a", "b"), nested={"p": [1, 2]}, palette=np.arange(3), ids={1, 2})


def resumes_all_that_is_saved(directory: Path) -> None:
    """By torch.load's default, with schedulers that keep functions and data that are described by MMEngine's types."""
    data = {**loader(24, 2), "dataset": Described(24)}
    schedulers: list[dict[str, Any]] = [
        {"type": "OneCycleLR", "eta_max": 0.1, "total_steps": 6, "by_epoch": False},
        {"type": "OneCycleLR", "eta_max": 0.1, "total_steps": 6, "by_epoch": False, "anneal_strategy": "linear"},
        {"type": "ReduceOnPlateauLR", "monitor": "val/error", "patience": 0},
    ]
    for number, scheduler in enumerate(schedulers):
        for make in (sharded, flexible) if number == 0 else (sharded,):
            work = directory / f"saved_{make.__name__}_{number}"
            changes = {"train_dataloader": data, "param_scheduler": scheduler}
            first = run(make, work, **changes)
            again = run(make, directory / f"{work.name}_2", **changes, resume=True, load_from=str(work / "epoch_1.pth"))
            assert again["losses"] == pytest.approx(first["losses"][3:], rel=1e-6)


def resumes_on_the_host(directory: Path) -> None:
    """Whole tensors are not for the device, where they may not fit; "meta" stands for it."""
    runner = sharded("clipped", directory / "on_host")
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
    before = runner_module.get_device
    runner_module.get_device = lambda: "meta"
    try:
        runner.resume(str(directory / "one_clipped" / "epoch_1.pth"))
    finally:
        runner_module.get_device = before
    check_same(full(runner.model.module), dict(torch.load(directory / "one_clipped" / "epoch_1.pth")["state_dict"]))
    assert runner.epoch == 1


class OtherError(Error):
    """Two metrics, of which the second never gets better."""

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {**super().compute_metrics(results), "other": 1.0}


def checkpoint_options(directory: Path) -> None:
    """The same files as without sharding, for all options of `CheckpointHook`."""
    by_iterations = {"type": "IterBasedTrainLoop", "max_iters": 5, "val_interval": 2}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"save_optimizer": False, "save_param_scheduler": False, "out_dir": "elsewhere"}, {}),
        (
            {"interval": 2, "by_epoch": False, "max_keep_ckpts": 2, "save_last": False},
            # As many as there are: MMEngine waits 2 s before it begins again.
            {"train_cfg": by_iterations, "train_dataloader": loader(40, 2)},
        ),
        (
            {"save_best": ["val/error", "val/other"], "rule": ["less", "greater"], "published_keys": ["state_dict"]},
            {"val_evaluator": [OtherError()]},
        ),
        ({"save_best": "auto", "rule": "less", "filename_tmpl": "at_{}.pth", "save_begin": 2}, {}),
        ({"interval": -1, "backend_args": {"backend": "local"}}, {}),
    ]
    for number, (options, changes) in enumerate(cases):
        made: dict[str, dict[str, Path]] = {}
        for make in (replicated, sharded, flexible) if number % 2 == 0 else (replicated, sharded):
            work = directory / f"options_{number}" / make.__name__
            hook = {"type": CheckpointHook, "interval": 1, **options}
            if "out_dir" in hook:
                hook["out_dir"] = str(directory / "elsewhere")
            run(make, work, default_hooks={"checkpoint": hook}, **changes)
            place = directory / "elsewhere" / make.__name__ if "out_dir" in hook else work
            files = place.glob("*.pth")
            made[make.__name__] = {re.sub(r"-[0-9a-f]{8}\.", "-hash.", file.name): file for file in files}
            assert Path((work / "last_checkpoint").read_text()).parent == place
        wanted = made.pop("replicated")
        assert wanted
        for files in made.values():
            assert files.keys() == wanted.keys()
            for name, file in files.items() if dist.get_rank() == 0 else ():
                a, b = torch.load(file), torch.load(wanted[name])
                assert a.keys() == b.keys()
                check_same(
                    {k: a.get(k) for k in ("state_dict", "optimizer")},
                    {k: b.get(k) for k in ("state_dict", "optimizer")},
                )
        dist.barrier()


def whole_without_names(directory: Path) -> None:
    """Hooks given by their classes, as newer configs do; nothing depends on a name in a registry."""
    hooks = {
        "default_hooks": {"runtime_info": {"type": RuntimeInfoHook}, "logger": None},
        "custom_hooks": [{"type": EMAHook, "begin_iter": 3, "momentum": 0.3}],
    }
    expected = run(replicated, directory / "named_ddp", **hooks)
    for make in (sharded, flexible):
        work = directory / f"named_{make.__name__}"
        check_like(run(make, work, **hooks), expected)
        if dist.get_rank() == 0:
            a, b = (torch.load(place / "epoch_2.pth") for place in (work, directory / "named_ddp"))
            check_same(a["state_dict"], b["state_dict"])
            check_same(a["ema_state_dict"], b["ema_state_dict"])
        dist.barrier()


def saves_before_it_runs(directory: Path) -> None:
    work = directory / "early"
    runner = sharded("clipped", work)
    with pytest.raises(TypeError, match="optim_wrapper should be an `OptimWrapper`"):
        runner.save_checkpoint(str(work), "earlier.pth")
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner._init_model_weights()
    runner.save_checkpoint(str(work), "early.pth", save_param_scheduler=False)
    dist.barrier()
    check_same(dict(torch.load(work / "early.pth")["state_dict"]), full(runner.model.module))


class Failing(Hook):
    """Fails on the main process only."""

    def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        raise ZeroDivisionError("no luck")


def hooks_that_fail(directory: Path) -> None:
    for make in (sharded, flexible):
        runner = make("plain", directory / f"failing_{make.__name__}", custom_hooks=[Failing()])
        with pytest.raises(ZeroDivisionError, match="no luck"):
            train(runner)
        assert isinstance(runner.model.module.state_dict()["net.0.weight"], DTensor)


class Unsaved(Toy):
    """Has no state on the second rank, once it was trained."""

    trained = False

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        self.trained = True
        return super().forward(inputs, target, mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.trained and dist.get_rank() == 1:
            raise ZeroDivisionError("no luck")
        return super().state_dict(*args, **kwargs)


def states_that_fail(directory: Path) -> None:
    """On one rank, before anything is gathered: the others would wait for it."""
    for make in (sharded, flexible):
        runner = make("plain", directory / f"unsaved_{make.__name__}", model=Unsaved())
        with pytest.raises(ZeroDivisionError, match="no luck"):
            train(runner)


class Counting(EMAHook):
    """Asks the runner how long it will run."""

    def before_run(self, runner: Any) -> None:
        assert runner.max_iters == 6
        super().before_run(runner)


def averages_that_ask_the_runner(directory: Path) -> None:
    """In a resuming `FlexibleRunner`, where their ``before_run`` is called early."""
    work = directory / "asking"
    expected = run(flexible, work, custom_hooks=[Counting(momentum=0.3)])
    resume = {"custom_hooks": [Counting(momentum=0.3)], "resume": str(work / "epoch_1.pth")}
    found = run(flexible, directory / "asking_2", **resume)
    assert found["losses"] == pytest.approx(expected["losses"][3:], rel=1e-6)


class Adding(Hook):
    """Saves averages that are not attributes of its own."""

    def before_run(self, runner: Any) -> None:
        self.averages = {"slow": ExponentialMovingAverage(runner.model.module)}

    def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        checkpoint["averages"] = {name: average.state_dict() for name, average in self.averages.items()}


def hooks_that_add_shards(directory: Path) -> None:
    """The file would have the parts of the first rank."""
    for make in (sharded, flexible):
        runner = make("plain", directory / f"adding_{make.__name__}", custom_hooks=[Adding()])
        with pytest.raises(StateError, match=r"checkpoint\['averages'\] has tensors of which"):
            train(runner)


class Parts(nn.Module):
    """A wrapper around a model of which a part is sharded."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module: Any = module
        self.module.net = MMFullyShardedDataParallel(self.module.net)


def sharded_parts(directory: Path) -> None:
    """`Runner` saves on one process, which has its shards only."""
    MODEL_WRAPPERS.register_module(module=Parts, force=True)
    runner = _configured({"model_wrapper_cfg": {"type": "Parts"}}, "plain", directory / "parts")
    refused = pytest.raises(StateError, match=r"checkpoint\['state_dict'\] has tensors of which")
    with refused if dist.get_rank() == 0 else nullcontext():
        runner.save_checkpoint(str(directory), "parts.pth", save_optimizer=False, save_param_scheduler=False)


def one_model_in_two_runners(directory: Path) -> None:
    """The second one's wrapper finds units, and their `init_weights` replaced already."""
    results: dict[Any, list[Any]] = {}
    for make in (replicated, sharded, flexible):
        torch.manual_seed(8)
        model = Toy()
        for number in (1, 2):
            runner = make("clipped", directory / f"again_{number}_{make.__name__}", model=model)
            results.setdefault(make, []).append(outcome(runner, train(runner)))
    for make in (sharded, flexible):
        for found, wanted in zip(results[make], results[replicated], strict=True):
            check_like({**found, "norms": found["norms"] or wanted["norms"]}, wanted)


def other_wrappers(directory: Path) -> None:
    """`ShardwiseStrategy` with another wrapper, which it would save wrongly."""
    strategy = {"type": "ShardwiseStrategy", "model_wrapper": {"type": "MMDistributedDataParallel"}}
    runner = FlexibleRunner(**settings("plain", directory / "other", launcher="pytorch", strategy=strategy))
    with pytest.raises(TypeError, match="should be a MMFullyShardedDataParallel, but is a MMDistributedDataParallel"):
        runner.train()


def exempt_from_precision(directory: Path) -> None:
    """Modules that torch's MixedPrecision leaves alone, when a config says which."""
    precision = {"param_dtype": "bfloat16", "_module_classes_to_ignore": [nn.GELU, Special]}
    wrapper = MMFullyShardedDataParallel(Initialized(), mixed_precision=precision)
    seen: list[torch.dtype] = []
    for layer in (wrapper.module.net[0], wrapper.module.net[2]):
        layer.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    wrapper.train_step(BATCH, OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1)))
    assert seen == [torch.float32, torch.bfloat16]


def saves_buffers_as_they_were(directory: Path) -> None:
    """Before ``buffer_dtype`` cast them, as torch's MixedPrecision has it; those of averages too."""
    precision = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "bfloat16"}
    wrapper = {"auto_wrap_policy": LINEAR, "mixed_precision": precision}
    runners: list[tuple[Any, dict[str, Any]]] = [
        (Runner, {"cfg": {"model_wrapper_cfg": {"type": "MMFullyShardedDataParallel", **wrapper}}}),
        (FlexibleRunner, {"strategy": {"type": "ShardwiseStrategy", "model_wrapper": wrapper}}),
    ]
    for kind, extra in runners:
        work, model = directory / f"buffers_{kind.__name__}", Toy()
        hooks = [{"type": "EMAHook", "update_buffers": True}]
        changes = {"model": model, "custom_hooks": hooks, **extra}
        runner = kind(**settings("plain", work, launcher="pytorch", **changes))
        train(runner)
        assert model.scale.dtype == torch.bfloat16
        dist.barrier()
        saved = torch.load(work / "epoch_2.pth")
        for state, name in ((saved["state_dict"], "scale"), (saved["ema_state_dict"], "module.scale")):
            assert {tensor.dtype for key, tensor in state.items() if key != "steps"} == {torch.float32}
            assert torch.equal(state[name], Toy().scale)


# -- Worlds of other sizes


class Mixed(BaseModel):
    """Batch normalization, a tied weight, and several losses."""

    def __init__(self) -> None:
        super().__init__(init_cfg={"type": "Kaiming", "layer": "Conv1d"})
        # Without a bias, whose gradient would be noise here.
        self.convolution, self.normalization = nn.Conv1d(1, 5, 3, bias=False), nn.BatchNorm1d(5)
        self.head, self.tied = nn.Linear(25, 3), nn.Linear(25, 3)
        self.tied.weight = self.head.weight

    def forward(self, inputs: Any, target: Any = None, mode: str = "tensor") -> Any:
        hidden = self.normalization(self.convolution(inputs[:, None])).flatten(1)
        outputs = self.head(hidden) + self.tied(hidden)
        if mode == "loss":
            parts = [0.1 * outputs.abs().mean(), 0.1 * outputs.mean()]
            return {"loss_a": (outputs - target).square().mean(), "loss_b": parts, "accuracy": outputs.mean()}
        if mode == "predict":
            return [float((a - b).square().mean()) for a, b in zip(outputs, target, strict=True)]
        return outputs


def three_like_ddp(directory: Path) -> None:
    """Settings by names of modules, norms of another kind, averaged buffers and averages of three ranks."""
    averages: list[dict[str, Any]] = [
        {"type": "EMAHook", "momentum": 0.3, "begin_iter": 3},
        {"type": "EMAHook", "momentum": 0.3, "update_buffers": True, "begin_epoch": 2},
    ]
    by_name = {"norm_decay_mult": 0.0, "bias_lr_mult": 2.0, "custom_keys": {"head": {"lr_mult": 0.1}}}
    optim = {
        "optimizer": {"type": "AdamW", "lr": 0.05, "weight_decay": 0.1},
        "clip_grad": {"max_norm": 0.5, "norm_type": 1},
        "paramwise_cfg": {**by_name, "bypass_duplicate": True},
    }
    with worlds_of(directory, 3) as number:
        for average in averages if number == 0 else ():
            data = {"train_dataloader": loader(27, 3), "val_dataloader": loader(24, 3)}
            changes = {**data, "custom_hooks": [{"type": "SyncBuffersHook"}, average], "optim_wrapper": optim}
            works = [directory / f"three_{kind}_{averages.index(average)}" for kind in ("ddp", "sharded")]
            expected = run(replicated, works[0], model=Mixed, **changes)
            # Units by class, since plain layers and those that are tied are in one.
            check_like(run(sharded, works[1], "clipped", model=Mixed, **changes), expected)
            check_same_file(works[1] / "epoch_2.pth", works[0] / "epoch_2.pth")


def one_rank_like_one_process(directory: Path) -> None:
    """A world of one rank, with a launcher."""
    with worlds_of(directory, 3) as number:
        if number == 1:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
            dist.init_process_group("gloo", init_method=f"file://{directory / 'alone'}", rank=0, world_size=1)
            expected = run(replicated, directory / "alone_ddp", "clipped")
            for make in (sharded, flexible):
                check_like(run(make, directory / f"alone_{make.__name__}", "clipped"), expected)
            check_same_file(directory / "alone_sharded" / "epoch_2.pth", directory / "alone_ddp" / "epoch_2.pth")


def hybrid_in_groups(directory: Path) -> None:
    """Two process groups, as torch's FullyShardedDataParallel takes them; trained and saved like replicas."""
    shards, replicas = ([dist.new_group(ranks) for ranks in ([0, a], [b, 3])] for a, b in ((1, 2), (2, 1)))
    rank = dist.get_rank()
    groups = (shards[rank // 2], replicas[rank % 2])

    def hybrid(name: str, work: Path, **changes: Any) -> Any:
        model = MMFullyShardedDataParallel(
            changes.pop("model"), auto_wrap_policy=LINEAR, process_group=groups, sharding_strategy="HYBRID_SHARD"
        )
        return Runner(**settings(name, work, launcher="pytorch", model=model, **changes))

    data = {"train_dataloader": loader(24, 4), "val_dataloader": loader(16, 4)}
    expected = run(replicated, directory / "hybrid_ddp", "averaged", model=Toy, **data)
    check_like(run(hybrid, directory / "hybrid", "averaged", model=Toy, **data), expected)
    check_same_file(directory / "hybrid" / "epoch_2.pth", directory / "hybrid_ddp" / "epoch_2.pth")
    wrapper = MMFullyShardedDataParallel(Toy(), process_group=groups, sharding_strategy="HYBRID_SHARD")
    assert wrapper.module.net[0].weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="do not line up in columns"):
        MMFullyShardedDataParallel(Toy(), process_group=(groups[0],) * 2, sharding_strategy="HYBRID_SHARD")
    with pytest.raises(ValueError, match="process_group is two axes of ranks, and the sharding_strategy needs one"):
        MMFullyShardedDataParallel(Toy(), process_group=groups)


TWO = (
    initializes_by_class,
    initializes_what_is_not_saved,
    freezes_when_initialized,
    keeps_its_structure_when_initialized,
    initializes_after_a_failure,
    initializes_parts_that_ranks_have_in_another_order,
    *((initializes_as_a_part,) if IS_NEWER else ()),  # MMEngine compares DTensors, which those of torch 2.11 cannot
    compiles,
    frozen_units,
    augments_tests,
    averages_inside_the_model,
    like_amp,
    refuses_apex,
    refuses_optimizers_that_shard,
    several_optimizers,
    optimizer_from_before,
    flat_optimizer,
    resumes_all_that_is_saved,
    resumes_on_the_host,
    checkpoint_options,
    whole_without_names,
    saves_before_it_runs,
    hooks_that_fail,
    states_that_fail,
    averages_that_ask_the_runner,
    hooks_that_add_shards,
    sharded_parts,
    one_model_in_two_runners,
    other_wrappers,
    exempt_from_precision,
    saves_buffers_as_they_were,
)
FOUR = (three_like_ddp, one_rank_like_one_process, hybrid_in_groups)

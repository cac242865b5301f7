"""The Trainer's strategy with real Trainers, against real Trainers on one device and plain torch."""

from __future__ import annotations

import copy
import csv
import importlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pytest.importorskip("lightning")

from shardwise import FSDPModule, full_state_dict, fully_shard
from shardwise.core.root import unit_of
from tests.adapters.lightning_ranks import check_in_ranks

NAMESPACE: str = globals().get("NAMESPACE", "lightning.pytorch")
pl: Any = importlib.import_module(NAMESPACE)
BATCH = 4
"""Samples of one rank's batch."""


# -- What is trained


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(48, 7, generator=generator)
    return TensorDataset(inputs, torch.randn(48, 3, generator=generator))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 11), nn.GELU(), nn.Linear(11, 3))


class Module(pl.LightningModule):
    """Regression with a validation loss and a learning rate that changes with every step."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = make_net()
        self.losses: list[torch.Tensor] = []
        self.rates: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().float().clone())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(shared: bool) -> DataLoader[Any]:
    """``shared``: this rank's part of the data; otherwise batches that join those of all ranks."""
    data = make_data()
    if not shared:
        return DataLoader(data, batch_size=BATCH * world_size())
    sampler: Any = DistributedSampler(data, num_replicas=world_size(), rank=dist.get_rank(), shuffle=False)
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def world_size() -> int:
    return dist.get_world_size()


def trainer(directory: Path, strategy: Any = "shardwise", **options: Any) -> Any:
    """A Trainer that says nothing and writes below ``directory``."""
    import shardwise.lightning  # noqa: F401

    defaults = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "auto" else world_size(),
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": directory,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def ours(**arguments: Any) -> Any:
    from shardwise.lightning import strategy_for

    return strategy_for(NAMESPACE)(**arguments)


# -- Comparing


def joined(losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each step's mean over ranks."""
    stacked = torch.stack(losses)
    dist.all_reduce(stacked)
    return list(stacked / dist.get_world_size())


def full_state(used: Any) -> dict[str, torch.Tensor]:
    """The module's whole state, on every rank."""
    is_full = used.strategy.state_dict_type == "full"
    objects = [used.strategy.lightning_module_state_dict() if is_full else full_state_dict(used.lightning_module)]
    dist.broadcast_object_list(objects, 0)
    return objects[0]


def assert_same_state(used: Any, expected: dict[str, torch.Tensor], **tolerance: Any) -> None:
    state = full_state(used)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda text, n=name: f"{n}: {text}")


_expected: dict[Any, tuple[Any, Any]] = {}
"""Fits on one device, by what was fitted and how."""


def assert_like_one_process(
    directory: Path,
    strategy: Any,
    make: Callable[[], Any] = Module,
    truth: Callable[[], Any] = Module,
    **options: Any,
) -> tuple[Any, Any]:
    """Fit sharded and on one device: losses, rates, validation and parameters agree. Gives Trainer and module."""
    key = truth, repr(options)
    if key not in _expected:
        on_one = trainer(directory, "auto", **options), truth()
        on_one[0].fit(on_one[1], loader(False), loader(False))
        _expected[key] = on_one
    expected, expected_module = _expected[key]
    module = make()
    used = trainer(directory, strategy, **options)
    used.fit(module, loader(True), loader(True))
    assert len(module.losses) == len(expected_module.losses) > 0
    torch.testing.assert_close(joined(module.losses), expected_module.losses)
    assert module.rates == expected_module.rates
    torch.testing.assert_close(used.callback_metrics["val_loss"], expected.callback_metrics["val_loss"])
    assert_same_state(used, expected_module.state_dict())
    return used, module


@contextmanager
def raises(kind: type[BaseException], *parts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert all(part in text for part in parts), text


# -- Cases


def fit_by_both_names(directory: Path) -> None:
    for name in ("shardwise", "ddp_fully_sharded"):
        used, module = assert_like_one_process(directory, name)
        assert type(used.strategy).__name__ == "DDPFullyShardedStrategy"
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
        assert used.strategy.model is module
        state = used.strategy.lightning_module_state_dict()
        assert bool(state) == used.is_global_zero
        assert all(value.device.type == "cpu" for value in state.values())


def all_hooks(directory: Path) -> None:
    """No hook with a policy or a small limit, `configure_model`, `configure_sharded_model`."""
    from shardwise import fully_shard
    from shardwise.core.root import unit_of
    from shardwise.fairscale.wrap import wrap

    class Later(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = make_net()

    class ByHand(Later):
        def configure_model(self) -> None:
            if self.net is None:
                self.net = make_net()
                for layer in self.net[::3]:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    class LegacyOnly(Module):
        def configure_sharded_model(self) -> None:
            self.net[0] = wrap(self.net[0], reshard_after_forward=False)
            self.net[3] = torch_wrap(self.net[3])

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.fsdp.wrap import wrap as torch_wrap

    def chosen(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def torch_form(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, nn.Linear)

    cases: list[tuple[Any, dict[str, Any], int]] = [
        (Module, {}, 1),
        (Module, {"min_num_params": 90}, 3),
        (Module, {"auto_wrap_policy": {nn.Linear}}, 4),
        (Module, {"auto_wrap_policy": chosen, "reshard_after_forward": False}, 4),
        (Module, {"auto_wrap_policy": torch_form}, 4),
        (Module, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "cpu_offload": True}, 4),
        (Later, {"auto_wrap_policy": {nn.Linear}}, 4),
        (ByHand, {"auto_wrap_policy": {nn.GELU}}, 3),
        (LegacyOnly, {}, 3),
        (Module, {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing_policy": {nn.Linear, nn.GELU}}, 4),
        (Module, {"process_group": dist.new_group(), "fp32_reduce_scatter": True, "timeout": None}, 1),
    ]
    for make, arguments, units in cases:
        _, module = assert_like_one_process(directory, ours(**arguments), make, max_epochs=1)
        found = {unit_of(inner) for inner in module.modules()} - {None}
        assert len(found) == units, (arguments, len(found))


def every_stage(directory: Path) -> None:
    """validate, test and predict, with and without a fit before."""
    for fits in (False, True):
        truth, expected = Module(), trainer(directory, "auto", max_epochs=1)
        module, used = Module(), trainer(directory, "shardwise", max_epochs=1)
        if fits:
            expected.fit(truth, loader(False))
            used.fit(module, loader(True))
        for stage in ("validate", "test"):
            ((theirs,), (found,)) = (
                getattr(expected, stage)(truth, loader(False), verbose=False),
                getattr(used, stage)(module, loader(True), verbose=False),
            )
            assert found.keys() == theirs.keys()
            for key, value in found.items():
                assert value == pytest.approx(theirs[key], rel=1e-5)
        whole = torch.cat(expected.predict(truth, loader(False)))
        mine = torch.cat(used.predict(module, loader(True)))
        torch.testing.assert_close(mine, whole[dist.get_rank() :: world_size()])
        # Called by itself, outside of any step.
        with torch.no_grad():
            torch.testing.assert_close(module(make_data().tensors[0]), truth(make_data().tensors[0]))


def uneven_predictions(directory: Path) -> None:
    inputs = make_data().tensors[0][: 4 * world_size() + 1]
    even: Any = DistributedSampler(TensorDataset(inputs), world_size(), dist.get_rank(), shuffle=False)
    uneven = DataLoader(TensorDataset(inputs), batch_size=BATCH)
    used = trainer(directory, "shardwise")
    with raises(ValueError, "0: 2", f"{world_size() - 1}: 1", "DistributedSampler"):
        used.predict(Module(), uneven)
    assert len(trainer(directory, "shardwise", limit_predict_batches=1).predict(Module(), uneven)) == 1
    assert len(used.predict(Module(), DataLoader(TensorDataset(inputs), batch_size=BATCH, sampler=even))) == 2


def clipping(directory: Path) -> None:
    for algorithm, value in (("norm", 0.05), ("value", 0.01)):
        options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        assert_like_one_process(directory, ours(auto_wrap_policy={nn.Linear}), **options)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often anything is gathered and reduced inside."""
    from shardwise.core import comm

    counts = {"all_gather": 0, "reduce_scatter": 0}
    kept = []
    for kind in (comm.Comm, comm.GlooComm, comm.PairwiseGlooComm):
        for name in counts:
            if name in kind.__dict__:
                function = kind.__dict__[name]

                def count(self: Any, *args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
                    if not _inside:
                        counts[_name] += 1
                    _inside.append(1)
                    try:
                        return _function(self, *args, **kwargs)
                    finally:
                        _inside.pop()

                kept.append((kind, name, function))
                setattr(kind, name, count)
    _inside: list[int] = []
    try:
        yield counts
    finally:
        for kind, name, function in kept:
            setattr(kind, name, function)


def accumulation(directory: Path) -> None:
    class Truth(Module):
        pass

    with counted() as once:
        assert_like_one_process(directory, "shardwise", max_steps=6)
    with counted() as thrice:
        assert_like_one_process(directory, "shardwise", max_steps=2, accumulate_grad_batches=3)
    # The same micro-batches, a third of the reductions, and no more gathers.
    assert thrice["reduce_scatter"] * 3 == once["reduce_scatter"] > 0, (once, thrice)
    assert thrice["all_gather"] <= once["all_gather"], (once, thrice)


class Halves(Module):
    """Changes the gradients after each backward."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class HalvesElsewhere(pl.Callback):
    """The same by a callback."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        Halves.on_after_backward(pl_module)


def gradients_after_each_backward(directory: Path) -> None:
    """What changes them there does so in each micro-batch, as where gradients are whole."""
    options = {"max_steps": 2, "accumulate_grad_batches": 3}
    with counted() as seen:
        assert_like_one_process(directory, "shardwise", Halves, Halves, **options)
        assert_like_one_process(directory, "shardwise", Module, callbacks=[HalvesElsewhere()], **options)
    with counted() as unseen:
        assert_like_one_process(directory, "shardwise", **options)
    assert seen["reduce_scatter"] == 2 * 3 * unseen["reduce_scatter"] > 0, (seen, unseen)


class Interrupted(Module):
    """Its first run ends between two micro-batches, of which the next one knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_interrupted = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.is_interrupted:
            raise InterruptedError("between micro-batches")
        return super().training_step(batch, batch_idx)


class LeftOver(Module):
    """With manual optimization: the first epoch's gradients are left, and dropped before validation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, is_last = self.optimizers(), self.current_epoch == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(super().training_step(batch, batch_idx))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_left_over(directory: Path) -> None:
    assert_like_one_process(directory, "shardwise", LeftOver, LeftOver)
    states = []
    for strategy in ("auto", "shardwise"):
        module, batches = Interrupted(), loader(strategy != "auto")
        for is_interrupted in (True, False):
            module.is_interrupted = is_interrupted
            used = trainer(directory, strategy, max_epochs=1, accumulate_grad_batches=2)
            with pytest.raises(InterruptedError) if is_interrupted else nullcontext():
                used.fit(module, batches)
        states.append(module.state_dict() if strategy == "auto" else None)
    assert_same_state(used, states[0])


def rank_by_rank() -> DataLoader[Any]:
    """The ranks' batches one after the other: with their gradients added up, the rounding is that of the ranks."""
    starts = range(0, len(make_data()), BATCH * world_size())
    batches = [
        list(range(start + rank, start + BATCH * world_size(), world_size()))
        for start in starts
        for rank in range(world_size())
    ]
    return DataLoader(make_data(), batch_sampler=batches)


def precisions(directory: Path) -> None:
    for precision, stored in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        truth, expected = Module(), trainer(directory, "auto", precision=precision, accumulate_grad_batches=2)
        expected.fit(truth, rank_by_rank())
        module, used = Module(), trainer(directory, "shardwise", precision=precision)
        used.fit(module, loader(True))
        assert used.precision == precision
        assert {parameter.dtype for parameter in module.parameters()} == {stored}
        # Bit for bit: halves add up to the mean without rounding.
        assert all(map(torch.equal, module.losses, truth.losses[dist.get_rank() :: 2]))
        assert_same_state(used, truth.state_dict(), rtol=0, atol=0)

    class Seen(Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.net[0].weight.dtype == torch.bfloat16
            assert self.net[0](x.bfloat16()).dtype == torch.bfloat16
            return super().forward(x).float()

        def loss(self, batch: Any) -> torch.Tensor:
            # The targets arrive in bf16: torch 2.11 has no backward of a loss of two dtypes.
            inputs, targets = batch
            return F.mse_loss(self(inputs), targets.float())

    module = Seen()
    trainer(directory, ours(compute_dtype=torch.bfloat16)).fit(module, loader(True))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def loss_scaling(directory: Path) -> None:
    """16-mixed on the CPU: autocast and a scaler that all ranks share, as a plain loop on the joined batch."""
    from shardwise.grad_scaler import ShardedGradScaler

    module, used = Module(), trainer(directory, "shardwise", precision="16-mixed", max_epochs=1, gradient_clip_val=0.5)
    used.fit(module, loader(True))
    assert isinstance(used.precision_plugin.scaler, ShardedGradScaler)
    assert used.precision == "16-mixed"
    net, losses = make_net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for index, (inputs, targets) in enumerate(rank_by_rank()):
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = F.mse_loss(net(inputs), targets)
        losses.append(loss.detach().float())
        scaler.scale(loss).backward()
        if index % 2 == 0:
            continue
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    torch.testing.assert_close(module.losses, losses[dist.get_rank() :: 2])
    assert_same_state(used, {f"net.{name}": value for name, value in net.state_dict().items()})

    class Infinite(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if dist.get_rank() == 1 and batch_idx == 0 else loss

    module, used = Infinite(), trainer(directory, "shardwise", precision="16-mixed", max_steps=1)
    before = {name: value.clone() for name, value in Module().state_dict().items()}
    used.fit(module, loader(True))
    assert used.precision_plugin.scaler.get_scale() == 2.0**15
    assert_same_state(used, before, rtol=0, atol=0)
    used.save_checkpoint(directory / "scaled.ckpt")
    resumed = trainer(directory, "shardwise", precision="16-mixed", max_steps=2)
    resumed.fit(Module(), loader(True), ckpt_path=directory / "scaled.ckpt")
    assert resumed.precision_plugin.scaler.get_scale() == 2.0**15


def checkpoint_options(directory: Path, kind: str) -> dict[str, Any]:
    callback = pl.callbacks.ModelCheckpoint(
        dirpath=directory / kind, monitor="val_loss", save_top_k=-1, save_last=True, filename="{epoch}"
    )
    return {"callbacks": [callback], "enable_checkpointing": True}


def exact_resume(directory: Path) -> None:
    """Stop after an epoch and go on: bit for bit what an uninterrupted run does; full and sharded."""
    whole = Module()
    uninterrupted = trainer(directory, "shardwise", max_epochs=3)
    uninterrupted.fit(whole, loader(True), loader(True))
    expected = full_state(uninterrupted)
    if dist.get_rank() == 0:
        torch.save((joined(whole.losses), expected), directory / "uninterrupted.pt")
    else:
        joined(whole.losses)
    for kind in ("full", "sharded"):
        first = trainer(directory, ours(state_dict_type=kind), max_epochs=1, **checkpoint_options(directory, kind))
        module = Module()
        first.fit(module, loader(True), loader(True))
        path = Path(first.checkpoint_callback.best_model_path)
        assert path.is_dir() == (kind == "sharded")
        resumed, used = Module(lr=123.0), trainer(directory, ours(state_dict_type=kind), max_epochs=3)
        used.fit(resumed, loader(True), loader(True), ckpt_path=path)
        assert module.rates + resumed.rates == whole.rates
        for ours_, theirs in zip(module.losses + resumed.losses, whole.losses, strict=True):
            assert torch.equal(ours_, theirs)
        assert_same_state(used, expected, rtol=0, atol=0)
        assert used.global_step == uninterrupted.global_step
        # For validation alone, the best one.
        tester = trainer(directory, "shardwise")
        (found,) = tester.validate(Module(), loader(True), ckpt_path=path, verbose=False)
        assert found["val_loss"] == pytest.approx(float(first.callback_metrics["val_loss"]), rel=1e-6)


def files_for_others(directory: Path) -> None:
    """A full checkpoint is one of a plain module's Trainer; a sharded one is plain DCP's; and the reverse."""
    import torch.distributed.checkpoint as dcp

    path = directory / "full" / "epoch=0.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    plain = Module()
    assert list(checkpoint["state_dict"]) == list(plain.state_dict())
    assert checkpoint["state_dict"]._metadata == plain.state_dict()._metadata
    plain.load_state_dict(checkpoint["state_dict"])
    optimizer = plain.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    again = Module.load_from_checkpoint(path, map_location="cpu")
    assert torch.equal(again.net[0].weight, plain.net[0].weight)
    sharded = {"model": {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}}
    dcp.load(sharded, checkpoint_id=directory / "sharded" / "epoch=0.ckpt", no_dist=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(sharded["model"][name], value)
    load = importlib.import_module(f"{NAMESPACE.replace('pytorch', 'fabric')}.utilities.load")
    consolidated = load._load_distributed_checkpoint(directory / "sharded" / "epoch=0.ckpt")
    assert all(torch.equal(consolidated["model"][name], value) for name, value in plain.state_dict().items())
    assert consolidated["optimizer_0"]["state"]["net.0.weight"]["exp_avg"].shape == (13, 7)
    assert consolidated["global_step"] == 6
    # One process goes on from ours, and we go on from its.
    dist.barrier()
    alone = trainer(directory, "auto", max_epochs=2)
    module = Module()
    alone.fit(module, loader(False), loader(False), ckpt_path=path)
    losses, _ = torch.load(directory / "uninterrupted.pt")
    torch.testing.assert_close(module.losses, losses[6:12])
    if dist.get_rank() == 0:
        alone.save_checkpoint(directory / "alone.ckpt")
    dist.barrier()
    used, module = trainer(directory, "shardwise", max_epochs=3), Module()
    used.fit(module, loader(True), loader(True), ckpt_path=directory / "alone.ckpt")
    torch.testing.assert_close(joined(module.losses), losses[12:])


def from_model_parallel(directory: Path) -> None:
    """A directory of Lightning's ModelParallelStrategy, over torch FSDP2, goes on in ours as in its own."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    class Theirs(Module):
        def configure_model(self) -> None:
            torch_fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    strategies = importlib.import_module(f"{NAMESPACE}.strategies")

    def theirs(epochs: int) -> Any:
        return trainer(directory, strategies.ModelParallelStrategy(world_size(), 1), max_epochs=epochs)

    path = directory / "model_parallel"
    first, expected, found = Theirs(), Theirs(), Module()
    used = theirs(1)
    used.fit(first, loader(True))
    used.save_checkpoint(path)
    theirs(2).fit(expected, loader(True), ckpt_path=path)
    used = trainer(directory, "shardwise")
    used.fit(found, loader(True), ckpt_path=path)
    assert len(found.losses) == 6
    assert all(map(torch.equal, found.losses, expected.losses))
    assert found.rates == expected.rates
    dist.barrier()
    if dist.get_rank() == 1:
        (path / "meta.pt").unlink()
    dist.barrier()
    with raises(RuntimeError, "has no meta.pt", str(path)):
        trainer(directory, "shardwise").fit(Module(), loader(True), ckpt_path=path)


class Unsafe:
    """What `torch.load` does not take by itself."""


def callbacks(directory: Path) -> None:
    """EarlyStopping, LearningRateMonitor, a progress bar and a summary, checkpoints by callback and by hand."""

    stop = pl.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    rates = pl.callbacks.LearningRateMonitor(logging_interval="step")
    logger_module = importlib.import_module(f"{NAMESPACE}.loggers")
    used = trainer(
        directory,
        "shardwise",
        max_epochs=9,
        callbacks=[stop, rates],
        logger=logger_module.CSVLogger(directory / "logs"),
        log_every_n_steps=1,
        enable_model_summary=True,
    )
    module = Module()
    used.fit(module, loader(True), loader(True))
    assert used.current_epoch == 2
    if used.is_global_zero:
        with open(Path(used.logger.log_dir) / "metrics.csv") as file:
            logged = [row["lr-AdamW"] for row in csv.DictReader(file) if row["lr-AdamW"]]
        assert [float(rate) for rate in logged] == pytest.approx(module.rates)
    used.save_checkpoint(directory / "by_hand.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(directory / "by_hand.ckpt", weights_only=False)
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(unsafe=Unsafe())
    used.save_checkpoint(directory / "unsafe.ckpt")
    with pytest.raises(UnpicklingError) as caught:
        trainer(directory, "shardwise").fit(Module(), loader(True), ckpt_path=directory / "unsafe.ckpt")
    assert "add_safe_globals" in "".join(caught.value.__notes__)
    with raises(ValueError, "is a directory without .metadata"):
        trainer(directory, "shardwise").fit(Module(), loader(True), ckpt_path=directory)
    with raises(KeyError, "save_weights_only"):
        trainer(directory, "shardwise").fit(Module(), loader(True), ckpt_path=directory / "by_hand.ckpt")


def more_callbacks(directory: Path) -> None:
    """Layers that start to train later, a schedule of accumulation, validation within epochs, profiling."""

    class Frozen(Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = self.net[:2], self.net[2:]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def later() -> Any:
        return pl.callbacks.BackboneFinetuning(1, initial_denom_lr=2.0, verbose=False)

    def schedule() -> Any:
        return pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 1})

    for make, callback in ((Frozen, later), (Module, schedule)):
        module, truth = make(), make()
        expected = trainer(directory, "auto", callbacks=[callback()])
        expected.fit(truth, loader(False))
        used = trainer(directory, ours(auto_wrap_policy={nn.Linear}), callbacks=[callback()])
        used.fit(module, loader(True))
        torch.testing.assert_close(joined(module.losses), truth.losses)
        assert_same_state(used, truth.state_dict())
    options = {"val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    assert_like_one_process(directory, "shardwise", **options, profiler="simple", detect_anomaly=True)
    exceptions = importlib.import_module(f"{NAMESPACE}.utilities.exceptions")
    averaging = pl.callbacks.StochasticWeightAveraging(0.1)
    with raises(exceptions.MisconfigurationException, "sharded"):
        trainer(directory, "shardwise", callbacks=[averaging]).fit(Module(), loader(True))


def finetuning_resumed(directory: Path) -> None:
    """Param groups that a callback has added are there again, with their state (with upstream's sharded strategies
    that is an error)."""

    class Later(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            pass

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)

    class Head(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net[2:].parameters(), lr=0.05)

    truth = Head()
    trainer(directory, "auto", callbacks=[Later()], max_epochs=3).fit(truth, loader(False))
    for kind in ("full", "sharded"):
        used, path = trainer(directory, ours(state_dict_type=kind), callbacks=[Later()]), directory / f"later_{kind}"
        used.fit(Head(), loader(True))
        used.save_checkpoint(path)
        used = trainer(directory, ours(state_dict_type=kind), callbacks=[Later()], max_epochs=3)
        used.fit(Head(), loader(True), ckpt_path=path)
        assert [len(group["params"]) for group in used.optimizers[0].param_groups] == [6, 2]
        assert_same_state(used, truth.state_dict())


def between_steps(directory: Path) -> None:
    """Hooks, averages and another run find the shards, also where the forward of validation keeps them gathered."""

    class Shrinking(Module):
        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.9)

    weight_averaging = importlib.import_module(f"{NAMESPACE}.callbacks.weight_averaging")
    states = []
    for shared in (False, True):

        def make(**options: Any) -> Any:
            keeping = {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": False}
            return trainer(directory, ours(**keeping) if shared else "auto", **options)  # noqa: B023

        averaged, again = Shrinking(), Shrinking()
        make(callbacks=[weight_averaging.EMAWeightAveraging(decay=0.7)]).fit(averaged, loader(shared), loader(shared))
        make().validate(again, loader(shared), verbose=False)
        make().fit(again, loader(shared), loader(shared))
        states.append([full_state_dict(module, rank0_only=False) for module in (averaged, again)])
    torch.testing.assert_close(states[1], states[0])

    class Teaching(Module):
        """Moves what teaches it between a training step and its backward."""

        def __init__(self) -> None:
            super().__init__()
            self.teacher = make_net().requires_grad_(False)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            with torch.no_grad():
                for mine, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    mine.lerp_(own, 0.3)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))

    for keeping in ({}, {"auto_wrap_policy": {nn.Linear}, "reshard_after_forward": False}):
        assert_like_one_process(directory, ours(**keeping), Teaching, Teaching)


def averages(directory: Path) -> None:
    """Lightning's own averaging callback: sharded, in validation, in checkpoints of both kinds."""
    weight_averaging = importlib.import_module(f"{NAMESPACE}.callbacks.weight_averaging")

    def average() -> Any:
        return weight_averaging.EMAWeightAveraging(decay=0.7)

    whole, expected = Module(), trainer(directory, "auto", max_epochs=3, callbacks=[average()])
    expected.fit(whole, loader(False), loader(False))
    for kind in ("full", "sharded"):
        # At the end of training the module gets the averages; before, both are saved.
        saving = pl.callbacks.ModelCheckpoint(
            dirpath=directory, filename=f"averaging_{kind}", save_on_train_epoch_end=True
        )
        module = Module()
        used = trainer(
            directory,
            ours(state_dict_type=kind),
            max_epochs=1,
            callbacks=[average(), saving],
            enable_checkpointing=True,
        )
        used.fit(module, loader(True), loader(True))
        path = Path(saving.best_model_path)
        resumed, used = Module(), trainer(directory, ours(state_dict_type=kind), max_epochs=3, callbacks=[average()])
        used.fit(resumed, loader(True), loader(True), ckpt_path=path)
        torch.testing.assert_close(joined(module.losses + resumed.losses), whole.losses)
        torch.testing.assert_close(used.callback_metrics["val_loss"], expected.callback_metrics["val_loss"])
        assert_same_state(used, whole.state_dict())
    # Of a module without memory.
    used = trainer(directory, "shardwise", max_epochs=3, callbacks=[average()])
    with used.init_module(empty_init=True):
        empty = Module()
    used.fit(empty, loader(True), loader(True))
    assert_same_state(used, whole.state_dict())
    # Of a module that is sharded already; only the callback may copy it.
    for again, shared in ((resumed, True), (whole, False)):
        callbacks = [average(), saving] if shared else [average()]
        strategy = ours(state_dict_type="sharded") if shared else "auto"
        again.losses.clear()
        used = trainer(directory, strategy, max_epochs=2, callbacks=callbacks, enable_checkpointing=shared)
        used.fit(again, loader(shared), loader(shared))
        if shared:
            refitted = full_state(used)
    torch.testing.assert_close(joined(resumed.losses), whole.losses)
    torch.testing.assert_close(refitted, whole.state_dict())
    other, used = Module(), trainer(directory, "shardwise", max_epochs=3, callbacks=[average()])
    used.fit(other, loader(True), ckpt_path=saving.best_model_path)
    with pytest.raises(TypeError, match="cannot be deep-copied"):
        copy.deepcopy(resumed)


def whole_state_dicts(directory: Path) -> None:
    """`load_state_dict` of a sharded module takes what one process saved, and a hook sees a checkpoint before it is
    loaded (upstream: too late)."""

    class Changing(Module):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["net.0.bias"].fill_(7.0)

    used, module = trainer(directory, "shardwise"), Module()
    used.validate(module, loader(True), verbose=False)
    torch.manual_seed(5)
    other = {name: torch.randn_like(value) for name, value in make_net().state_dict().items()}
    module.net.load_state_dict(other)
    assert_same_state(used, {f"net.{name}": value for name, value in other.items()}, rtol=0, atol=0)
    used.save_checkpoint(directory / "changed.ckpt")
    changing, used = Changing(), trainer(directory, "shardwise")
    used.validate(changing, loader(True), verbose=False, ckpt_path=directory / "changed.ckpt")
    state = full_state(used)
    assert bool((state["net.0.bias"] == 7).all())
    assert torch.equal(state["net.0.weight"], other["0.weight"])


class WithoutEncoder(Module):
    """Leaves what it does not train out of its state dict, and adds something."""

    def __init__(self, words: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.strict_loading = False
        self.net[0].requires_grad_(False)
        self.words = words

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {**{name: state[name] for name in state if not name.startswith("net.0.")}, "words": self.words}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        rest = dict(state_dict)
        self.words = rest.pop("words")
        return super().load_state_dict(rest, strict, assign)


class Counting(Module):
    """With modules whose states, a tensor and a list, are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = importlib.import_module("torchmetrics")
        self.sum, self.all = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.sum.persistent(True)
        self.all.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for metric in (self.sum, self.all):
            metric.update(batch_idx + 1.0)
        return super().training_step(batch, batch_idx)


def state_dicts_of_their_own(directory: Path) -> None:
    """Modules that leave something out of their state dict, or add something."""
    for kind in ("full", "sharded"):
        path, used = directory / f"without_{kind}.ckpt", trainer(directory, ours(state_dict_type=kind), max_epochs=1)
        used.fit(WithoutEncoder(("a", "b")), loader(True))
        used.save_checkpoint(path)
        resumed, used = WithoutEncoder(), trainer(directory, ours(state_dict_type=kind), max_epochs=2)
        with torch.no_grad():
            resumed.net[0].bias.fill_(4.0)
        used.fit(resumed, loader(True), ckpt_path=path)
        assert resumed.words == ("a", "b")
        assert len(resumed.losses) == len(loader(True))
        assert bool((resumed.net[0].bias.full_tensor() == 4).all())
        path, used = directory / f"counting_{kind}.ckpt", trainer(directory, ours(state_dict_type=kind), max_epochs=1)
        used.fit(Counting(), loader(True))
        used.save_checkpoint(path)
        again, used = Counting(), trainer(directory, ours(state_dict_type=kind))
        used.validate(again, loader(True), verbose=False, ckpt_path=path)
        numbers = torch.arange(1.0, len(loader(True)) + 1)
        assert float(again.sum.sum_value) == float(numbers.sum())
        assert torch.equal(torch.cat([value.reshape(-1) for value in again.all.value]), numbers)


def maker_and_judge() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)), nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)
    )


def adversarial_losses() -> list[torch.Tensor]:
    """Of a plain loop."""
    maker, judge = maker_and_judge()
    make_optimizer, judge_optimizer = (
        torch.optim.SGD(maker.parameters(), 0.3),
        torch.optim.Adam(judge.parameters(), 0.02),
    )
    losses = []
    for _ in range(2):
        for inputs, targets in loader(False):
            loss = F.softplus(judge(maker(inputs).detach())).mean() + F.softplus(-judge(targets)).mean()
            judge.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
            judge_optimizer.step()
            other = F.softplus(-judge(maker(inputs))).mean()
            maker.zero_grad()
            other.backward()
            make_optimizer.step()
            losses += [loss.detach(), other.detach()]
    return losses


def manual_optimization(directory: Path) -> None:
    """Two optimizers, two backward passes a step, as a plain loop on the joined batch."""

    class Adversarial(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = maker_and_judge()
            self.losses: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.maker(x)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            inputs, targets = batch
            make, judge = self.optimizers()
            self.toggle_optimizer(judge)
            loss = F.softplus(self.judge(self(inputs).detach())).mean() + F.softplus(-self.judge(targets)).mean()
            self.manual_backward(loss)
            self.clip_gradients(judge, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            judge.step()
            judge.zero_grad()
            self.untoggle_optimizer(judge)
            self.toggle_optimizer(make)
            other = F.softplus(-self.judge(self.maker(inputs))).mean()
            self.manual_backward(other)
            make.step()
            make.zero_grad()
            self.untoggle_optimizer(make)
            self.losses += [loss.detach(), other.detach()]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.maker.parameters(), 0.3), torch.optim.Adam(self.judge.parameters(), 0.02)

    module, used = Adversarial(), trainer(directory, "shardwise")
    used.fit(module, loader(True))
    torch.testing.assert_close(joined(module.losses), adversarial_losses())
    path = directory / "manual.ckpt"
    used.save_checkpoint(path)
    again, other_trainer = Adversarial(), trainer(directory, ours(state_dict_type="sharded"), max_epochs=3)
    other_trainer.fit(again, loader(True), ckpt_path=path)
    assert len(again.losses) == 2 * len(loader(True))


class ClippedByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
        for algorithm in ("value", "norm"):
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)  # Adam makes steps of differences in rounding


def manual_optimization_compiled(directory: Path) -> None:
    """A wholly compiled module clips and steps as it does without; Dynamo sees no step of sharded parameters."""
    plain, compiled = ClippedByHand(), ClippedByHand()
    for module in (plain, torch.compile(compiled, backend="eager")):
        trainer(directory, "shardwise").fit(module, loader(True))
    for parameter, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.full_tensor())


class Scaled(Module):
    """Stepped by hand, with a parameter of its own."""

    def __init__(self, through_forward: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.through_forward = False, through_forward
        self.log_scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.log_scale.exp()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs) if self.through_forward else self.net(inputs) * self.log_scale.exp()
        loss = F.mse_loss(outputs, targets)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs) * self.log_scale.exp(), targets)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(inputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def manual_optimization_of_own_parameters(directory: Path) -> None:
    """Steps without backward see whole parameters; where a training step does not, the error names them."""
    assert_like_one_process(directory, ours(auto_wrap_policy={nn.Linear}), Scaled, Scaled)
    with pytest.raises(RuntimeError) as caught:
        trainer(directory, "shardwise").fit(Scaled(through_forward=False), loader(True))
    assert "Scaled" in caught.value.__notes__[0]
    assert "log_scale" in caught.value.__notes__[0]


def wrong_optimizers(directory: Path) -> None:
    """Over something else; over nothing; on some ranks; that cannot be made."""

    class Foreign(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(make_net().parameters(), lr=0.1)

    class Empty(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([], lr=0.1)

    class OnOneRank(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD((self if dist.get_rank() == 0 else make_net()).parameters(), lr=0.1)

    class Failing(Module):
        def configure_optimizers(self) -> Any:
            raise KeyError("self.trainer.model.parameters()")

    kinds = (Foreign, ValueError), (Empty, ValueError), (OnOneRank, ValueError), (Failing, KeyError)
    for make, error in kinds:
        used, module = trainer(directory, ours(activation_checkpointing_policy={nn.GELU})), make()
        before = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
        with raises(error, "self.trainer.model.parameters()"):
            used.fit(module, loader(True))
        assert used.strategy.optimizers == []
        assert used.strategy.lr_scheduler_configs == []
        # Nothing is half set up: nothing is sharded, and the instance trains once its optimizer is right.
        assert type(module) is make
        assert all(now is was for now, (was, _) in zip(module.parameters(), before, strict=True))
        assert all(torch.equal(was, value) for was, value in before)
        assert not any(inner._forward_pre_hooks or inner._forward_hooks for inner in module.modules())
        module.configure_optimizers = lambda m=module: torch.optim.SGD(m.parameters(), lr=0.1)
        trainer(directory, "shardwise").fit(module, loader(True))
        assert len(module.losses) == 12


def optimizers(directory: Path) -> None:
    """Made before wrapping, with several groups; with state at once; that keep lists of parameters; none."""

    class Early(Module):
        def __init__(self) -> None:
            super().__init__()
            decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
            others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
            self.made = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.05)

        def configure_optimizers(self) -> Any:
            scheduler = torch.optim.lr_scheduler.StepLR(self.made, step_size=1, gamma=0.9)
            return {"optimizer": self.made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert_like_one_process(directory, "shardwise", Early, Early)

    class Eager(Module):
        """Its optimizer makes state at once."""

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.2)

    _, truth = assert_like_one_process(directory, "shardwise", Eager, Eager)
    used = trainer(directory, ours(auto_wrap_policy={nn.Linear}))
    with used.init_module(empty_init=True):
        module = Eager()
    used.fit(module, loader(True))
    torch.testing.assert_close(joined(module.losses), joined(truth.losses))

    class Searching(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    class FromTrainer(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)

    class Without(Module):
        def configure_optimizers(self) -> Any:
            return None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    # It keeps the list of its parameters: those are the sharded ones, which torch's LBFGS cannot flatten.
    searching = Searching()
    with pytest.raises(RuntimeError, match="evenly"):
        trainer(directory, "shardwise").fit(searching, loader(True))
    assert searching.trainer.optimizers[0]._params[0] is searching.net[0].weight
    trainer(directory, "shardwise").fit(FromTrainer(), loader(True))
    trainer(directory, "shardwise", max_steps=2).fit(Without(), loader(True))


def refusals(directory: Path) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    class Emptied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Identity()

    exceptions = importlib.import_module(f"{NAMESPACE}.utilities.exceptions")
    used = trainer(directory, "shardwise")
    with raises(exceptions.MisconfigurationException, "reinitialize your LightningModule"):
        used.fit(Emptied(), loader(True))
    assert used.strategy.lightning_module is None or not list(used.strategy.lightning_module.parameters())

    class Uninitialized(Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    def failing(module: nn.Module) -> bool:
        if isinstance(module, nn.GELU):
            raise KeyError("reset_parameters")
        return isinstance(module, nn.Linear)

    with torch.device("meta"):
        uninitialized = Uninitialized()
    scalar = Module()
    scalar.scalar = nn.Parameter(torch.tensor(1.0))
    for module, kind, part, arguments in (
        (uninitialized, ValueError, "'scale'", {"auto_wrap_policy": {nn.Linear}}),
        (scalar, ValueError, "'scalar'", {"auto_wrap_policy": {nn.Linear}}),
        (Module(), KeyError, "reset_parameters", {"auto_wrap_policy": failing}),
        (Module(), KeyError, "reset_parameters", {"activation_checkpointing_policy": failing}),
    ):
        used = trainer(directory, ours(**arguments))
        with raises(kind, part):
            used.fit(module, loader(True))
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
        assert not any(inner._forward_pre_hooks for inner in module.modules())
        assert used.strategy.optimizers == []
    for hook in ("configure_model", "configure_sharded_model"):

        def failing_on_last(self: Any) -> None:
            if dist.get_rank() == world_size() - 1:
                raise OSError("no such file")

        late = type("Late", (Module,), {hook: failing_on_last})()
        with pytest.raises(OSError, match="no such file") as caught:
            trainer(directory, "shardwise").fit(late, loader(True))
        is_own = dist.get_rank() == world_size() - 1
        assert is_own or caught.value.__notes__ == [f"shardwise: this happened on rank {world_size() - 1}"]
    with raises(ValueError, "auto_wrap_policy", "ModuleList"):
        ours(auto_wrap_policy={nn.ModuleList})
    for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
        with raises(TypeError, name, "set of module classes, not <generator"):
            ours(**{name: (kind for kind in [nn.Linear])})
    foreign = Module()
    torch_fully_shard(foreign.net)
    with raises(TypeError, "net", "torch's own"):
        trainer(directory, "shardwise").fit(foreign, loader(True))


def arguments(directory: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for given, message in (
        ({"state_dict_type": "half"}, "state_dict_type"),
        ({"move_grads_to_cpu": True}, "move_grads_to_cpu"),
        ({"mp_policy": torch.float16}, "mp_policy"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy"),
        ({"auto_wrap_policy": nn.Linear(2, 2)}, "auto_wrap_policy"),
        ({"activation_checkpointing_policy": {3}}, "activation_checkpointing_policy"),
        ({"process_group": "default"}, "process_group"),
        ({"compute_dtype": "bf16"}, "compute_dtype"),
        ({"compute_dtype": torch.int64}, "compute_dtype must be a floating-point dtype"),
        ({"min_num_params": "many"}, "min_num_params"),
        ({"min_num_params": -1}, "min_num_params"),
        ({"min_num_params": float("nan")}, "min_num_params"),
        ({"precision_plugin": "bf16-mixed"}, "Trainer(precision=...)"),
        ({"reshard_after_forward": "never"}, "reshard_after_forward"),
        ({"cpu_offload": "yes"}, "cpu_offload"),
        ({"timeout": 3}, "timeout"),
        ({"parallel_devices": "cpu"}, "parallel_devices"),
        ({"parallel_devices": ["cpu", "cpu"]}, "parallel_devices"),
        ({"parallel_devices": 2}, "parallel_devices"),
        ({"cluster_environment": "slurm"}, "cluster_environment must be an instance of lightning"),
        ({"checkpoint_io": "torch"}, "checkpoint_io must be an instance of lightning"),
        ({"process_group_backend": 3}, "process_group_backend"),
        ({"fp32_reduce_scatter": "x"}, "fp32_reduce_scatter"),
        ({"state_dict_to_cpu": "x"}, "state_dict_to_cpu"),
    ):
        with raises((ValueError, TypeError), message):  # type: ignore[arg-type]
            ours(**given)
    with pytest.warns(UserWarning, match="bucket_cap_mb"):
        ours(bucket_cap_mb=3, flatten_parameters=False)
    with raises(ValueError, "mp_policy", "compute_dtype"):
        ours(mp_policy=MixedPrecisionPolicy(), compute_dtype=torch.bfloat16)
    assert ours(min_num_params=7).min_num_params == 7
    assert ours(state_dict_to_cpu=0, fp32_reduce_scatter=np.True_).sharding.precision.reduce_dtype is torch.float32
    # The same instance goes on in another Trainer: here nothing is emptied by wrapping.
    module = Module()
    for _ in range(2):
        used = trainer(directory, "shardwise", max_epochs=1)
        used.fit(module, loader(True))
    assert len(module.losses) == 12
    with raises(OSError, "/proc"):  # on all ranks, of which one writes
        used.save_checkpoint("/proc/nowhere/x.ckpt")


def different_beginnings(directory: Path) -> None:
    """Ranks that were not seeded alike train the first one's module."""
    module = Module()
    first = {name: value.clone() for name, value in module.state_dict().items()}
    if dist.get_rank():
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    used = trainer(directory, ours(auto_wrap_policy={nn.Linear}))
    used.validate(module, loader(True), verbose=False)
    assert_same_state(used, first, rtol=0, atol=0)


class Normalized(Module):
    """With batch normalization, in the place of the layer normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.BatchNorm1d(13)


class NormalizedByHand(Normalized):
    def configure_model(self) -> None:
        for layer in self.net:
            if unit_of(layer) is None and any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh)


def synchronized(norm: Any, inputs: torch.Tensor) -> torch.Tensor:
    """As torch's SyncBatchNorm, which computes on accelerators only."""
    if not norm.training:
        return nn.BatchNorm1d.forward(norm, inputs)
    whole = nn.BatchNorm1d.forward(norm, torch.cat(all_gather(inputs.contiguous())))
    return whole.chunk(world_size())[dist.get_rank()]


def synchronized_norms(directory: Path) -> None:
    """``sync_batchnorm``: statistics of all ranks, also in models that have units already, and only during the fit."""

    def check(make: Callable[[], Any], policy: Any = None) -> None:
        strategy = ours(auto_wrap_policy=policy)
        module = assert_like_one_process(directory, strategy, make, Normalized, sync_batchnorm=True)[1]
        assert isinstance(module.net[2], nn.Module)
        assert not isinstance(module.net[2], nn.SyncBatchNorm)
        module.losses.clear()
        trainer(directory, ours(auto_wrap_policy=policy), sync_batchnorm=True).fit(module, loader(True))
        assert len(module.losses) == 12

    def validated() -> Any:
        module = Normalized()
        trainer(directory, "shardwise", sync_batchnorm=True).validate(module, loader(True), verbose=False)
        return module

    with patch.object(nn.SyncBatchNorm, "forward", synchronized):
        check(Normalized)
        check(Normalized, {nn.BatchNorm1d, nn.SyncBatchNorm})
        check(NormalizedByHand)
        check(validated)


def best_and_last(directory: Path) -> None:
    """Checkpoints that replace others."""
    for kind in ("full", "sharded"):  # the best only, which is the last, replaced each time; and the last by a link
        kept = pl.callbacks.ModelCheckpoint(
            dirpath=directory / f"kept_{kind}", monitor="val_loss", mode="min", save_top_k=1, save_last="link"
        )
        used = trainer(directory, ours(state_dict_type=kind), callbacks=[kept], enable_checkpointing=True)
        used.fit(Module(), loader(True), loader(True))
        dist.barrier()
        assert len(list((directory / f"kept_{kind}").iterdir())) <= 3
        (found,) = used.validate(Module(), loader(True), verbose=False, ckpt_path="best")
        assert found["val_loss"] == pytest.approx(float(kept.best_model_score), rel=1e-6)


def links_to_the_best(directory: Path) -> None:
    """What is saved as the last takes the place of a link to the best, as `save_last="link"` makes in a run before, and
    leaves the best as it is: as with Lightning's own DDP."""

    class Worse(Module):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("score", float(self.trainer.current_epoch), sync_dist=True)

    def step_in(path: Path) -> int:
        saved = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
        return int(saved["global_step"])

    found: dict[Any, Any] = {}
    kinds = ("full", "sharded")
    for number, pair in enumerate([("ddp", "ddp"), *((first, second) for first in kinds for second in kinds)]):
        where = directory / f"links_{number}"
        options: Any = {"dirpath": where, "monitor": "score", "save_top_k": 1, "save_last": "link", "filename": "best"}
        options["enable_version_counter"] = False  # or it may be last-v1.ckpt
        last = where / "last.ckpt"
        for epochs, kind in zip((1, 3), pair, strict=True):
            strategy: Any = kind if kind == "ddp" else ours(state_dict_type=kind)
            kept = pl.callbacks.ModelCheckpoint(**options)
            used = trainer(directory, strategy, callbacks=[kept], enable_checkpointing=True, max_epochs=epochs)
            used.fit(Worse(), loader(True), loader(True), ckpt_path=last if epochs > 1 else None, weights_only=False)
            dist.barrier()
            assert last.is_symlink() == (epochs == 1)
        found[pair] = step_in(where / "best.ckpt"), step_in(last), len(list(where.iterdir()))
        dist.barrier()
    assert set(found.values()) == {found["ddp", "ddp"]}, found
    assert found["ddp", "ddp"][0] < found["ddp", "ddp"][1]


def other_uses(directory: Path) -> None:
    """A strategy given to a Trainer of the other name, one process's idea of strictness, a step that returns a dict,
    units called by themselves."""
    from shardwise.lightning import DDPFullyShardedStrategy

    # The public class serves Trainers of both names.
    given = DDPFullyShardedStrategy(auto_wrap_policy={nn.Linear})
    assert_like_one_process(directory, given, max_epochs=1)
    strategies = importlib.import_module(f"{NAMESPACE}.strategies")
    assert isinstance(given, strategies.ParallelStrategy)

    class Lenient(Module):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)
            self.strict_loading = False

    source, used = Module(), trainer(directory, "shardwise")
    used.validate(source, loader(True), verbose=False)
    for path in (directory / "strict.ckpt", directory / "strict_sharded"):
        kind = "sharded" if path.name.endswith("sharded") else "full"
        used = trainer(directory, ours(state_dict_type=kind))
        used.validate(source, loader(True), verbose=False)
        used.save_checkpoint(path, weights_only=True)
        lenient, other = Lenient(), trainer(directory, "shardwise")
        before = lenient.more.weight.detach().clone()
        with torch.no_grad():
            lenient.net[0].weight.zero_()
        other.validate(lenient, loader(True), verbose=False, ckpt_path=path)
        state = full_state(other)
        assert torch.equal(state["more.weight"], before)
        assert torch.equal(state["net.0.weight"], make_net()[0].weight)
        lenient.strict_loading = True
        with raises(ValueError, "more.weight"):
            trainer(directory, "shardwise").validate(lenient, loader(True), verbose=False, ckpt_path=path)

    class Dict(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "other": [loss.detach()]}

        def on_train_epoch_end(self) -> None:
            self.net[3](torch.zeros(2, 13))

    module = Dict()
    trainer(directory, ours(auto_wrap_policy={nn.Linear})).fit(module, loader(True))
    assert len(module.losses) == 12
    with pytest.raises(RuntimeError, match="unit"), torch.no_grad():
        module.net[2](torch.zeros(2, 13))


def on_meta(directory: Path) -> None:
    """`trainer.init_module(empty_init=True)`: no memory, and the values of one process."""
    used = trainer(directory, ours(auto_wrap_policy={nn.Linear}), max_epochs=1)
    with used.init_module(empty_init=True):
        module = Module()
    assert all(parameter.is_meta for parameter in module.parameters())
    used.fit(module, loader(True), loader(True))
    truth = Module()
    trainer(directory, "auto", max_epochs=1).fit(truth, loader(False), loader(False))
    torch.testing.assert_close(joined(module.losses), truth.losses)


def resume_at_another_size(directory: Path) -> None:
    """Checkpoints of two ranks go on at this world size, with the same joined batches."""
    for kind in ("full", "sharded"):
        truth_module, module = Module(), Module()
        path = directory.parent / "trainer" / kind / "epoch=0.ckpt"
        full = directory.parent / "trainer" / "full" / "epoch=0.ckpt"
        trainer(directory, "auto", max_epochs=2).fit(truth_module, loader(False), loader(False), ckpt_path=full)
        used = trainer(directory, ours(state_dict_type=kind), max_epochs=2)
        used.fit(module, loader(True), loader(True), ckpt_path=path)
        assert used.world_size == world_size()
        torch.testing.assert_close(joined(module.losses), truth_module.losses)
        assert module.rates == truth_module.rates
        assert_same_state(used, truth_module.state_dict())


def smaller_groups(directory: Path) -> None:
    """A process group smaller than the world: sharded over it, and copies of all groups stay one model."""
    size = max(1, world_size() // 2)
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world_size(), size)]
    own = groups[dist.get_rank() // size]

    class ByHand(Module):
        def configure_model(self) -> None:
            from shardwise import fully_shard

            fully_shard(self.net[0], mesh=self.device_mesh)

    for make in (Module, ByHand):
        strategy = ours(process_group=own, auto_wrap_policy={nn.Linear})
        used, module = assert_like_one_process(directory, strategy, make, max_epochs=2, gradient_clip_val=0.05)
        assert next(module.parameters()).device_mesh.shape == (2, size)
        assert strategy.process_group.size() == size
    whole = Module()
    trainer(directory, "shardwise", max_epochs=3).fit(whole, loader(True))
    for kind in ("full", "sharded"):
        used = trainer(directory, ours(process_group=own, state_dict_type=kind), max_epochs=1)
        used.fit(Module(), loader(True))
        path = directory / f"by_groups_{kind}"
        used.save_checkpoint(path)
        for strategy in (ours(process_group=own), "shardwise"):
            module = Module(lr=9.0)
            trainer(directory, strategy, max_epochs=3).fit(module, loader(True), ckpt_path=path)
            torch.testing.assert_close(joined(module.losses), joined(whole.losses)[len(whole.losses) // 3 :])
    if world_size() > 2:
        uneven = [dist.new_group([0]), dist.new_group(list(range(1, world_size())))]
        with raises(ValueError, "process_group", "same size"):
            trainer(directory, ours(process_group=uneven[dist.get_rank() > 0])).fit(Module(), loader(True))
    part = dist.new_group([0])
    if dist.get_rank():
        with raises(ValueError, "not in the group"):
            ours(process_group=part)


def saving_options(directory: Path) -> None:
    """ModelCheckpoint's options: the files, scores and choices of one process, for both kinds."""
    choices: list[dict[str, Any]] = [
        {"save_top_k": 2, "monitor": "val_loss"},
        {"save_top_k": -1, "every_n_train_steps": 4, "filename": "{step}"},
        {"save_top_k": 0, "save_last": True},
        {"save_weights_only": True, "save_last": True, "every_n_epochs": 2},
    ]
    for index, choice in enumerate(choices):
        alone = pl.callbacks.ModelCheckpoint(dirpath=directory / f"alone_{index}_{dist.get_rank()}", **choice)
        expected = trainer(directory, "auto", callbacks=[alone], enable_checkpointing=True)
        expected.fit(Module(), loader(False), loader(False))
        for kind in ("full", "sharded"):
            saving = pl.callbacks.ModelCheckpoint(dirpath=directory / f"saved_{index}_{kind}", **choice)
            used = trainer(directory, ours(state_dict_type=kind), callbacks=[saving], enable_checkpointing=True)
            module = Module()
            used.fit(module, loader(True), loader(True))
            dist.barrier()
            names, theirs = (sorted(p.name for p in Path(c.dirpath).iterdir()) for c in (saving, alone))
            assert names == theirs
            assert Path(saving.best_model_path).name == Path(alone.best_model_path).name
            if alone.best_model_score is not None:
                torch.testing.assert_close(saving.best_model_score, alone.best_model_score)
            if "save_last" in choice:
                (found,) = used.validate(Module(), loader(True), ckpt_path="last", verbose=False)
                assert found["val_loss"] == pytest.approx(float(expected.callback_metrics["val_loss"]), rel=1e-5)


def schedules(directory: Path) -> None:
    """Schedules of the rate by epochs, steps and what was logged, and their continuation."""
    rates = torch.optim.lr_scheduler
    makers: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
        (lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=0), {"monitor": "val_loss"}),
        (lambda optimizer: rates.OneCycleLR(optimizer, 0.2, total_steps=30), {"interval": "step"}),
    ]
    for make, how in makers:

        class Scheduled(Module):
            def configure_optimizers(self, make: Any = make, how: Any = how) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **how}}

        _, whole = assert_like_one_process(directory, "shardwise", Scheduled, Scheduled, max_epochs=3)
        first = trainer(directory, "shardwise", max_epochs=2)
        first.fit(Scheduled(), loader(True), loader(True))
        first.save_checkpoint(directory / "schedule.ckpt")
        resumed = Scheduled()
        used = trainer(directory, "shardwise", max_epochs=3)
        used.fit(resumed, loader(True), loader(True), ckpt_path=directory / "schedule.ckpt")
        steps = len(resumed.losses)
        assert steps == len(whole.losses) // 3
        assert resumed.rates == whole.rates[-steps:]
        assert all(map(torch.equal, resumed.losses, whole.losses[-steps:]))


def hooks(directory: Path) -> None:
    """What modules do in their hooks: frozen, shared and batch-dependent parts, messages, clipping of their own, calls
    of the module outside of steps."""

    class Busy(Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 3))
            self.net[3].weight = self.net[1].weight
            self.net[0].requires_grad_(False)
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("scale", torch.tensor([2.0]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.scale

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert self.training
            assert not isinstance(self.net[0].weight, DTensor)  # whole, as the module's own
            self.steps += 1
            size, rank = self.trainer.world_size, self.global_rank
            self.trainer.strategy.barrier()
            gathered = self.all_gather(torch.tensor([float(rank)]))
            assert gathered.flatten().tolist() == list(range(size))
            assert float(self.trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum")) == size
            assert self.trainer.strategy.reduce_boolean_decision(rank == 0, all=False)
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            # A penalty on all weights, none of which is in another unit.
            return loss + 1e-3 * sum(parameter.pow(2).sum() for parameter in self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                assert self(batch[0]).shape == (len(batch[0]), 3)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not self.training
            assert not torch.is_grad_enabled()
            super().validation_step(batch, batch_idx)

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.log("norm", norm, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    used, module = assert_like_one_process(directory, "shardwise", Busy, Busy)
    assert module.net[3].weight is module.net[1].weight
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert float(used.strategy.reduce(torch.tensor(1.0), alone, reduce_op="sum")) == 1
    expected = _expected[Busy, "{}"][0].callback_metrics
    for name in ("train_loss_epoch", "norm"):
        torch.testing.assert_close(used.callback_metrics[name], expected[name])
    used.save_checkpoint(directory / "busy.ckpt")
    again = Busy()
    again.load_state_dict(torch.load(directory / "busy.ckpt", weights_only=False)["state_dict"])
    assert float(again.steps) == len(module.losses)


class Remembering(Module):
    """Has a tensor in its checkpoints that is no parameter."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.memory = torch.arange(float(length))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["memory"] = self.memory

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.memory = checkpoint["memory"]


def file_replaced(directory: Path) -> None:
    """A run that goes on from a file may save into that file, also where Lightning, whose drafts are in the system's
    temporary directory, would copy its draft over the file that the run has mapped."""
    path = directory / "last.ckpt"
    first = trainer(directory, ours(), max_steps=3)
    first.fit(Remembering(10_000), loader(True))
    first.save_checkpoint(path)
    before = path.stat().st_ino
    module, used = Remembering(), trainer(directory, ours(), max_steps=4)
    used.fit(module, loader(True), ckpt_path=path)
    assert len(module.memory) == 10_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.move", shutil.copyfile)  # as between file systems
        used.save_checkpoint(path, weights_only=True)
    assert path.stat().st_ino != before
    assert module.memory.equal(torch.arange(10_000.0))
    used.save_checkpoint(path)
    dist.barrier()
    path.write_bytes(bytes(path.stat().st_size))  # by another program
    dist.barrier()
    assert {float(state["step"]) for state in used.optimizers[0].state.values()} == {4.0}


def directory_replaced_by_a_plugin(directory: Path) -> None:
    """One rank deletes the sharded checkpoint while another has yet to look at it."""
    from shardwise.lightning_common import files

    kind = importlib.import_module(f"{NAMESPACE}.plugins.io").TorchCheckpointIO
    path, used = directory / "own", trainer(directory, ours(checkpoint_io=type("Own", (kind,), {})()), max_steps=1)
    used.fit(Module(), loader(True))
    if dist.get_rank() == 0:
        path.mkdir()
        (path / ".metadata").touch()
    dist.barrier()
    look, delete = files.refuse_directory, files.shutil.rmtree

    def look_late(path: Path) -> None:
        time.sleep(0.2 * dist.get_rank())
        look(path)

    def delete_slowly(path: Path) -> None:
        (path / ".metadata").unlink()
        time.sleep(0.4)
        delete(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "refuse_directory", look_late)
        patch.setattr(files.shutil, "rmtree", delete_slowly)
        used.save_checkpoint(path)
    assert path.is_file()


class Fixed(Module):
    """Is not trained."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return None


class TwoParts(Module):
    """``count`` of two optimizers, stepped by hand."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.automatic_optimization, self.count = False, count

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        used = self.optimizers()
        for optimizer in used if isinstance(used, list) else [used]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = list(self.net[0].parameters()), list(self.net[3].parameters())
        return [torch.optim.AdamW(part) for part in parts[: self.count]]


def other_numbers_of_optimizers(directory: Path) -> None:
    for kind in ("full", "sharded"):
        path = directory / f"none_{kind}.ckpt"
        used = trainer(directory, ours(state_dict_type=kind), max_epochs=1)
        used.fit(Fixed(), loader(True))
        used.save_checkpoint(path)
        again = trainer(directory, ours(state_dict_type=kind))
        again.fit(Fixed(), loader(True), ckpt_path=path)
        assert again.current_epoch == 2
        used = trainer(directory, ours(state_dict_type=kind), max_epochs=1)
        used.fit(TwoParts(2), loader(True))
        used.save_checkpoint(path)
        with raises(RuntimeError, "1 optimizers", "state of 2"):
            trainer(directory, ours(state_dict_type=kind)).fit(TwoParts(1), loader(True), ckpt_path=path)


def state_of_another_shape(directory: Path) -> None:
    """Otherwise the next step would fail, by an operator's name."""
    used, path = trainer(directory, max_epochs=1), directory / "shapes.ckpt"
    used.fit(Module(), loader(True))
    used.save_checkpoint(path)
    if used.is_global_zero:
        saved = torch.load(path, weights_only=False)
        saved["optimizer_states"][0]["state"][3]["exp_avg"] = torch.ones(2, 2)
        torch.save(saved, path)
    dist.barrier()
    with raises(ValueError, "AdamW", "'exp_avg' of parameter 3 has shape (2, 2)", "(13,)"):
        trainer(directory).fit(Module(), loader(True), ckpt_path=path)


class Factored(torch.optim.Optimizer):
    """Divides gradients of matrices by an average over their rows, which is sharded as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    rows, state = parameter.grad.square().mean(1), self.state[parameter]
                    state.setdefault("rows", torch.zeros_like(rows)).lerp_(rows, 0.5)
                    update = parameter.grad / state["rows"].add(1e-6).sqrt().unsqueeze(1)
                    parameter.sub_(update * group["lr"])
        return loss


class WithFactored(Module):
    """Trained by an optimizer with state of another shape than its parameters."""

    def configure_optimizers(self) -> Any:
        return Factored(self.parameters())


def factored_state_resumed(directory: Path) -> None:
    """Sharded as it was, though an optimizer that has made no step has none to tell how."""
    whole = WithFactored()
    trainer(directory, max_epochs=2).fit(whole, loader(True))
    for kind in ("full", "sharded"):
        first, module = trainer(directory, ours(state_dict_type=kind), max_epochs=1), WithFactored()
        path = directory / f"factored-{kind}.ckpt"
        first.fit(module, loader(True))
        first.save_checkpoint(path)
        resumed, used = WithFactored(), trainer(directory, ours(state_dict_type=kind))
        used.fit(resumed, loader(True), ckpt_path=path)
        assert all(map(torch.equal, module.losses + resumed.losses, whole.losses))
        kept = [state["rows"] for state in used.optimizers[0].state.values()]
        assert kept
        assert all(isinstance(rows, DTensor) and rows.placements == (Shard(0),) for rows in kept)


class Chain(nn.ModuleList):
    """A container that is called, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(7, 5), nn.Linear(5, 3)])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x * self.scale


def manual_optimization_of_a_list_that_is_called(directory: Path) -> None:
    class Manual(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.chain = Chain()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, (inputs, targets) = self.optimizers(), batch
            self.manual_backward(F.mse_loss(self.chain(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(1)
    used = Manual()
    trainer(directory, max_epochs=1).fit(used, loader(True))
    assert isinstance(used.chain, FSDPModule)
    assert not torch.equal(used.chain.scale.full_tensor(), torch.ones(3))  # type: ignore[operator]


CASES = (
    manual_optimization_of_a_list_that_is_called,
    factored_state_resumed,
    file_replaced,
    other_numbers_of_optimizers,
    state_of_another_shape,
    fit_by_both_names,
    all_hooks,
    every_stage,
    uneven_predictions,
    clipping,
    accumulation,
    accumulation_left_over,
    gradients_after_each_backward,
    precisions,
    loss_scaling,
    exact_resume,
    files_for_others,
    from_model_parallel,
    callbacks,
    more_callbacks,
    finetuning_resumed,
    between_steps,
    averages,
    whole_state_dicts,
    state_dicts_of_their_own,
    manual_optimization,
    manual_optimization_of_own_parameters,
    optimizers,
    wrong_optimizers,
    refusals,
    arguments,
    different_beginnings,
    on_meta,
    other_uses,
    best_and_last,
    links_to_the_best,
    smaller_groups,
    saving_options,
    schedules,
    hooks,
    directory_replaced_by_a_plugin,
    synchronized_norms,
    manual_optimization_compiled,
)
OTHER_NAME = (fit_by_both_names, clipping, exact_resume, other_uses, best_and_last)
EXACT_RESUME = "trainer", "exact_resume", 2
AT_OTHER_SIZES = (fit_by_both_names, clipping, every_stage)
AT_FOUR = (smaller_groups, resume_at_another_size)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_trainer(world_size: int, case: str) -> None:
    after = EXACT_RESUME if case == "files_for_others" else ()
    check_in_ranks(__file__, "trainer", case, world_size, after=after)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("case", [case.__name__ for case in OTHER_NAME])
def test_trainer_of_pytorch_lightning(world_size: int, case: str) -> None:
    check_in_ranks(__file__, "other_trainer", case, world_size, namespace="pytorch_lightning")


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("case", [case.__name__ for case in AT_OTHER_SIZES])
def test_trainer_at_other_sizes(world_size: int, case: str) -> None:
    check_in_ranks(__file__, f"trainer_{world_size}", case, world_size)


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("case", [case.__name__ for case in AT_FOUR])
def test_trainer_of_four(world_size: int, case: str) -> None:
    check_in_ranks(__file__, "trainer_4", case, world_size, after=EXACT_RESUME)


@pytest.mark.parametrize("room", ["lightning", "fabric"])
def test_a_strategy_before_there_are_processes(room: str) -> None:
    module = importlib.import_module(f"shardwise.{room}")
    with pytest.raises(ValueError, match=rf"no strategy for 'torch'; there are those for .*{room}"):
        module.strategy_for("torch")
    kind = module.strategy_for(NAMESPACE if room == "lightning" else NAMESPACE.replace("pytorch", "fabric"))
    for argument in ("reshard_after_forward", "cpu_offload"):
        with pytest.raises(TypeError, match=rf"{argument}.* bool|{argument}.*True or False"):
            kind(**{argument: "yes"})
    strategy = kind()
    with pytest.raises(RuntimeError, match=r"the device mesh exists once the Trainer runs, or after Fabric\.launch"):
        _ = strategy.device_mesh
    strategy.barrier()
    assert (strategy.broadcast(3), strategy.process_group_backend, strategy.is_distributed) == (3, None, True)

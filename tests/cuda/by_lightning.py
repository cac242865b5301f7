"""Ways to train by Lightning's Trainer and by Fabric, on any device."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanSquaredError

import shardwise
import shardwise.fabric
import shardwise.lightning
from shardwise.grad_scaler import ShardedGradScaler

from .cases import BF16, DEVICE, Results, is_on

BATCH = 4


@contextmanager
def quietly(device: str) -> Iterator[None]:
    """Without messages; Lightning's changes to the environment, where it keeps ranks and seeds, do not last."""
    environment, get_backend = dict(os.environ), dist.get_backend
    if device == "cpu":
        # It takes a group with a backend for each device for one that averages whole numbers.
        dist.get_backend = lambda *_, **__: "gloo"
    os.environ["NODE_RANK"] = "0"
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        dist.get_backend = get_backend


def places(device: str) -> list[torch.device]:
    """Where the ranks are: all on the first GPU, which Lightning's own arguments cannot say."""
    return [torch.device("cpu") if device == "cpu" else torch.device(device, 0)] * dist.get_world_size()


def accelerator(device: str, kind: Any) -> Any:
    """For devices that Lightning does not know, one of class ``kind``."""
    if device in ("cpu", "cuda"):
        return device
    functions = {name: staticmethod(lambda *_: None) for name in ("parse_devices", "get_parallel_devices", "name")}
    functions |= {"auto_device_count": staticmethod(lambda: 1), "is_available": staticmethod(lambda: True)}
    functions |= {"setup_device": lambda *_: None, "teardown": lambda *_: None, "get_device_stats": lambda *_: {}}
    return type("Accelerator", (kind,), functions)()


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 11), nn.GELU(), nn.Linear(11, 3))


def whole(module: nn.Module) -> Results:
    state = shardwise.full_state_dict(module, rank0_only=False)
    return {name: value.float().cpu() for name, value in state.items()}


def exact(device: str, precision: Any) -> Any:
    """Mixed precision for the device under test, of which the CPU shows what it should come to."""
    return "32-true" if device == "cpu" != DEVICE and precision == "16-mixed" else precision


def scale_less(plugin: Any) -> None:
    """So that no step is skipped."""
    if (scaler := getattr(plugin, "scaler", None)) is not None:
        assert type(scaler) is ShardedGradScaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})


# -- Trainer


class Module(lightning.LightningModule):
    """A regression that is built, without values, when it is sharded, and validated by a metric with a state."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.seed, self.net, self.seen = seed, None, list[str]()
        self.error = MeanSquaredError()

    def configure_model(self) -> None:
        if self.net is None:
            with self.trainer.init_module(empty_init=True):
                self.net = make_net(self.seed)

    def on_fit_start(self) -> None:
        scale_less(self.trainer.precision_plugin)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs).float(), targets.float())
        self.seen += [inputs.device.type, loss.device.type]
        self.log("loss", loss, sync_dist=True, on_epoch=True, batch_size=len(inputs))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.error(self.net(inputs).float(), targets.float())
        self.seen.append(self.error.sum_squared_error.device.type)
        self.log("error", self.error)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(24, 7, generator=generator), torch.randn(24, 3, generator=generator)
    data = TensorDataset(inputs, targets)
    sampler: Any = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def make_trainer(device: str, directory: Path, by_name: bool, options: dict[str, Any], **settings: Any) -> Any:
    shared: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 1,
        "gradient_clip_val": 0.5,
        "default_root_dir": directory,
        "accelerator": accelerator(device, lightning.pytorch.accelerators.Accelerator),
        **settings,
    }
    if by_name:
        return lightning.Trainer(strategy="shardwise", devices=1, **shared)
    strategy = shardwise.lightning.DDPFullyShardedStrategy(
        parallel_devices=places(device), auto_wrap_policy={nn.Linear}, **options
    )
    return lightning.Trainer(strategy=strategy, **shared)


def by_trainer(
    device: str, directory: Path, precision: Any = "32-true", by_name: bool = False, **options: Any
) -> Results:
    """Two epochs, the second by another Trainer, which resumes from a file."""
    with quietly(device):
        make = functools.partial(make_trainer, device, directory, by_name, options, precision=exact(device, precision))
        module, trainer = Module(), make(max_epochs=1)
        trainer.fit(module, loader(), loader())
        results = {f"first {name}": value for name, value in trainer.callback_metrics.items()}
        trainer.save_checkpoint(directory / "saved")
        module, trainer = Module(seed=1), make(max_epochs=2)
        trainer.fit(module, loader(), loader(), ckpt_path=directory / "saved", weights_only=False)
        kept_on = "cpu" if options.get("cpu_offload") else device
        [optimizer] = trainer.optimizers
        assert is_on(kept_on, module.parameters())
        assert is_on(kept_on, [state["momentum_buffer"].to_local() for state in optimizer.state.values()])
        results |= trainer.callback_metrics
        [validated] = trainer.validate(module, loader(), verbose=False)
        results |= {f"validated {name}": torch.tensor(value) for name, value in validated.items()}
        predicted = trainer.predict(module, loader())
        assert predicted is not None
        assert {*module.seen} == {device}
        results |= {f"predicted {index}": value for index, value in enumerate(predicted)}
        return {name: value.detach().float().cpu() for name, value in results.items()} | whole(module)


# -- Fabric


def make_fabric(device: str, by_name: bool, precision: Any, options: dict[str, Any]) -> Any:
    kind: Any = accelerator(device, lightning.fabric.accelerators.Accelerator)
    if by_name:
        fabric = lightning.Fabric(accelerator=kind, strategy="shardwise", devices=1, precision=precision)
    else:
        strategy = shardwise.fabric.FullyShardedStrategy(
            parallel_devices=places(device), auto_wrap_policy={nn.Linear}, **options
        )
        fabric = lightning.Fabric(accelerator=kind, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def set_up(fabric: Any, seed: int) -> tuple[Any, Any]:
    """A model without values, and an optimizer over it."""
    with fabric.init_module(empty_init=True):
        net = make_net(seed)
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def by_fabric(device: str, directory: Path, precision: Any = None, by_name: bool = False, **options: Any) -> Results:
    """Trained, saved, and trained on in another model."""
    with quietly(device):
        fabric = make_fabric(device, by_name, exact(device, precision), options)
        scale_less(fabric.strategy.precision)
        results: Results = {}
        model, optimizer = set_up(fabric, seed=0)
        for epoch in range(2):
            for index, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader())):
                loss = F.mse_loss(model(inputs).float(), targets.float())
                fabric.backward(loss)
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
                assert is_on(device, [inputs, loss])
                results[f"loss {epoch}.{index}"] = fabric.all_reduce(loss.detach())
                results[f"norm {epoch}.{index}"] = norm
            if not epoch:
                fabric.save(directory / "saved", {"model": model, "optimizer": optimizer, "epoch": epoch})
                model, optimizer = set_up(fabric, seed=1)
                rest = fabric.load(directory / "saved", {"model": model, "optimizer": optimizer}, weights_only=False)
                assert rest == {"epoch": 0}
        kept_on = "cpu" if options.get("cpu_offload") else device
        assert is_on(kept_on, [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())])
        return {name: value.detach().float().cpu() for name, value in results.items()} | whole(model.module)


SHARDED, OFFLOADED = {"state_dict_type": "sharded"}, {"cpu_offload": True}
IN_BF16 = {"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}
WAYS: dict[str, Any] = {}
for _name, _way in (("trainer", by_trainer), ("fabric", by_fabric)):
    WAYS |= {
        _name: (_way, torch.float32),
        f"{_name}_bf16": (functools.partial(_way, **IN_BF16), BF16),
        f"{_name}_scaled": (functools.partial(_way, precision="16-mixed"), BF16),
        f"{_name}_offloaded": (functools.partial(_way, **OFFLOADED), torch.float32),
        f"{_name}_offloaded_scaled": (functools.partial(_way, **OFFLOADED, precision="16-mixed"), BF16),
        f"{_name}_sharded_files": (functools.partial(_way, **SHARDED, **OFFLOADED), torch.float32),
        f"{_name}_by_name": (functools.partial(_way, by_name=True), torch.float32),
    }

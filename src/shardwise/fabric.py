"""Fully sharded training with Lightning Fabric: ``Fabric(strategy="shardwise")``.

Importing this module registers the strategy as ``shardwise``, with Fabric of both `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .adapters.policies import Policy
from .adapters.whole import gather_in
from .adapters.wrapping import forget_history, modules_with_units, without_gradient_sync, zero_what_waits
from .checkpoint.atomic import path_of
from .checkpoint.full_state import full_state_dict
from .checkpoint.model_state import model_state
from .checkpoint.names import parameter_names
from .checkpoint.optimizer_state import optimizer_state
from .checkpoint.ranks import saving_ranks
from .checkpoint.safetensors import load_safetensors
from .core.module import register_fsdp_forward_method
from .core.replaced import successor_of
from .core.root import unit_of
from .core.step import parameters_of
from .core.tree import map_tensors
from .grad import clip_grad_norm_
from .init import init_on_meta, materialize
from .lightning_common.arguments import checked_state_dict_type
from .lightning_common.files import (
    Kind,
    SavedDirectory,
    agreed_kind,
    read_file,
    refuse_directory,
    save_file,
    target_of,
    write_directory,
    write_file,
)
from .lightning_common.namespaces import StrategyClasses, installed_namespaces
from .lightning_common.optimizers import attach, clip_grad_value_, full_optimizer_state, load_full_optimizer_state
from .lightning_common.precision import check_precision, share_scaler
from .lightning_common.processes import ProcessesStrategy
from .lightning_common.units import Sharding, move_metrics
from .lightning_common.weights import load_values, mapped_safetensors

Load = Callable[[Any], object]
Filter = Mapping[str, Callable[[str, Any], bool]]


class _FabricStrategy(ProcessesStrategy):
    """Parameters, gradients and optimizer state in shards over all processes.

    ``Fabric(strategy="shardwise", accelerator="cpu" | "gpu", devices=N)``, or with an instance of this class. A model
    that is set up stays the same object, with parameters of the same names: DTensors, of which each rank has a part.

    Args:
        accelerator: the accelerator to run on, if not by Fabric's argument.
        parallel_devices: devices of this node, if not by Fabric's argument.
        cluster_environment: how processes find each other, if not detected.
        checkpoint_io: must be None: the strategy writes and reads checkpoints itself.
        precision: the precision plugin, if not by Fabric's argument.
        process_group_backend: "nccl", "gloo" …; None for that of the device.
        timeout: of collectives.
        cpu_offload: keep shards, gradients and the optimizer's state in the host's memory.
        reshard_after_forward: free gathered parameters between forward and backward; the root keeps its own.
        auto_wrap_policy: chooses the units: classes of modules, a function of a module, or one of torch's or
            FairScale's form.
        min_num_params: modules with at least as many parameters become units, if there is no ``auto_wrap_policy``.
        mp_policy: dtypes of the units.
        activation_checkpointing_policy: chooses the modules that compute their activations again in backward.
        param_init_fn: called with each module on the meta device that the constructor's record does not initialize;
            by default its own ``reset_parameters``, ``_reset_parameters`` or ``_init_weights``.
        state_dict_type: checkpoints are one file ("full") or a directory of `torch.distributed` ("sharded").
        process_group: the ranks to shard over; None for all. If groups of one size divide all ranks, each holds a
            copy of the model, and gradients are averaged over all ranks.
    """

    part = "fabric"
    strategy_name = "shardwise"
    names = ("shardwise",)

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        auto_wrap_policy: Policy | None = None,
        min_num_params: int = 100_000_000,
        mp_policy: MixedPrecisionPolicy | None = None,
        activation_checkpointing_policy: Policy | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        state_dict_type: str = "full",
        process_group: dist.ProcessGroup | None = None,
    ):
        self.sharding = Sharding(
            reshard_after_forward=reshard_after_forward,
            precision=MixedPrecisionPolicy() if mp_policy is None else mp_policy,
            offload=cpu_offload,
            policy=auto_wrap_policy,
            min_num_params=min_num_params,
            checkpointing=activation_checkpointing_policy,
        )
        self.state_dict_type = checked_state_dict_type(state_dict_type)
        if param_init_fn is not None and not callable(param_init_fn):
            raise TypeError(f"param_init_fn must be a function of a module, not {param_init_fn!r}")
        self.param_init_fn = param_init_fn
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
        )
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        self._init_processes(process_group_backend, timeout, process_group)
        self._backward_sync_control = _BackwardSyncControl()
        self._postponed = _PostponedLoads()

    # -- Precision and processes

    @property
    def precision(self) -> Any:
        """The precision plugin that Fabric uses."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        check_precision("precision", plugin, self.part)
        share_scaler(plugin)
        self._precision = plugin

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` summed up or averaged over processes, in place; anything else as it is."""
        return self._reduce(tensor, group, reduce_op)

    # -- Setting up

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Inside, with ``empty_init``, modules get no memory for parameters; `setup_module` gives them their values."""
        with init_on_meta() if empty_init else nullcontext(), self.precision.module_init_context():
            yield

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Inside, ``wrap`` and ``auto_wrap`` of `shardwise.fairscale`, and torch's ``wrap``, make units."""
        return self.sharding.wrapping(self.device_mesh)

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: sharding puts each part where it belongs, without the whole on the device."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard ``module``, in place; what is on the meta device gets memory and values, one tensor at a time.

        A module that was set up before stays as it is, with a warning.

        Raises:
            StateError: naming modules on the meta device that nothing initializes.
            TypeError: naming a module that torch's own data parallelism has wrapped.
        """
        if unit_of(module) is not None and not any(parameter.is_meta for parameter in module.parameters()):
            warnings.warn(
                f"{type(module).__name__.removeprefix('FSDP')} was set up already: it stays as it is, and an "
                "auto_wrap_policy is not asked again",
                stacklevel=3,
            )
        originals = list(module.parameters())
        is_loaded = self._postponed.concern(module)
        self.sharding.shard(module, self.device_mesh, is_initialized=not is_loaded, init_fn=self.param_init_fn)
        if self.param_init_fn is not None:
            forget_history(module)
        self._postponed.run(module)
        materialize(module, init_fn=self.param_init_fn)
        for original in originals:
            if original.is_meta and type(original) is nn.Parameter and successor_of(original) is not None:
                original.__class__ = _FollowedParameter
        move_metrics(module, self.root_device)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if hasattr(module, "_fabric") and callable(getattr(module, step, None)):
                register_fsdp_forward_method(module, step)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """`setup_module`, and then `setup_optimizer` for each.

        Raises:
            RuntimeError: before anything is changed, if one has parameters on the meta device that are not the
                module's.
            TypeError: before anything is changed, for what is no optimizer.
        """
        own = {id(parameter) for parameter in module.parameters()}
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups"):  # wrappers of optimizers may be of no class of torch's
                raise TypeError(
                    f"fabric.setup takes a model and then its optimizers, one by one, not {optimizer!r:.80}: pass "
                    "fabric.setup(model, *optimizers)"
                )
            if any(parameter.is_meta and id(parameter) not in own for parameter in parameters_of(optimizer)):
                raise RuntimeError(
                    f"{type(optimizer).__name__} has references to meta-device parameters that are not of the model it "
                    "is set up with: set up their model first, or create the optimizer after setting up the model"
                )
        module = self.setup_module(module)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Move ``optimizer`` to the sharded successors of its parameters, if it was made before the model was set up;
        groups, settings and state stay.

        Raises:
            ValueError: if its constructor made state on the meta device, and cannot make it again.
        """
        attach(optimizer)
        zero_what_waits(optimizer)
        self._postponed.run(optimizer)
        return optimizer

    # -- Gradients

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``; return the norm before.

        Raises:
            RuntimeError: if it is not finite and ``error_if_nonfinite``; nothing is scaled then.
        """
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Limit each element of the gradients to ``-clip_val`` … ``clip_val``."""
        self.precision.unscale_gradients(optimizer)
        clip_grad_value_(self.precision.main_params(optimizer), clip_val)

    # -- Checkpoints

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's own plugin, which nothing is written or read by."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise NotImplementedError(
            f"checkpoint_io={plugin!r}: each rank writes and reads its part of a checkpoint by itself, without a "
            "CheckpointIO: leave it out, or save fabric.strategy.get_module_state_dict(model) by the plugin yourself"
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state dict, as ``state_dict_type`` says: whole tensors on rank 0, or DTensors. A collective."""
        return full_state_dict(module) if self.state_dict_type == "full" else model_state(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors that every rank has."""
        if self._postponed.concern(module):  # this load comes after those, and its values count
            self._postponed.add(module, lambda alive: load_values(alive, state_dict, strict=strict))
        else:
            load_values(module, state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of one process, on rank 0; a collective."""
        return full_optimizer_state(optimizer, keeps=self.is_global_zero)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Filter | None = None
    ) -> None:
        """Write modules, optimizers and anything else in ``state``. A collective; what was at ``path`` stays until the
        new checkpoint is complete.

        Args:
            path: of a file, or of a directory with ``state_dict_type="sharded"``.
            state: objects by name.
            storage_options: must be None.
            filter: by name of an item, a function of each key and value of its state dict that says whether to save
                it. Rank 0 decides.

        Raises:
            CheckpointError: on all ranks, if it cannot be written.
            IsADirectoryError: if a file is to replace a directory that is not a checkpoint.
            TypeError: for ``storage_options``, a ``state`` that is no dict, and naming an item with sharded modules or
                optimizers inside.
            ValueError: if ranks differ in the names, or in their order; for a directory also if a name of a module or
                an optimizer begins with another one and a dot.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} does not use a CheckpointIO, so it takes no storage_options")
        path, chosen = target_of(self.broadcast(path)), dict(filter or {})
        is_full = self.state_dict_type == "full"
        ranks, sharded, rest = saving_ranks(), dict[str, Any](), dict[str, Any]()
        with ranks.together():
            _refuse_unnamed(state)
        models = _models_in(state)
        described = ranks.exchange((list(state), list(chosen)))
        to_filter = described[0][1]
        if other := next((names for names, _ in described if names != described[0][0]), None):
            raise ValueError(f"ranks differ in what they save: {described[0][0]} and {other}, which must be the same")
        with ranks.together():
            if is_full:
                refuse_directory(path)
            else:
                _refuse_overlapping(state)
            for name, item in state.items():
                if not isinstance(item, (nn.Module, Optimizer)):
                    rest[name] = item.state_dict() if callable(getattr(item, "state_dict", None)) else item
                    _refuse_sharded_inside(name, rest[name])
        for name, item in state.items():
            if isinstance(item, nn.Module):
                sharded[name] = self.get_module_state_dict(item)
            elif isinstance(item, Optimizer):
                sharded[name] = self.get_optimizer_state(item) if is_full else _by_names(item, models)
            target = sharded if name in sharded else rest
            if name in to_filter:
                target[name] = _filtered(target[name], chosen.get(name))
        # Other objects, such as averages, may have sharded tensors in their state.
        rest = gather_in(rest, keeps=self.is_global_zero)
        if not is_full:
            write_directory(path, sharded, rest)
            return
        with ranks.together():
            if ranks.is_first:
                content = {name: (sharded if name in sharded else rest)[name] for name in state}
                write_file(path, lambda draft: save_file(draft, content))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of either kind into what is given. A collective.

        If a model is on the meta device and not set up yet, a file is mapped into its parameters, and a directory is
        read when the model is set up. Either way each rank reads only its part.

        Args:
            path: of a file, or a directory.
            state: objects by name, replaced or filled; or a module or an optimizer, if the file is its state dict (a
                module may also be read from safetensors); or None.
            strict: whether everything in ``state`` must be in the checkpoint, and the names of modules be the same.
            weights_only: as of `torch.load`.

        Returns:
            What ``state`` did not ask for; everything without ``state``.

        Raises:
            FileNotFoundError: if there is nothing at ``path``.
            KeyError: naming what the checkpoint does not have.
            TypeError: for a ``state`` that is none of these.
            ValueError: if it does not fit, or for a sharded checkpoint without ``state``.
        """
        path = path_of(self.broadcast(path), "path")
        kind = agreed_kind(path)
        if kind is Kind.NOTHING:
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        if isinstance(state, nn.Module):
            self._load_raw(path, kind, state, strict=strict, weights_only=weights_only)
            return {}
        if isinstance(state, Optimizer):
            if kind is Kind.SHARDED:
                raise ValueError(
                    f"{path} is a sharded checkpoint, in which an optimizer's state is by the names of its model: load "
                    "both by state={'model': model, 'optimizer': optimizer}"
                )
            load_full_optimizer_state(state, read_file(path, weights_only=weights_only))
            return {}
        if state is not None:
            _refuse_unnamed(state)
        if kind is Kind.SHARDED:
            return self._load_directory(path, state, strict=strict, weights_only=weights_only)
        return self._load_file(path, state, strict=strict, weights_only=weights_only)

    def _load_raw(self, path: Path, kind: Kind, module: nn.Module, *, strict: bool, weights_only: bool | None) -> None:
        if path.suffix in (".safetensors", ".json") or kind is Kind.DIRECTORY:
            if _is_whole_on_meta(module):
                # Its parameters become the mapped tensors, of which setting up reads this rank's part.
                self.load_module_state_dict(module, mapped_safetensors(path), strict=strict)
            else:
                load_safetensors(module, path, strict=strict)
        elif kind is Kind.SHARDED:
            self._load_model(SavedDirectory(path, weights_only=weights_only), "", module, strict)
        else:
            self.load_module_state_dict(module, read_file(path, weights_only=weights_only), strict=strict)

    def _load_file(self, path: Path, state: Any, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = read_file(path, weights_only=weights_only)
        if not state:
            return checkpoint
        if not isinstance(checkpoint, Mapping):
            raise ValueError(f"{path} has an object of type {type(checkpoint).__name__} instead of a dict by name")
        # No collectives inside, and objects of the program may fail on one rank.
        with saving_ranks().together():
            _check_names(state, checkpoint, strict)
            for name, item in _modules_first(state):
                if name not in checkpoint:
                    continue
                value = checkpoint.pop(name)
                if isinstance(item, nn.Module):
                    self.load_module_state_dict(item, value, strict=strict)
                elif isinstance(item, Optimizer):
                    load_full_optimizer_state(item, value)
                else:
                    # Not mapped any more: the program may write its next checkpoint into the same file.
                    _fill(state, name, map_tensors(value, torch.clone))
        return checkpoint

    def _load_directory(self, path: Path, state: Any, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        if not state:
            raise ValueError(
                f"{path} is a sharded checkpoint, which is loaded into a model: pass state={{'model': model}}"
            )
        saved = SavedDirectory(path, weights_only=weights_only)
        rest = saved.metadata()
        _check_names(state, {name for name in state if name in rest or saved.has(name)}, strict)
        models = _models_in(state)
        for name, item in _modules_first(state):
            if isinstance(item, nn.Module):
                if saved.has(name):
                    self._load_model(saved, name, item, strict)
            elif isinstance(item, Optimizer) and saved.has(name):
                self._load_optimizer(saved, name, item, models)
        with saving_ranks().together():
            for name, item in _modules_first(state):
                if name in rest and not isinstance(item, (nn.Module, Optimizer)):
                    _fill(state, name, rest.pop(name))
        return rest

    def _load_model(self, saved: SavedDirectory, name: str, module: nn.Module, strict: bool) -> None:
        """Load the module now; if that would read it whole, when it is set up."""
        saved.check_model(name, module, strict=strict)
        if not _is_whole_on_meta(module):
            saved.load_model(name, module, strict=strict)
            return
        self._postponed.add(module, lambda alive: saved.load_model(name, alive, strict=strict))

    def _load_optimizer(self, saved: SavedDirectory, name: str, optimizer: Optimizer, models: nn.Module) -> None:
        """Load the optimizer now; if its parameters are on the meta device, where state has no place, when it is set
        up."""

        def load(alive: Optimizer) -> None:
            saved.load_optimizer(name, alive, _model_of(alive, models))

        if any(parameter.is_meta for parameter in parameters_of(optimizer)):
            self._postponed.add(optimizer, load)
        else:
            load(optimizer)


class _PostponedLoads:
    """Loads that wait until what they fill is set up, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._loads: list[tuple[weakref.ref[Any], Load]] = []

    def add(self, item: nn.Module | Optimizer, load: Load) -> None:
        """Let ``load`` wait, which is called with ``item`` unless that is gone by then."""
        self._loads = [waiting for waiting in self._loads if waiting[0]() is not None]
        self._loads.append((weakref.ref(item), load))

    def concern(self, item: nn.Module | Optimizer) -> bool:
        """Whether a load waits for ``item``, for a part of it, or for something that it is a part of."""
        return any(_overlap(reference(), item) for reference, _ in self._loads)

    def run(self, item: nn.Module | Optimizer) -> None:
        """Do what waits for ``item``. What fails goes on waiting: without it, ``item`` would not have its values."""
        for waiting in list(self._loads):
            reference, load = waiting
            alive = reference()
            if _overlap(alive, item):
                load(alive)
                self._loads.remove(waiting)


def _overlap(one: Any, other: Any) -> bool:
    if isinstance(one, nn.Module) and isinstance(other, nn.Module):
        return any(module is one for module in other.modules()) or any(module is other for module in one.modules())
    return one is other


def _is_whole_on_meta(module: nn.Module) -> bool:
    """Whether all its parameters are on the meta device, and no unit in it could take a part."""
    return not modules_with_units(module) and all(parameter.is_meta for parameter in module.parameters())


def _refuse_sharded_inside(name: str, value: Any) -> None:
    """
    Raises:
        TypeError: for modules and optimizers in dicts and lists: pickled, they would have one rank's shards only.
    """
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        parameters: Iterable[torch.Tensor] = item.parameters() if isinstance(item, nn.Module) else ()
        if isinstance(item, Optimizer):
            parameters = parameters_of(item)
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise TypeError(
                f"state[{name!r}] has {type(item).__name__} inside, which is sharded: give each module and each "
                "optimizer a name of its own in the state"
            )
        _refuse_sharded_inside(name, item)


def _filtered(tree: Any, wanted: Callable[[str, Any], bool] | None) -> Any:
    """The items of a dict that rank 0 wants, on all ranks; what is no dict there as it is."""
    ranks, names = saving_ranks(), None
    with ranks.together():
        if ranks.is_first and wanted is not None and isinstance(tree, dict):
            names = [name for name, value in tree.items() if wanted(name, value)]
    names = ranks.exchange(names)[0]  # of rank 0
    if names is None or not isinstance(tree, dict):
        return tree
    return {name: value for name, value in tree.items() if name in names}


def _models_in(state: Mapping[str, Any]) -> nn.Module:
    """A module that has the modules of ``state``, by the names that they have there."""
    models = nn.Module()
    # Not by `add_module`, which refuses some names.
    models._modules.update({name: item for name, item in state.items() if isinstance(item, nn.Module)})
    return models


def _by_names(optimizer: Optimizer, models: nn.Module) -> dict[str, Any]:
    return optimizer_state([optimizer], parameter_names(_model_of(optimizer, models)))


def _model_of(optimizer: Optimizer, models: nn.Module) -> nn.Module:
    """The one of ``models`` that has all parameters of ``optimizer``, or all together.

    Raises:
        ValueError: if there is no model.
    """
    if not models._modules:
        raise ValueError(
            f"state has {type(optimizer).__name__} without its model, and sharded checkpoints store its state by the "
            "model's names: pass both, state={'model': model, 'optimizer': optimizer}"
        )
    held = {*parameters_of(optimizer)}
    return next((model for model in models.children() if held <= {*model.parameters()}), models)


def _modules_first(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Modules before optimizers, whose state goes where the parameters are, which must have left the meta device."""
    return sorted(state.items(), key=lambda item: not isinstance(item[1], nn.Module))


def _refuse_unnamed(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"state should be a dict of objects by name, such as {{'model': model}}, not {state!r:.80}")


def _refuse_overlapping(state: Mapping[str, Any]) -> None:
    """
    Raises:
        TypeError: for a name that is no string.
        ValueError: for names such as "model" and "model.ema", which would be taken for one model with a part.
    """
    sharded = [name for name, item in state.items() if isinstance(item, (nn.Module, Optimizer))]
    if unnamed := [name for name in sharded if not isinstance(name, str)]:
        raise TypeError(f"state has the name {unnamed[0]!r}, and in a sharded checkpoint names are strings")
    for name in sharded:
        if outer := next((other for other in sharded if name.startswith(f"{other}.")), None):
            raise ValueError(
                f"state has {outer!r} and {name!r}, and sharded checkpoints store what {outer!r} has under names that "
                f"begin with '{outer}.': rename one of them, as to {name.replace('.', '_')!r}"
            )


def _check_names(state: Any, checkpoint: Any, strict: bool) -> None:
    if strict and (missing := [name for name in state if name not in checkpoint]):
        raise KeyError(
            f"the checkpoint does not have {', '.join(map(repr, missing))}; with strict=False these are left as they "
            "are"
        )


def _fill(state: dict[str, Any], name: str, value: Any) -> None:
    if callable(getattr(state[name], "load_state_dict", None)):
        state[name].load_state_dict(value)
    else:
        state[name] = value


class _FollowedParameter(nn.Parameter):
    """A parameter on the meta device whose sharded successor has values. Fabric refuses optimizers with parameters on
    the meta device before it calls `setup_optimizer`, which would move them."""

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False, since the successor has values."""
        return False


class _BackwardSyncControl:
    """How Fabric skips the reduction of gradients."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A context in which backward passes add up gradients without communication, if ``enabled``."""
        return without_gradient_sync(module) if enabled else nullcontext()


def _hand_on_zero_grad() -> None:
    """Let Fabric's wrappers of models and optimizers hand `zero_grad` on to what they wrap, as they do with the rest,
    under this strategy. They inherit one, which does not know of gradients that wait for their reduction."""

    def zero_grad_of(wrapper: Any, attribute: str) -> Callable[..., None]:
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            is_ours = isinstance(self._strategy, _FabricStrategy)
            zeroes: Any = getattr(self, attribute) if is_ours else super(wrapper, self)
            zeroes.zero_grad(*args, **kwargs)

        return zero_grad

    for namespace in installed_namespaces():
        for name, attribute in (("_FabricOptimizer", "_optimizer"), ("_FabricModule", "_forward_module")):
            wrapper = namespace.of("fabric", "wrappers", name)
            if "zero_grad" not in vars(wrapper):
                wrapper.zero_grad = zero_grad_of(wrapper, attribute)


def _hand_on_state_dict() -> None:
    """Let Fabric's wrappers of optimizers give the state that they load again, on every rank, under this strategy.

    They would ask for its `get_optimizer_state`, which is whole, for a file, and empty on all ranks but one.
    """

    def state_dict_like(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(own)
        def state_dict(self: Any) -> Any:
            return self.optimizer.state_dict() if isinstance(self._strategy, _FabricStrategy) else own(self)

        return state_dict

    for namespace in installed_namespaces():
        wrapper = namespace.of("fabric", "wrappers", "_FabricOptimizer")
        wrapper.state_dict = state_dict_like(wrapper.state_dict)


_hand_on_zero_grad()
_hand_on_state_dict()
_classes = StrategyClasses("FullyShardedStrategy", _FabricStrategy)
FullyShardedStrategy: Any = _classes.first
strategy_for = _classes.strategy_for

"""Fully sharded training with Lightning's Trainer: ``Trainer(strategy="shardwise")``.

Importing this module registers the strategy as ``shardwise`` and ``ddp_fully_sharded``, with the Trainers of both
`lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from .adapters.copies import allow_copies, forbid_copies
from .adapters.policies import Policy
from .adapters.whole import gather_in
from .adapters.wrapping import (
    show_shards,
    take_whole_tensors,
    without_gradient_sync,
    zero_what_waits,
)
from .arguments import check_arguments, check_flag, documented
from .checkpoint.atomic import is_url
from .checkpoint.full_state import full_state_dict
from .checkpoint.model_state import model_state
from .checkpoint.names import parameter_names
from .checkpoint.optimizer_state import optimizer_state
from .checkpoint.peers import Peers
from .checkpoint.ranks import saving_ranks
from .core.root import unit_of
from .init import init_on_meta, materialize
from .lightning_common.arguments import TRAINER_ARGUMENTS, checked_state_dict_type
from .lightning_common.files import (
    Kind,
    SavedDirectory,
    agreed_kind,
    place_of,
    prepare_file,
    read_file,
    write_directory,
    write_file,
)
from .lightning_common.layers import change_layers
from .lightning_common.namespaces import StrategyClasses
from .lightning_common.optimizers import (
    WITHOUT_PARAMETERS,
    attach,
    full_optimizer_state,
    load_full_optimizer_state,
    refuse_strangers,
)
from .lightning_common.precision import sharded_precision, use_device
from .lightning_common.processes import ProcessesStrategy
from .lightning_common.units import Sharding, move_metrics
from .lightning_common.weights import load_values


@documented(TRAINER_ARGUMENTS)
class _TrainerStrategy(ProcessesStrategy):
    """Parameters, gradients and optimizer state of a LightningModule in shards over all processes.

    ``Trainer(strategy="shardwise", accelerator="cpu" | "gpu", devices=N)``, or with an instance of this class. The
    module stays the same object, with parameters of the same names: DTensors, of which each rank has a part. Steps
    see them whole.
    """

    part = "pytorch"
    strategy_name = "ddp_fully_sharded"
    names = ("shardwise", "ddp_fully_sharded")

    def __init__(
        self,
        accelerator: Any = None,
        cpu_offload: bool = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        bucket_cap_mb: int = 25,
        min_num_params: int = 100_000_000,
        state_dict_to_cpu: bool = True,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        *,
        timeout: timedelta | None = default_pg_timeout,
        auto_wrap_policy: Policy | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        activation_checkpointing_policy: Policy | None = None,
        state_dict_type: str = "full",
        process_group: dist.ProcessGroup | None = None,
    ):
        check_arguments(_TrainerStrategy.__init__, "DDPFullyShardedStrategy", TRAINER_ARGUMENTS, locals())
        if move_grads_to_cpu is not None and move_grads_to_cpu != cpu_offload:
            raise ValueError(
                f"move_grads_to_cpu={move_grads_to_cpu} with cpu_offload={cpu_offload}: gradients are kept where their "
                "parameters are; leave it None"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._init_processes(process_group_backend, timeout, process_group)
        self.cpu_offload, self.move_grads_to_cpu = cpu_offload, move_grads_to_cpu
        self.flatten_parameters, self.bucket_cap_mb = flatten_parameters, bucket_cap_mb
        self.reshard_after_forward, self.min_num_params = reshard_after_forward, min_num_params
        self.fp32_reduce_scatter, self.compute_dtype, self.mp_policy = fp32_reduce_scatter, compute_dtype, mp_policy
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.state_dict_device = torch.device("cpu") if state_dict_to_cpu else None
        self.state_dict_type = checked_state_dict_type(state_dict_type)
        _ = self.sharding  # raises now if the arguments are wrong
        self._saved: SavedDirectory | None = None

    @property
    def sharding(self) -> Sharding:
        """How units are made, by the strategy's attributes as they are now.

        Raises:
            TypeError: for an argument of a wrong type.
            ValueError: for arguments that contradict each other.
        """
        return Sharding(
            reshard_after_forward=self.reshard_after_forward,
            precision=_precision_policy(self.mp_policy, self.compute_dtype, self.fp32_reduce_scatter),
            offload=self.cpu_offload,
            policy=self.auto_wrap_policy,
            min_num_params=self.min_num_params,
            checkpointing=self.activation_checkpointing_policy,
        )

    # -- Precision and processes

    @property
    def precision_plugin(self) -> Any:
        """The plugin that the Trainer uses."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = sharded_precision(plugin, self.namespace)

    def setup_environment(self) -> None:
        """Join the process group, and tell the module its device mesh."""
        super().setup_environment()
        use_device(self.precision_plugin, self.root_device)
        self.lightning_module._device_mesh = self.device_mesh
        if self._averages():  # callbacks copy the module before `setup`
            allow_copies(self.lightning_module)
            if self.lightning_module.trainer.state.fn == "fit":
                materialize(self.lightning_module)

    def set_world_ranks(self) -> None:
        """Tell Lightning which process this is."""
        if self.cluster_environment is not None:
            self._set_world_ranks()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` summed up or averaged over processes, in place; anything else as it is."""
        return self._reduce(tensor, group, reduce_op)

    # -- The model

    def connect(self, model: Any) -> None:
        """
        Raises:
            MisconfigurationException: if the module has lost its parameters to an earlier wrapping.
        """
        if not any(True for _ in model.parameters()) and not self._builds_later(model):
            error = self.namespace.of("pytorch", "utilities.exceptions", "MisconfigurationException")
            raise error(
                f"{type(model).__name__} has no parameters. Using the same instance of a model that an earlier run has "
                "wrapped and emptied is not supported: please reinitialize your LightningModule and pass that. If it "
                "makes its layers later, let it do so in configure_model()"
            )
        super().connect(model)

    def _builds_later(self, model: Any) -> bool:
        return any(self._overrides(hook, model) for hook in ("configure_model", "configure_sharded_model", "setup"))

    def _overrides(self, hook: str, owner: Any) -> bool:
        """Whether ``owner``, a module or a callback, has a ``hook`` of its own."""
        is_overridden = self.namespace.of("pytorch", "utilities.model_helpers", "is_overridden")
        try:
            return bool(is_overridden(hook, owner))
        except AttributeError:  # a callable object, which has no code to compare
            return True

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Inside, with ``empty_init``, modules get no memory for parameters; `setup` gives them their values."""
        with init_on_meta() if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Inside, ``wrap`` and ``auto_wrap`` of `shardwise.fairscale`, and torch's ``wrap``, make units. A collective:
        what fails inside on one rank is raised on all.

        The ranks agree over connections of their own, since the module's hooks may use the process group.
        """
        with saving_ranks().together(), self.sharding.wrapping(self.device_mesh):
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the module, and make the optimizers."""
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == "fit"
        self.model = self.lightning_module
        if is_fitting and self._layer_sync:
            self.model = change_layers(self.model, self._layer_sync.apply)
        self.model = self.precision_plugin.convert_module(self.model)
        if is_fitting:
            # Before anything is sharded, so that one that is refused leaves the module as it was.
            self.setup_optimizers(trainer)
        try:
            self._setup_model(self.model)
        except BaseException:
            self._reset_optimizers_and_schedulers()
            raise
        for optimizer in self._own_optimizers():
            attach(optimizer)
        forbid_copies(self.model)
        for average in self._averages():
            if isinstance(average, AveragedModel):
                self._setup_average(average.module)
        self.barrier()
        self.setup_precision_plugin()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        # Manual optimization calls submodules by themselves, outside of the module's forward.
        by_hand = not getattr(model, "automatic_optimization", True)
        self.sharding.shard(model, self.device_mesh, children_too=by_hand)
        materialize(model)
        move_metrics(model, self.root_device)
        return model

    def _averages(self) -> list[Any]:
        """Of Lightning's `WeightAveraging` callbacks; None of one that has none yet."""
        callbacks = self.lightning_module.trainer.callbacks
        return [callback._average_model for callback in callbacks if hasattr(callback, "_average_model")]

    def _setup_average(self, model: nn.Module) -> None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            take_whole_tensors(model)  # a copy of a module that an earlier run has sharded
        else:
            self._setup_model(model)

    def model_to_device(self) -> None:
        """Nothing: sharding puts each part where it belongs, without the whole on the device."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, of the module's parameters, whether they are sharded already or not.

        Raises:
            ValueError: on all ranks, if an optimizer has none of them; no optimizers are kept then.
        """
        self._reset_optimizers_and_schedulers()
        try:
            with Peers(self.device_mesh).together():
                super().setup_optimizers(trainer)
                refuse_strangers(self._own_optimizers(), self.model)
            for optimizer in (*self._own_optimizers(), *self._lightning_optimizers):  # those have copied methods
                zero_what_waits(optimizer)
        except BaseException as error:
            self._reset_optimizers_and_schedulers()
            if isinstance(error, ValueError) and "optimizer got an empty parameter list" in str(error):
                raise ValueError(f"an optimizer {WITHOUT_PARAMETERS}") from error
            raise

    def _own_optimizers(self) -> list[Optimizer]:
        """The optimizers, without Lightning's stand-in for none."""
        none = self.namespace.of("pytorch", "core.optimizer", "_MockOptimizer")
        return [optimizer for optimizer in self.optimizers if not isinstance(optimizer, none)]

    # -- Steps

    def _step(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a step of the module inside the forward of its unit, so that it sees whole parameters; but for a training
        step with manual optimization, whose backward passes are inside."""
        module = self.lightning_module
        step, unit = getattr(module, name), unit_of(self.model)
        if unit is None:
            return step(*args, **kwargs)
        by_hand = name == "training_step" and not module.automatic_optimization
        if by_hand:
            with _naming_sharded(module):
                result = step(*args, **kwargs)
        else:
            result = unit.run(self.model, step, args, kwargs)
        # Hooks, also those before the backward, callbacks and another run expect sharded parameters.
        show_shards(self.model)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; with automatic optimization, inside the forward of the root unit."""
        with self.precision_plugin.train_step_context():
            return self._step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as `training_step`."""
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as `training_step`."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as `training_step`."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", args, kwargs)

    def process_dataloader(self, dataloader: object) -> object:
        """Nothing, if ranks that predict together have as many batches, which Lightning's sampler does not see to; of a
        loader without a length nobody knows.

        Raises:
            ValueError: on all ranks, if they do not: one would wait in a step for another that has ended.
        """
        if (trainer := self.lightning_module.trainer).predicting:
            self._refuse_uneven(dataloader, trainer.limit_predict_batches)
        return dataloader

    def _refuse_uneven(self, dataloader: Any, limit: int | float) -> None:
        ranks, batches = saving_ranks(), None
        with ranks.together():
            length = self.namespace.of("fabric", "utilities.data", "sized_len")(dataloader)
            if length is not None:
                batches = min(length, limit) if isinstance(limit, int) else int(length * limit)
        everywhere = ranks.exchange((dist.get_process_group_ranks(self.process_group), batches))
        for group, _ in everywhere:
            counts = {rank: everywhere[rank][1] for rank in group}
            if None not in counts.values() and len(set(counts.values())) > 1:
                raise ValueError(
                    f"ranks have different numbers of batches to predict ({counts}, by rank), and each is a step of "
                    "all: choose a number of samples that the ranks divide evenly, limit_predict_batches, or pass a "
                    "loader with torch's DistributedSampler, which repeats samples at the end"
                )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients of backward passes are added up without communication, unless something looks at them after
        each of the Trainer's own: added up so they are not yet the parameters'."""
        with nullcontext() if self._shows_gradients() else without_gradient_sync(self.model):
            yield

    def _shows_gradients(self) -> bool:
        module = self.lightning_module
        owners = (module, *module.trainer.callbacks) if module.automatic_optimization else ()
        return any(self._overrides("on_after_backward", owner) for owner in owners)

    # -- Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank reads its part, so the model is sharded first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict, under the names of the module. A collective.

        Returns:
            With ``state_dict_type="full"`` whole tensors on rank 0, and nothing elsewhere; with "sharded" DTensors.
        """
        if self.state_dict_type == "full":
            return full_state_dict(self.lightning_module, cpu=self.state_dict_device is not None)
        return model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict. A collective.

        Returns:
            With ``state_dict_type="full"`` as one process would have it, on rank 0; with "sharded" by parameter names.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if not self._own_optimizers():
            return optimizer.state_dict()  # the stand-in's, which is empty
        if self.state_dict_type == "full":
            return full_optimizer_state(optimizer, keeps=self.is_global_zero)
        return optimizer_state([optimizer], parameter_names(self.lightning_module))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file, or a directory if it is sharded. A collective.

        Raises:
            IsADirectoryError: if a full one is to replace a directory that is not a checkpoint.
            OSError: if it cannot be written; on all ranks.
            TypeError: for ``storage_options`` with a sharded one.
        """
        path = self.broadcast(filepath)
        if self.state_dict_type == "full":
            # Callbacks may have added sharded tensors, such as averages.
            checkpoint = gather_in(checkpoint, keeps=self.is_global_zero)
            write = functools.partial(super().save_checkpoint, checkpoint, storage_options=storage_options)
            with saving_ranks().together():
                if not self._uses_files(path):
                    if self.is_global_zero:
                        prepare_file(path)
                    write(path)
                elif self.is_global_zero:
                    write_file(place_of(path), write)
            return
        if storage_options is not None:
            raise TypeError("storage_options are for the CheckpointIO plugin, which sharded checkpoints do not use")
        rest = dict(checkpoint)
        sharded = {"model": rest.pop("state_dict")}
        for index, state in enumerate(rest.pop("optimizer_states", [])):
            sharded[f"optimizer_{index}"] = state
        write_directory(place_of(path), sharded, gather_in(rest, keeps=self.is_global_zero))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either kind; of a full one, tensors are read where they are needed. A collective."""
        path = self.broadcast(checkpoint_path)
        self._saved = None
        try:
            return self._read_checkpoint(path, weights_only)
        except UnpicklingError as error:
            error.add_note(
                "shardwise: Lightning does not hand weights_only of fit, validate, test and predict on to strategies "
                "that load after setting up: allow the types by torch.serialization.add_safe_globals"
            )
            raise

    def _read_checkpoint(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        kind = agreed_kind(Path(path))
        if kind is Kind.SHARDED:
            self._saved = SavedDirectory(Path(path), weights_only=weights_only)
            checkpoint = self._saved.metadata(required=True)
            # Lightning looks whether these keys are there; the values are read later.
            checkpoint.setdefault("state_dict", {})
            count = next(index for index in itertools.count() if not self._saved.has(f"optimizer_{index}"))
            if count or not self._own_optimizers():
                checkpoint.setdefault("optimizer_states", [{}] * count)
            return checkpoint
        if self._uses_files(path) and kind is not Kind.NOTHING:
            return read_file(Path(path), weights_only=weights_only)
        loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)
        return loaded

    def _uses_files(self, path: Any) -> bool:
        """Whether a full checkpoint at ``path`` is a file that `torch.load` can map, not what a plugin makes of it."""
        default = self.namespace.of("fabric", "plugins.io.torch_io", "TorchCheckpointIO")
        return type(self.checkpoint_io) is default and not is_url(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module the weights of a checkpoint."""
        if self._saved is not None:
            self._saved.load_model("model", self.lightning_module, strict=strict)
            # For callbacks, which run next and expect what a full checkpoint has.
            checkpoint["state_dict"].update(model_state(self.lightning_module))
        else:
            load_values(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers the state of a checkpoint.

        Raises:
            RuntimeError: if it has the state of another number of optimizers.
        """
        saved, optimizers = self._saved, self._own_optimizers()
        if not optimizers:
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(optimizers):
            raise RuntimeError(
                f"there are {len(optimizers)} optimizers, and the checkpoint has the state of {len(states)}: resume "
                "with as many as it was saved with"
            )
        self._add_param_groups_again()
        for index, optimizer in enumerate(optimizers):
            if saved is not None:
                saved.load_optimizer(f"optimizer_{index}", optimizer, self.lightning_module)
            else:
                load_full_optimizer_state(optimizer, states[index])

    def _add_param_groups_again(self) -> None:
        """Repeat what finetuning callbacks do in `on_fit_start`. That needs their state, which this strategy loads
        only afterwards."""
        module = self.lightning_module
        finetuning = self.namespace.of("pytorch", "callbacks", "BaseFinetuning")
        for callback in module.trainer.callbacks:
            if isinstance(callback, finetuning):
                # The base class's method: an override in a subclass has been called already.
                finetuning.on_fit_start(callback, module.trainer, module)

    def teardown(self) -> None:
        """Release what the run needed; the module stays sharded, on its device."""
        self._saved = None
        module = self.lightning_module
        if module is not None:
            forbid_copies(module)
        if self._layer_sync and module is not None and module._trainer is not None and module.trainer.state.fn == "fit":
            self.model = change_layers(module, self._layer_sync.revert)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


@contextmanager
def _naming_sharded(module: nn.Module) -> Iterator[None]:
    """Inside, torch's error about sharded parameters among plain tensors names those of ``module`` itself."""
    try:
        yield
    except RuntimeError as error:
        names = [name for name, parameter in module.named_parameters(recurse=False) if isinstance(parameter, DTensor)]
        if names and "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                f"shardwise: with manual optimization training_step runs outside of the forward of "
                f"{type(module).__name__.removeprefix('FSDP')}, so that its own parameters ({', '.join(names)}) are "
                "sharded there: use them in forward() and call self(...), or call self.unshard() before each use"
            )
        raise


def _precision_policy(
    given: MixedPrecisionPolicy | None, compute_dtype: torch.dtype | None, fp32_reduce_scatter: bool | None
) -> MixedPrecisionPolicy:
    if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
        raise TypeError(f"compute_dtype must be a torch.dtype, not {compute_dtype!r}")
    if compute_dtype is not None and not (compute_dtype.is_floating_point or compute_dtype.is_complex):
        raise ValueError(f"compute_dtype must be a floating-point dtype, such as torch.bfloat16, not {compute_dtype}")
    check_flag("DDPFullyShardedStrategy", "fp32_reduce_scatter", fp32_reduce_scatter)
    if given is None:
        return MixedPrecisionPolicy(compute_dtype, torch.float32 if fp32_reduce_scatter else compute_dtype)
    if compute_dtype is not None or fp32_reduce_scatter is not None:
        raise ValueError("mp_policy sets what compute_dtype and fp32_reduce_scatter set: pass one or the other")
    return given


# Lightning checks for FSDPStrategy to pass precision on as it was given, to allow compiled modules, and to refuse
# callbacks that need whole parameters. All of that applies to this strategy too.
_classes = StrategyClasses("DDPFullyShardedStrategy", _TrainerStrategy, kinds=["FSDPStrategy"])
DDPFullyShardedStrategy: Any = _classes.first
strategy_for = _classes.strategy_for

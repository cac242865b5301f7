"""How the wrapped model's units are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mmengine.model import BaseDataPreprocessor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy, OffloadPolicy

from ..adapters.policies import chooser
from ..adapters.wrapping import (
    modules_with_units,
    refuse_foreign,
    refuse_uncuttable,
    share_values,
    take_whole_tensors,
)
from ..checkpoint.peers import Peers
from ..core.mesh import mesh_device
from ..core.root import is_never_called, unit_of
from ..fairscale.wrap import auto_wrap, enable_wrap
from ..fully_shard import fully_shard
from .arguments import Precision, Strategy
from .policies import Policy


@dataclass(frozen=True)
class Units:
    """How a model's units are made.

    Args:
        mesh: ranks to shard over.
        strategy: what is sharded.
        precision: dtypes.
        offload: whether state is kept on the host.
        policy: chooses units beside the model itself; None for no others.
        ignored_modules: are neither units nor asked about.
        ignored_parameters: stay as they are.
        prefetch: when units are gathered in backward.
    """

    mesh: DeviceMesh
    strategy: Strategy = field(default_factory=Strategy)
    precision: Precision = field(default_factory=Precision)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    policy: Policy | None = None
    ignored_modules: set[nn.Module] = field(default_factory=set)
    ignored_parameters: set[nn.Parameter] = field(default_factory=set)
    prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE

    def make(self, model: nn.Module) -> None:
        """Make units of the modules that the policy chooses, and at last of ``model``, in place.

        Modules that are units already stay as they are; the policy is then not asked. All ranks begin with the values
        of the first one. Every refusal, the policy's too, is raised on all ranks, before anything is changed.

        Raises:
            TypeError: naming a module that another library has wrapped.
            ValueError: naming a tensor or a setting in which ranks differ, or a parameter that cannot be cut; listing
                modules and parameters that not all ranks choose, or ignore.
        """
        chosen: dict[nn.Module, MixedPrecisionPolicy] = {}
        with Peers(self.mesh).together():
            refuse_foreign(model)
            if unit_of(model) is None:
                refuse_uncuttable(model, self.ignored_parameters)
                chosen = self._chosen(model)
                chosen.setdefault(model, self.precision.root)
        if chosen:
            for parameter in self.ignored_parameters:
                if not parameter.is_meta:  # or `materialize` puts it there
                    parameter.data = parameter.to(mesh_device(self.mesh))
            choices: dict[str, Iterable[nn.Module | nn.Parameter]] = {
                "ignored_modules": self.ignored_modules,
                "ignored_parameters": self.ignored_parameters,
                "auto_wrap_policy": [*modules_with_units(model), *chosen],
            }
            settings = {
                "sharding_strategy": self.strategy,
                "mixed_precision": self.precision,
                "backward_prefetch": self.prefetch.name,
            }
            share_values(model, self.mesh, choices, settings)
        for module, precision in chosen.items():
            self._wrap(module, precision, is_root=module is model)
        take_whole_tensors(model)
        if self.prefetch is BackwardPrefetch.BACKWARD_POST:
            for unit in modules_with_units(model):
                unit.set_modules_to_backward_prefetch([unit])  # that is, no other one

    def _chosen(self, model: nn.Module) -> dict[nn.Module, MixedPrecisionPolicy]:
        """The modules inside ``model`` to wrap, those inside others first, and the dtypes of each."""
        chosen, dtype = {}, self.precision.policy.param_dtype
        for module in reversed(list(model.modules())):
            # Called by itself, outside of the forward of the model.
            if isinstance(module, BaseDataPreprocessor) and next(module.parameters(), None) is not None:
                chosen[module] = self.precision.policy
            elif dtype is not None and self.precision.exempts(module) and module not in self.ignored_modules:
                # It computes in its own dtype, as in torch's FullyShardedDataParallel.
                chosen[module] = MixedPrecisionPolicy(next(module.parameters()).dtype, output_dtype=dtype)
        if self.policy is None or modules_with_units(model):
            return chosen

        policy, settled = chooser(self.policy), {*self.ignored_modules, *chosen}

        def choose(module: nn.Module, recurse: bool, **asked: Any) -> bool:
            if module in settled or (not recurse and is_never_called(module)):
                return False
            # The model itself is wrapped last.
            return (recurse or module is not model) and policy(module=module, recurse=recurse, **asked)

        def note(module: nn.Module) -> nn.Module:
            chosen[module] = self.precision.policy
            return module

        with enable_wrap(choose, wrapper_cls=note):
            auto_wrap(model)
        return chosen

    def _wrap(self, module: nn.Module, precision: MixedPrecisionPolicy, *, is_root: bool) -> None:
        if unit_of(module) is None:
            reshards = self.strategy.reshard_after_forward
            fully_shard(
                module,
                mesh=self.mesh,
                # The root's parameters are needed at once in backward, so by default it keeps them.
                reshard_after_forward=None if is_root and reshards else reshards,
                mp_policy=precision,
                offload_policy=self.offload,
                ignored_params=self.ignored_parameters,
                placements=self.strategy.placements,
            )

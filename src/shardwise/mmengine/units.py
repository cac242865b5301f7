"""How the wrapped model's units are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from mmengine.model import BaseDataPreprocessor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from ..adapters.wrapping import (
    chooser,
    refuse_foreign,
    share_values,
    take_whole_tensors,
    units_in,
)
from ..core.device import mesh_device
from ..core.module import unit_of
from ..core.root import is_never_called
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
        policy: chooses units beside the model itself; None for no other.
        ignored_modules: are neither units nor asked about.
        ignored_parameters: stay as they are.
    """

    mesh: DeviceMesh
    strategy: Strategy = field(default_factory=Strategy)
    precision: Precision = field(default_factory=Precision)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    policy: Policy | None = None
    ignored_modules: set[nn.Module] = field(default_factory=set)
    ignored_parameters: set[nn.Parameter] = field(default_factory=set)

    def make(self, model: nn.Module) -> None:
        """Make units of the modules that the policy chooses, and at last of ``model``, in place.

        Modules that are units already stay as they are, and the policy then is not asked. All ranks begin with the
        values of the first one.

        Raises:
            TypeError: naming a module that another library has wrapped.
            ValueError: naming what ranks have differently.
        """
        refuse_foreign(model)
        if unit_of(model) is None:
            for parameter in self.ignored_parameters:
                parameter.data = parameter.to(mesh_device(self.mesh))
            share_values(model, self.mesh)
            self._make_inside(model)
            self._wrap(model, self.precision.root, is_root=True)
        take_whole_tensors(model)

    def _make_inside(self, model: nn.Module) -> None:
        policy = None if units_in(model) else self.policy
        for module in model.modules():
            # Called by itself, outside of the forward of the model.
            if isinstance(module, BaseDataPreprocessor) and next(module.parameters(), None) is not None:
                self._wrap(module)
            elif self.precision.exempts(module) and self.precision.policy.param_dtype is not None:
                self._wrap_exempt(module)
        if policy is not None:
            choose = functools.partial(self._choose, model, chooser(policy))
            with enable_wrap(choose, wrapper_cls=self._wrap):
                auto_wrap(model)

    def _wrap(
        self, module: nn.Module, precision: MixedPrecisionPolicy | None = None, *, is_root: bool = False
    ) -> nn.Module:
        if unit_of(module) is None:
            reshards = self.strategy.reshard_after_forward
            fully_shard(
                module,
                mesh=self.mesh,
                # The root's parameters are needed at once in backward, so by default it keeps them.
                reshard_after_forward=None if is_root and reshards else reshards,
                mp_policy=self.precision.policy if precision is None else precision,
                offload_policy=self.offload,
                ignored_params=self.ignored_parameters,
                placements=self.strategy.placements,
            )
        return module

    def _wrap_exempt(self, module: nn.Module) -> None:
        """A unit that computes in its own dtype, as in torch's FullyShardedDataParallel."""
        if module not in self.ignored_modules:
            own = next(module.parameters()).dtype
            self._wrap(module, MixedPrecisionPolicy(own, output_dtype=self.precision.policy.param_dtype))

    def _choose(
        self,
        model: nn.Module,
        policy: Callable[..., bool],
        module: nn.Module,
        recurse: bool,
        unwrapped_params: int,
        module_is_root: bool,
    ) -> bool:
        """``policy``, which is neither asked about what is ignored, nor about ``model``, which is wrapped last."""
        if module in self.ignored_modules or (module is model and not recurse) or unit_of(module) is not None:
            return False
        if not recurse and is_never_called(module):
            return False
        return policy(module, recurse, unwrapped_params, module_is_root)

"""Values for what has no history: the modules' own initializers run once more, recorded as a constructor is.

While they run, whole tensors without memory stand in for all parameters and buffers, wrapped modules are of their own
class again, and what has values already is out of reach. So initializers need not know that anything is sharded, and
what they do is replayed as a constructor is: one tensor at a time, alike at any world size.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import StateError
from ..core.parameter import marks_of
from ..sites import Site, before_sharding, sites_by_tensor
from .context import MARK, finish, recording
from .record import Record, View
from .recorder import Recorder
from .streams import Position
from .targets import Target

InitFn = Callable[[nn.Module], Any]


def record_initializers(
    names: Mapping[nn.Module, str], targets: Sequence[Target], init_fn: InitFn | None, entry: Position | None
) -> tuple[Record, list[View]]:
    """Record what initializers do.

    Args:
        names: of the modules, children first.
        targets: what is to be initialized.
        init_fn: the user's, which goes before the modules' own.
        entry: where the host's generator is to stand at the beginning, if not where it is.

    Returns:
        The record, and for each target its view there.

    Raises:
        StateError: naming the tensors that nothing initializes.
    """
    recorder = Recorder()
    recorder.record.is_of_constructor = False
    try:
        with recording(recorder, entry), torch.no_grad(), before_sharding(names, _stand_ins(names)):
            _Initialization(recorder, names, targets).run(init_fn)
            views = [_final_view(recorder, target) for target in targets]
        missing = [target for target, view in zip(targets, views, strict=True) if view is None]
        if missing:
            raise StateError(uninitialized(missing, names))
        found = [view for view in views if view is not None]
        finish(recorder, {view.storage for view in found})
    except BaseException:
        recorder.abandon()
        raise
    return recorder.record, found


def _stand_ins(modules: Iterable[nn.Module]) -> list[tuple[Site, torch.Tensor]]:
    """Tensors whose writes nobody sees, for everything that is registered in ``modules``; to be recorded."""
    found: list[tuple[Site, torch.Tensor]] = []
    for sites in sites_by_tensor(modules).values():
        stand_in = _stand_in(sites[0].get())
        found += [(site, stand_in) for site in sites]
    return found


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):  # has neither a shape nor values
        return tensor
    # On the host, whose numbers are the same everywhere and are those of a plain constructor.
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return whole if tensor.is_meta else tensor.clone()
    parameter = nn.Parameter(whole, tensor.requires_grad)
    parameter.__dict__.update({key: value for key, value in marks_of(tensor).items() if key != MARK})
    return parameter


class _Initialization:
    """One run of initializers over the modules that have, or contain, targets."""

    def __init__(self, recorder: Recorder, names: Mapping[nn.Module, str], targets: Sequence[Target]):
        self._recorder, self._names = recorder, names
        self._own: dict[nn.Module, list[Site]] = defaultdict(list)
        for target in targets:
            for site in target.sites:
                self._own[site.module].append(site)

    def run(self, init_fn: InitFn | None) -> None:
        """Call ``init_fn`` on each module with targets. What it leaves is initialized as constructors do it, inner
        modules first: each resets its parameters, and then calls its ``_init_weights()``, or applies its
        ``_init_weights(module)`` to all modules inside to which no inner one has applied its own."""
        by_user: set[nn.Module] = set()
        done: set[nn.Module] = set()
        for module in self._names:
            if init_fn is not None and module in self._own:
                self._call(init_fn, "init_fn", module)
                if self._is_complete(module):
                    by_user.add(module)
            initialize = getattr(module, "_init_weights", None)
            applied = initialize if callable(initialize) and _takes_module(initialize) else None
            if self._is_to_be_reset(module, by_user):
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                for name, own in (("reset_parameters", reset), ("_init_weights", None if applied else initialize)):
                    if callable(own):
                        self._call(lambda _, own=own: own(), name, module)  # type: ignore[misc]
            if applied is not None:
                inside = set(module.modules()) - done
                done |= inside
                for inner in self._names:
                    if inner in inside and self._is_left(inner, by_user):
                        self._call(applied, "_init_weights", inner)

    def _is_left(self, module: nn.Module, by_user: set[nn.Module]) -> bool:
        """Whether ``init_fn`` left ``module`` to itself. One without targets may initialize those of modules inside,
        unless ``init_fn`` has initialized any."""
        if by_user or module in self._own:
            return module in self._own and module not in by_user
        return any(inner in self._own for inner in module.modules())

    def _is_to_be_reset(self, module: nn.Module, by_user: set[nn.Module]) -> bool:
        return self._is_left(module, by_user) and not (module in self._own and self._is_complete(module))

    def _is_complete(self, module: nn.Module) -> bool:
        return all(_is_written(self._recorder, site.get()) for site in self._own[module])

    def _call(self, function: Callable[[nn.Module], Any], name: str, module: nn.Module) -> None:
        try:
            function(module)
        except Exception as error:
            error.add_note(f"shardwise: in {name} of {_described(module, self._names)}, called by materialize")
            raise


def _takes_module(initialize: Callable[..., Any]) -> bool:
    """Whether ``initialize`` is called with the module to initialize, and not with nothing."""
    try:
        parameters = inspect.signature(initialize).parameters.values()
    except ValueError:  # it does not tell
        return True
    return any(
        parameter.kind is parameter.VAR_POSITIONAL
        or (parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD)
        for parameter in parameters
    )


def _is_written(recorder: Recorder, tensor: torch.Tensor) -> bool:
    number = recorder.number_of(tensor)
    return recorder.record.is_written(number) if number is not None else not tensor.is_meta


def _final_view(recorder: Recorder, target: Target) -> View | None:
    """Where the values of ``target`` are after initialization; None if nothing wrote any."""
    for site in target.sites:
        tensor = site.get()
        if not _is_written(recorder, tensor):
            continue
        if tuple(tensor.shape) != target.shape:
            raise StateError(
                f"{target.name!r} has shape {target.shape}, and its initializer made it {tuple(tensor.shape)}"
            )
        number = recorder.number_of(tensor)
        return recorder.view_of(tensor) if number is not None else View.of(tensor, recorder.constant(tensor))
    return None


def _described(module: nn.Module, names: Mapping[nn.Module, str]) -> str:
    kind = type(module).__name__.removeprefix("FSDP")
    return f"module {names[module]!r} ({kind})" if names.get(module) else f"the root module ({kind})"


def uninitialized(missing: Sequence[Target], names: Mapping[nn.Module, str]) -> str:
    """The message of the error for ``missing``, which nothing initializes."""
    by_module: dict[nn.Module, list[str]] = defaultdict(list)
    for target in missing:
        site = target.sites[0]
        by_module[site.module].append(f"{'buffer' if site.is_buffer else 'parameter'} {site.name!r}")
    lines = [f"{_described(module, names)}: {', '.join(found)}" for module, found in by_module.items()]
    return (
        "nothing initializes these tensors on the meta device: "
        + "; ".join(lines)
        + ". Build the model under shardwise.init_on_meta(), give the module a reset_parameters() that writes them, "
        "pass init_fn to materialize, or load a checkpoint"
    )

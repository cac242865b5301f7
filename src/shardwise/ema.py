"""An exponential average of a model's parameters, sharded as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .checkpoint.names import parameter_names
from .core.device import copy_each, local_of, move_each, not_inference, shard_like, spec_of, wrap_local
from .core.errors import StateError
from .core.flat import refuse_flat
from .core.parameter import note_writes, refuse_lazy
from .core.root import units_of
from .core.shards import is_cut_alike


class EMA:
    """Keeps ``average = decay * average + (1 - decay) * parameter`` of a model's trainable parameters.

    Each rank averages its shards: no communication, and memory of one more set of shards. Frozen parameters, and
    buffers, are not averaged: a swapped model uses them as they are. The average of a parameter that is unfrozen later
    starts at the next update.

        ema = shardwise.EMA(model, 0.999)
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.swap():
            evaluate(model)
        ...
        shardwise.save(directory, model=model, optimizer=optimizer, extra={"ema": ema})
        shardwise.load(directory, model=model, optimizer=optimizer, extra={"ema": ema})

    Args:
        model: sharded or not; its parameters have values, which the average starts from.
        decay: between 0 (the average follows at once) and 1 (it never changes).
        dtype: of the average, such as float32 for parameters in bfloat16, whose own resolution is too coarse for
            small changes; by default that of each parameter, which complex ones always keep.

    Raises:
        StateError: if parameters are on the meta device, or without values.
        TypeError: for an argument of a wrong type.
        ValueError: if ``decay`` is out of range, ``dtype`` is not a floating-point one, or a lazy module has not run.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, dtype: torch.dtype | None = None):
        if not isinstance(model, nn.Module):
            raise TypeError(f"EMA takes a module, not {type(model).__name__}")
        self.decay, self.updates = decay, 0
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, not {dtype!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}: an average needs a floating-point dtype")
        self._model, self._dtype = model, dtype
        self._averages: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] | None = None
        self._start_averages(self._named())

    @property
    def decay(self) -> float:
        """Between 0 (the average follows at once) and 1 (it never changes); another one holds from the next update on.

        Raises:
            TypeError: if it is set to what is no number.
            ValueError: if it is set to one out of range.
        """
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        _check_decay(decay)
        self._decay = float(decay)

    # -- Averaging

    def _named(self) -> dict[torch.Tensor, list[str]]:
        """The parameters as they are registered now, with their names."""
        _register_sharded(self._model)
        return parameter_names(self._model)

    def _start_averages(self, named: Mapping[torch.Tensor, list[str]]) -> None:
        """Start those of trainable parameters that have none yet."""
        averaged = self._averages.keys()
        with torch.no_grad(), not_inference():
            for parameter, names in named.items():
                if parameter.requires_grad and averaged.isdisjoint(names):
                    self._averages[names[0]] = self._first_average(names[0], parameter)

    def _first_average(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        dtype = parameter.dtype if self._dtype is None or parameter.is_complex() else self._dtype
        return _copy_of(name, parameter, dtype)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters as they are now; call it after each optimizer step.

        Raises:
            RuntimeError: while they are swapped.
            StateError: if the model does not have the parameters any more that the average was made of.
        """
        self._check_not_swapped("update()")
        named = self._named()
        self._start_averages(named)
        parameters = self._averaged(named)
        averages = self._locals(self._averages.values())
        values = [
            local if local.dtype == a.dtype else local.to(a.dtype)
            for a, local in zip(averages, self._locals(parameters), strict=True)
        ]
        move_each(averages, values, 1.0 - self.decay)
        self.updates += 1

    def swap(self) -> contextlib.ExitStack:
        """Exchange the model's parameters with their averages; the next call exchanges them back.

        Returns:
            A context manager that exchanges them back at its end, if that has not been done by then:
            ``with ema.swap(): ...``. Meanwhile the average stays as it is, and so does its state dict; but what is
            saved of the model is averaged.

        Raises:
            StateError: if the model does not have the parameters any more that the average was made of.
        """
        parameters = self._averaged(self._named())
        locals_ = self._locals(parameters)
        # Before the write, which must not overtake copies of offloaded shards to the device.
        note_writes(parameters)
        with torch.no_grad(), not_inference():
            if self._kept is None:
                # Before the copy, so that one which is interrupted is undone.
                self._kept = [local.clone() for local in locals_]
                copy_each(locals_, self._locals(self._averages.values()))
            else:
                copy_each(locals_, self._kept)
                self._kept = None
        back = contextlib.ExitStack()
        back.callback(self._swap_back)
        return back

    def _swap_back(self) -> None:
        if self.is_swapped:
            self.swap()

    @property
    def is_swapped(self) -> bool:
        """Whether the model has the averages now."""
        return self._kept is not None

    def _check_not_swapped(self, action: str) -> None:
        if self.is_swapped:
            raise RuntimeError(f"EMA.{action} was called while the model has the averages: swap() back first")

    def _averaged(self, named: Mapping[torch.Tensor, list[str]]) -> list[torch.Tensor]:
        """Of all parameters those that are averaged, in the order of the averages."""
        by_name = {name: parameter for parameter, names in named.items() for name in names}
        found = []
        for name, average in self._averages.items():
            parameter = by_name.get(name)
            if parameter is None or parameter.shape != average.shape:
                now = "is not there any more" if parameter is None else f"has shape {tuple(parameter.shape)} now"
                raise StateError(f"parameter {name!r} of the averaged model {now}: make a new EMA")
            if not _is_cut_alike(parameter, average):
                raise StateError(
                    f"parameter {name!r} of the averaged model was sharded in another way after the EMA was made: make "
                    "the EMA after fully_shard"
                )
            found.append(parameter)
        return found

    @staticmethod
    def _locals(tensors: Any) -> list[torch.Tensor]:
        return [local_of(tensor).detach() for tensor in tensors]

    # -- Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """``decay``, ``updates`` (their number) and ``averages`` by parameter name, DTensors where those are."""
        refuse_flat(self._model, "EMA.state_dict")
        return {"decay": self.decay, "updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, at any world size.

        Args:
            state: its averages are DTensors, or whole tensors.

        Raises:
            RuntimeError: while they are swapped.
            TypeError: if it, or something in it, is of a wrong type.
            ValueError: if it is no such state dict, its decay or updates are out of range, or it has not all parameters
                of this average, or others than the model, or of other shapes. After an error nothing has been loaded.
        """
        refuse_flat(self._model, "EMA.load_state_dict")
        self._check_not_swapped("load_state_dict()")
        given = self._fitting(state)
        if given.keys() != self._averages.keys():  # some were trained when it was saved, and are not yet
            others = self._without_average()
            with not_inference():
                for name in (name for name in given if name in others):
                    self._averages[name] = self._first_average(name, others[name])
        # In an order that ranks share, whatever that of their modules is.
        for name, average in sorted(self._averages.items()):
            value = given[name]
            if isinstance(value, DTensor) and not _is_cut_alike(value, average):
                value = value.full_tensor()  # torch redistributes within a mesh only
            if isinstance(average, DTensor) and not isinstance(value, DTensor):
                value = shard_like(value, average)
            local_of(average).copy_(local_of(value))
        self.decay, self.updates = state["decay"], state["updates"]

    def _without_average(self) -> dict[str, torch.Tensor]:
        """The parameters that are not averaged, by their first names."""
        averaged = self._averages.keys()
        return {names[0]: parameter for parameter, names in self._named().items() if averaged.isdisjoint(names)}

    def _fitting(self, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The averages of a state dict that can be loaded; raises as `load_state_dict`."""
        if not isinstance(state, Mapping):
            raise TypeError(f"the state dict of an EMA is a dict, not {type(state).__name__}")
        if lacking := [name for name in ("decay", "updates", "averages") if name not in state]:
            raise ValueError(f"this is not the state dict of an EMA: it lacks {lacking}, and has {list(state)[:5]}")
        given, updates = state["averages"], state["updates"]
        _check_decay(state["decay"])
        if isinstance(updates, bool) or not isinstance(updates, int):
            raise TypeError(f"updates must be an int, their number, not {updates!r}")
        if updates < 0:
            raise ValueError(f"updates must be at least 0, not {updates}")
        if not isinstance(given, Mapping):
            raise TypeError(f"averages must be a dict of tensors by parameter name, not {type(given).__name__}")
        own = dict(self._averages)
        missing = sorted(own.keys() - given.keys())
        if given.keys() - own.keys():
            own.update(self._without_average())
        unknown = sorted(map(str, given.keys() - own.keys()))
        if missing or unknown:
            raise ValueError(
                f"the saved average does not fit: it lacks {missing[:5]} and also has {unknown[:5]}; an EMA has the "
                "parameters that were trainable at some update of it"
            )
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"the saved average of {name!r} must be a tensor, not {type(value).__name__}")
            if value.shape != (shape := own[name].shape):
                raise ValueError(f"the saved average of {name!r} has shape {tuple(value.shape)}, not {tuple(shape)}")
        return given


def _check_decay(decay: Any) -> None:
    if isinstance(decay, bool) or not isinstance(decay, Real):
        raise TypeError(f"decay must be a number, not {decay!r}")
    if not 0.0 <= float(decay) <= 1.0:
        raise ValueError(f"decay must be between 0 and 1, not {decay}")


def _register_sharded(model: nn.Module) -> None:
    """Register the sharded parameters of all units, and check that they have values."""
    for unit in units_of(model):
        for group in unit.groups:
            group.reshard()
            group.shards.check_materialized()


def _is_cut_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return isinstance(one, DTensor) == isinstance(other, DTensor)
    return is_cut_alike(one, other)


def _copy_of(name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    refuse_lazy(f"parameter {name!r}", parameter)
    if parameter.is_meta:
        raise StateError(
            f"parameter {name!r} is on the meta device, so there is nothing to average: initialize it first"
        )
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(dtype, copy=True)
    return wrap_local(local_of(parameter).detach().to(dtype, copy=True), spec_of(parameter))

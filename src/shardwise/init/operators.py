"""What the recorder has to know about operators, beyond their schemas."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..core.device import schema_of
from ..core.tree import all_in, map_tensors, tensors_in

OVERWRITE = {
    *("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_", "bernoulli_"),
}
"""Operators that leave nothing of the previous values."""

UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operators that make memory without values."""

FRESH = {"lift_fresh", "lift"}
"""Operators whose argument torch has made of Python numbers or an array."""

_DRAWS_BY_SHAPE = {
    *("normal", "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like", "native_dropout", "multinomial"),
}
"""Random operators on values that draw equally many numbers whatever the values are."""


_OF_TORCH = {"aten", "prim", "prims", "profiler"}
"""Namespaces of operators that torch tags as random if they are."""


class Call:
    """An operator and its arguments."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.name: str = function.overloadpacket.__name__

    def run(self) -> Any:
        """Its results."""
        return self.function(*self.args, **self.kwargs)

    def replaced(self, function: Any) -> Call:
        """The same call with each tensor replaced by ``function`` of it."""
        args, kwargs = map_tensors((self.args, self.kwargs), function)
        return Call(self.function, args, kwargs)

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    @functools.cached_property
    def _arguments(self) -> tuple[list[Any], list[Any]]:
        """Those that it changes, and those that it only reads."""
        arguments = schema_of(self.function).arguments
        values = {**dict(zip((argument.name for argument in arguments), self.args, strict=False)), **self.kwargs}
        changed = [argument.name for argument in arguments if argument.is_write]
        if self.name.endswith("_batch_norm"):  # whose schemas do not say so
            changed = ["running_mean", "running_var"] if values["training"] else []
        names = [name for name in changed if name in values]
        return [values[name] for name in names], [value for name, value in values.items() if name not in names]

    @functools.cached_property
    def written(self) -> list[torch.Tensor]:
        """The tensors that it changes."""
        return list({id(tensor): tensor for tensor in tensors_in(self._arguments[0])}.values())

    @property
    def read(self) -> list[torch.Tensor]:
        """The tensors that it only reads; one that is copied onto itself is also among those that it changes."""
        return tensors_in(self._arguments[1])

    @functools.cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        """Memory that tensors and storages among the arguments refer to, each once."""
        found = all_in((self.args, self.kwargs), torch.UntypedStorage)
        found += [tensor.untyped_storage() for tensor in self.tensors if has_plain_memory(tensor)]
        return list({id(storage): storage for storage in found}.values())

    @functools.cached_property
    def generators(self) -> list[torch.Generator]:
        """The generators among the arguments."""
        return all_in((self.args, self.kwargs), torch.Generator)

    @property
    def device(self) -> torch.device:
        """Of its results. Tensors without dims may be on another device than those they are combined with."""
        given: torch.device | None = self.kwargs.get("device")
        ranked = sorted(self.tensors, key=lambda tensor: tensor.ndim == 0)
        return given if given is not None else ranked[0].device if ranked else torch.device("cpu")

    @property
    def is_reshaping(self) -> bool:
        """Whether it only makes views, or changes geometry: nothing happens to values."""
        is_view: bool = self.function.is_view
        return is_view or torch.Tag.inplace_view in self.function.tags or self.name in {"_unsafe_view", *FRESH}

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers; on the meta device nothing does."""
        return torch.Tag.nondeterministic_seeded in self.function.tags and self.device.type != "meta"

    @property
    def may_draw(self) -> bool:
        """Whether it draws random numbers, or torch does not know, as of what users register."""
        return self.is_random or self.function.namespace not in _OF_TORCH

    @property
    def makes_memory(self) -> bool:
        """Whether it makes ordinary tensors without reading the values of any."""
        returns = schema_of(self.function).returns
        return (
            self.function.namespace == "aten"
            and self.device.type != "meta"
            and (not self.tensors or self.name in UNDEFINED)
            and bool(returns)
            and all("Tensor" in str(value.type) for value in returns)
            and self.kwargs.get("layout") in (None, torch.strided)
            and not self.kwargs.get("pin_memory")
        )

    @property
    def _is_indexed_by_numbers(self) -> bool:
        """Whether it is ``tensor[indices]`` without masks: how many elements those choose depends on shapes alone."""
        if self.function is not torch.ops.aten.index.Tensor:
            return False
        return not any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(self._arguments[1][1:]))

    @property
    def depends_on_values(self) -> bool:
        """Whether its results' shapes, its results that are not tensors, or how much it draws depend on values. Unknown
        operators and those without an honest meta kernel count as such."""
        tags = self.function.tags
        if torch.Tag.data_dependent_output in tags:
            return True
        if torch.Tag.dynamic_output_shape in tags and not self._is_indexed_by_numbers:
            return True
        if self.function.namespace != "aten" or self.name.startswith("quantize_per"):
            return True
        reads = len(self.tensors) > len(self.written)
        return torch.Tag.nondeterministic_seeded in tags and reads and self.name not in _DRAWS_BY_SHAPE


def has_operators(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class have operators of their own."""
    return kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def has_plain_memory(value: Any) -> bool:
    """Whether ``value`` is a tensor with one storage, in which its elements are."""
    if not isinstance(value, torch.Tensor) or has_operators(type(value)):
        return False
    return value.layout is torch.strided and not value.is_quantized


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same geometry."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

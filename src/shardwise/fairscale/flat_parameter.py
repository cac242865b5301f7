"""FlatParameter: several parameters as one 1-D tensor, of which a rank may hold only a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..core.parameter import FlatShard


class FlatParameter(FlatShard):
    """Parameters of one dtype, one after the other.

    Args:
        params: a list or tuple of at least one, none of them flat already; their values are copied.
        requires_grad: of the joined parameter.

    Attributes:
        param_names: of the parameters; none where they are not known.
        shapes: of each.

    Raises:
        ValueError: if there are none, or anything but tensors, or one is a `FlatParameter`, or they have several
            dtypes.
    """

    param_names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    def __new__(cls, params: Sequence[torch.Tensor], requires_grad: bool = True) -> FlatParameter:
        """Join ``params``."""
        if not isinstance(params, (list, tuple)):
            raise ValueError(f"FlatParameter takes a list or tuple of parameters, not a {type(params).__name__}")
        members = list(params)
        if not members:
            raise ValueError("FlatParameter needs at least one parameter")
        for index, member in enumerate(members):
            if not isinstance(member, torch.Tensor):
                raise ValueError(f"FlatParameter takes tensors; number {index} is a {type(member).__name__}")
            if isinstance(member, FlatParameter):
                raise ValueError(f"FlatParameter: number {index} is a FlatParameter; they do not nest")
        if len(dtypes := {member.dtype for member in members}) > 1:
            raise ValueError(f"FlatParameter: parameters of one dtype can be joined, not {sorted(map(str, dtypes))}")
        data = torch.cat([member.detach().reshape(-1) for member in members])
        return cls._around(data, requires_grad, (), [member.shape for member in members])

    def __init__(self, params: Sequence[torch.Tensor], requires_grad: bool = True):
        # Everything is set in `_around`, which unpickling and copying call too.
        pass

    @classmethod
    def _around(
        cls, data: torch.Tensor, requires_grad: bool, names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> FlatParameter:
        flat = super().__new__(cls, data, requires_grad)
        flat.param_names, flat.shapes = tuple(names), tuple(torch.Size(shape) for shape in shapes)
        return flat

    @classmethod
    def of(cls, names: Sequence[str], shapes: Sequence[Sequence[int]], like: torch.Tensor) -> FlatParameter:
        """One without elements yet, for parameters of ``like``'s dtype and device that are described only."""
        return cls._around(like.detach().new_empty(0), like.requires_grad, names, shapes)

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    def get_param_views(self, external_data: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Views of the parameters, in their shapes.

        Args:
            external_data: 1-D, to look at in place of this tensor, of which a rank may hold only a part.

        Raises:
            ValueError: if there are not as many elements as the parameters have.
        """
        data = self if external_data is None else external_data
        if data.numel() != sum(self.numels):
            raise ValueError(
                f"the parameters have {sum(self.numels)} elements, not {data.numel()}: where only a part is held, "
                "gather it first and pass it as external_data"
            )
        pieces = zip(data.split(self.numels), self.shapes, strict=True)
        return iter([piece.view(shape) for piece, shape in pieces])

    def metadata(self) -> tuple[list[str], list[torch.Size], list[int]]:
        """Names, shapes and numbers of elements of the parameters."""
        return list(self.param_names), list(self.shapes), self.numels

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FlatParameter._around, (self.data, self.requires_grad, self.param_names, self.shapes)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        copied = FlatParameter._around(self.detach().clone(), self.requires_grad, self.param_names, self.shapes)
        memo[id(self)] = copied
        return copied

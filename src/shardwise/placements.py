"""The sharding strategy as a value: which kinds of state are sharded between uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

State = Literal["replicate", "partial", "shard"]

_ALLOWED: dict[str, tuple[State, ...]] = {
    "parameter": ("replicate", "shard"),
    "gradient": ("replicate", "partial", "shard"),
    "optimizer": ("replicate", "shard"),
}


@dataclass(frozen=True)
class Placements:
    """Where the three kinds of training state live between uses, over the sharding mesh axis.

    Args:
        parameter: ``"shard"`` gathers a unit's parameters only while it computes;
            ``"replicate"`` keeps them gathered and refreshes them after the optimizer changed its shards.
        gradient: ``"shard"`` reduces after every backward pass; ``"partial"`` keeps each rank's own sum
            until the last micro-batch and then reduces it to shards; ``"replicate"`` does likewise and
            leaves the mean on every rank.
        optimizer: ``"shard"`` or ``"replicate"``: the tensors that the optimizer steps.
        mesh_ndim: number of mesh axes that the strategy needs; None accepts one (shard) or two
            (replicate, shard).

    The ZeRO stages (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054) are the class attributes
    ``ddp``, ``zero1``, ``zero2``, ``zero3``; ``hsdp`` is ``zero3`` that insists on a two-axis mesh.
    Every preset works on a two-axis mesh, replicated over the first axis. Ranks that hold copies of one another must
    begin with the same values: nothing compares them.

    Raises:
        ValueError: for an unknown state, or for a combination that no training step can use.
    """

    parameter: State = "shard"
    gradient: State = "shard"
    optimizer: State = "shard"
    mesh_ndim: int | None = None

    ddp: ClassVar[Placements]
    zero1: ClassVar[Placements]
    zero2: ClassVar[Placements]
    zero3: ClassVar[Placements]
    hsdp: ClassVar[Placements]

    def __post_init__(self) -> None:
        for kind, allowed in _ALLOWED.items():
            if (state := getattr(self, kind)) not in allowed:
                raise ValueError(f"Placements({kind}={state!r}): {kind} must be one of {', '.join(allowed)}")
        if self.mesh_ndim not in (None, 1, 2):
            raise ValueError(f"Placements(mesh_ndim={self.mesh_ndim!r}): must be None, 1 or 2")
        if (self.gradient == "replicate") != (self.optimizer == "replicate"):
            raise ValueError(
                f"{self}: an optimizer steps on gradients that are laid out as its state is; "
                "set gradient and optimizer both to 'replicate', or neither"
            )
        if self.parameter == "shard" and self.optimizer == "replicate":
            raise ValueError(f"{self}: sharded parameters need optimizer='shard'")

    @property
    def keeps_unsharded(self) -> bool:
        """Whether gathered parameters stay in memory between uses."""
        return self.parameter == "replicate"

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank holds a part of the tensors that the optimizer steps."""
        return self.optimizer == "shard"

    @property
    def reduces_every_backward(self) -> bool:
        """Whether gradients are reduced after every backward pass; otherwise only after the last micro-batch."""
        return self.gradient == "shard"


Placements.ddp = ddp = Placements("replicate", "replicate", "replicate")
Placements.zero1 = zero1 = Placements("replicate", "partial", "shard")
Placements.zero2 = zero2 = Placements("replicate", "shard", "shard")
Placements.zero3 = zero3 = Placements("shard", "shard", "shard")
Placements.hsdp = hsdp = Placements("shard", "shard", "shard", mesh_ndim=2)

PRESETS: dict[str, Placements] = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3, "hsdp": hsdp}

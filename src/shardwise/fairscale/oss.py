"""OSS: an optimizer whose state lies whole parameter by whole parameter on the ranks (ZeRO-1)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

from ..arguments import Argument, Support, check_arguments, check_state_dict, documented, is_at_least, to_float
from ..core.agreement import communicating, explain_failure
from ..core.comm import Comm, GrouplessComm, comm_for
from ..core.device import get_version, sent_to
from ..core.layout import deal
from ..core.norms import local_norms, norm_of_nothing
from ..core.parameter import refuse_lazy
from ..core.step import parameters_of
from ..core.tree import map_tensors
from ..core.whole import WholeBroadcast
from ..grad import OF_NORM, norm_dtype, scale_to_norm
from ..grad_scaler import dense_gradient
from .ranks import check_same_on_ranks, describe, refuse_shards

ARGUMENTS = {
    "params": Argument("parameters, named parameters or param groups, as for any torch optimizer"),
    "optim": Argument("class of the optimizer that steps the parameters which this rank owns"),
    "group": Argument("process group whose ranks share the state; None for all ranks"),
    "broadcast_buffer_size": Argument(
        "most elements of several small parameters that are sent as one; 0 sends every parameter by itself, -1 leaves "
        "it to the backend"
    ),
    "broadcast_fp16": Argument(
        "whether parameters wider than 16 bits travel as float16; all ranks, owners too, then hold the rounded values"
    ),
    "force_broadcast_object": Argument(
        "states are sent tensor by tensor, never as one pickled object", Support.ACCEPTED
    ),
    "defaults": Argument("hyper-parameters of `optim`"),
}

SMALL_STATE = 1024
"""Elements: smaller tensors of a state travel with its description."""

_LISTS = ("params", "param_names")
"""Entries of a param group with an item for each parameter; all others are hyper-parameters."""

Signature = tuple[list[torch.dtype], list[torch.device], list[bool], float, bool]
"""Dtype, device and requires_grad of all parameters, ``broadcast_buffer_size`` and ``broadcast_fp16``: what a plan to
send parameters is made for."""


@documented(ARGUMENTS)
class OSS(Optimizer):
    """Steps on each rank only the parameters that it owns, so that it holds only their state, and sends them to others.

    Parameters are dealt to ranks as wholes: param group by param group, each to the rank that owns least so far.
    Frozen parameters weigh nothing. What was dealt never moves. It is a `torch.optim.Optimizer`: schedulers, hooks
    and param groups work as on any; ``param_groups`` has all parameters, ``state`` those of the owned ones.

    Gradients have to be the same on all ranks (torch's DDP), or with their owners (`ShardedDataParallel`).
    The first step moves small parameters next to each other, so that they are sent as one; not those whose memory is
    referred to elsewhere. Capture CUDA graphs after that, since their references to memory cannot be seen.
    Construction, `add_param_group` and `step` happen on all ranks of the group, with the same parameters in the same
    order. Steps compare what ranks have whenever it changes; the order of parameters that are alike only by names, if
    ``params`` has them.

    Attributes:
        optim: the optimizer of the owned parameters.
        group: the process group.
        backend: its name.
        rank: of this process in it.
        world_size: of it.
        global_rank: of this process among all.
        broadcast_buffer_size: as passed; may be set, alike on all ranks, and counts from the next step on.
        broadcast_fp16: the same.

    Raises:
        ValueError: for an optimizer that works on all parameters as one vector (LBFGS), a broadcast_buffer_size
            below -1, or parameters that are sharded.
        TypeError: if ``optim`` cannot be called, ``params`` is a set, or ``group`` not a process group.
        RuntimeError: without a process group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: Callable[..., Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **defaults: Any,
    ):
        flags = {"broadcast_fp16": broadcast_fp16, "force_broadcast_object": force_broadcast_object}
        check_arguments(OSS.__init__, "OSS", ARGUMENTS, flags)
        if not callable(optim):
            raise TypeError(
                f"OSS(optim={type(optim).__name__} object): pass the class of an optimizer, and its settings by name"
            )
        if not is_at_least(-1, broadcast_buffer_size):
            raise ValueError(
                f"OSS(broadcast_buffer_size={broadcast_buffer_size!r}): must be -1, 0 or a number of elements"
            )
        self._join(group)
        if self.world_size > 1 and isinstance(params, (set, frozenset)):
            raise TypeError(
                "OSS(params=set): each process orders a set by itself, and all ranks need one order; sort it"
            )
        if self.world_size > 1 and isinstance(optim, type) and issubclass(optim, torch.optim.LBFGS):
            raise ValueError(
                "OSS(optim=LBFGS): it computes with all parameters as one vector, which no rank would see; use an "
                "optimizer that treats parameters one by one"
            )
        self.broadcast_buffer_size, self.broadcast_fp16 = broadcast_buffer_size, broadcast_fp16
        self.force_broadcast_object = force_broadcast_object
        self._owners: list[list[int]] = []
        self._loads = [(0, 0)] * self.world_size
        self._plan: _BroadcastPlan | None = None
        self._moved: dict[int, int] = {}
        self._consolidated: dict[Any, Any] | None = None
        super().__init__(params, defaults)
        self.optim = optim(self.partition_parameters()[self.rank], **defaults)
        # Schedulers look up hyper-parameters that were not passed here.
        self.defaults = dict(self.optim.defaults)
        self.state = self.optim.state
        _copy_settings(self.optim.param_groups, self.param_groups)

    def _join(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("OSS shares its state over a process group: call torch.distributed.init_process_group")
        # What `new_group` gives to other processes than the group's is no group either.
        if not (group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
            raise TypeError(f"OSS(group=...): must be a process group or None, not {type(group).__name__}")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("OSS(group=...): this process is not in the group; make OSS only on its ranks")
        self.global_rank, self.backend = dist.get_rank(), dist.get_backend(self.group)

    # -- Ownership

    def owners(self) -> dict[torch.Tensor, int]:
        """Rank in the group that owns each parameter, in the order of ``param_groups``."""
        return dict(zip(parameters_of(self), itertools.chain.from_iterable(self._owners), strict=True))

    @property
    def _device(self) -> torch.device:
        """That small things are communicated on: of the first parameter, if there is one yet."""
        first = next(iter(parameters_of(self)), None)
        if first is not None:
            return first.device
        assert self.group is not None
        return Comm(self.group).host_device

    @property
    def dealt(self) -> int:
        """Number of parameters."""
        return sum(map(len, self._owners))

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """The param groups of each rank: those of this optimizer with only the parameters that the rank owns."""
        return [self._part(rank) for rank in range(self.world_size)]

    def _part(self, rank: int, first: int = 0) -> list[dict[str, Any]]:
        pairs = zip(self.param_groups[first:], self._owners[first:], strict=True)
        return [_select(group, [owner == rank for owner in owners]) for group, owners in pairs]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as on any torch optimizer; on all ranks. What was dealt before stays where it is.

        Args:
            param_group: ``params`` and any hyper-parameters.

        Raises:
            ValueError: naming a parameter that has no shape yet, or is sharded; nothing is added then.
        """
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        try:
            for name, parameter in self.named():
                refuse_lazy(name, parameter)
            assert self.group is not None
            refuse_shards("OSS", self.named(), self.group)
            owners, loads = deal([p.numel() for p in params], [p.requires_grad for p in params], self._loads)
            self._owners.append(owners)
            if "optim" in self.__dict__:
                self.optim.add_param_group(self._part(self.rank, first=len(self._owners) - 1)[0])
                # Only the new group: what was set in the others since the last step is not in `optim` yet.
                _copy_settings(self.optim.param_groups[-1:], self.param_groups[-1:])
        except BaseException:
            # It may refuse more than `Optimizer` does; what it does not have must not be here either.
            self.param_groups.pop()
            del self._owners[len(self.param_groups) :]
            raise
        self._loads, self._plan = loads, None

    def refresh_trainable(self) -> None:
        """Does nothing, on any rank: every step looks by itself which parameters are frozen by now."""

    # -- Steps

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the owned parameters and receive the others from their owners.

        Args:
            closure: computes the loss and gradients again; evaluated as often as ``optim`` does.
            kwargs: passed on to the step of ``optim``.

        Returns:
            What the step of ``optim`` returns: the loss of ``closure``, or None.

        Raises:
            ValueError: on all ranks, naming a parameter or setting that is not the same on all. They are compared in
                the first step, when a parameter or setting changes on all ranks, and while any are frozen.
        """
        _copy_settings(self.param_groups, self.optim.param_groups)
        frozen = [parameter for parameter in parameters_of(self.optim) if not parameter.requires_grad]
        before = [*map(_trace_of, frozen)]
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        # Some optimizers keep numbers of their own in their param groups.
        _copy_settings(self.optim.param_groups, self.param_groups)
        if self.world_size > 1:
            # An optimizer steps a frozen parameter that has a gradient, which only its owner may have, and may drop it.
            traces = zip(frozen, before, map(_trace_of, frozen), strict=True)
            self._broadcast({p for p, old, new in traces if old[0] or new[0] or old != new})
        return loss

    @torch.no_grad()
    def _broadcast(self, stepped: Collection[torch.Tensor]) -> None:
        """Send and receive parameters, those frozen ones too that this rank or another one has ``stepped``."""
        parameters = parameters_of(self)
        signature = (
            [p.dtype for p in parameters],
            [p.device for p in parameters],
            [p.requires_grad for p in parameters],
            # Programs set these on an optimizer that they did not make themselves.
            self.broadcast_buffer_size,
            self.broadcast_fp16,
        )
        self._plan = self._plan_for(signature, stepped)
        try:
            self._plan.run()
        except RuntimeError as error:
            comm = self._comm(self._device)
            explain_failure(error, "sending parameters to the other ranks after OSS stepped them", comm)
            raise

    def _plan_for(self, signature: Signature, stepped: Collection[torch.Tensor]) -> _BroadcastPlan:
        """The plan that there is, unless parameters changed or a rank has stepped a frozen one that is not sent."""
        plan = self._plan if self._plan is not None and self._plan.signature == signature else None
        if plan is not None and not plan.unsent:
            return plan
        owners = self.owners()
        numbers = {parameter: number for number, parameter in enumerate(owners)}
        unsent = plan.unsent if plan is not None else {numbers[p] for p in owners if not p.requires_grad}
        described = plan.described if plan is not None else self._described()
        told = sorted(unsent.intersection(numbers[parameter] for parameter in stepped))
        # Parameters travel without names, several as one: other ones elsewhere would take their values.
        everywhere = check_same_on_ranks("OSS", self._comm(self._device), described, self._device, told)
        if plan is not None and not any(everywhere):
            return plan
        left = unsent.difference(*everywhere)
        sent = {parameter: owner for parameter, owner in owners.items() if numbers[parameter] not in left}
        limit, half = self.broadcast_buffer_size, self.broadcast_fp16
        broadcast = WholeBroadcast([*sent], [*sent.values()], self._comm, limit, half, self._moved)
        return _BroadcastPlan(signature, described, left, [*sent], broadcast)

    def _described(self) -> list[tuple[str, ...]]:
        """What has to be the same on all ranks, so that they send and receive the same."""
        settings = f"broadcast_buffer_size={self.broadcast_buffer_size}", f"broadcast_fp16={self.broadcast_fp16}"
        return [("settings", *settings), *((name, describe(parameter)) for name, parameter in self.named())]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """What messages call each parameter, in the order of ``param_groups``."""
        found = []
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names", range(len(group["params"])))
            pairs = zip(names, group["params"], strict=True)
            found += [(f"parameter {name!r} of param group {index}", parameter) for name, parameter in pairs]
        return found

    def _comm(self, device: torch.device) -> Comm:
        # Not kept: a model may change devices between construction and the first step.
        assert self.group is not None
        return comm_for(self.group, device) if self.world_size > 1 else GrouplessComm()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[torch.Tensor]], Iterable[torch.Tensor] | torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all parameters of the group's ranks is at most ``max_norm``.

        A collective. The norm is that of the norms of the parameters, as `torch.nn.utils.clip_grad_norm_` has it, in
        float32 for narrower gradients.

        Args:
            max_norm: in the unit of the gradients.
            norm_type: order of the norm; ``inf`` for the largest absolute value.
            filter_params_fn: gets the parameters that this rank owns and that have gradients; returns those that count.
                Any others of this optimizer that it returns count where they are owned.

        Returns:
            The norm before scaling, 0-dim, the same on all ranks.

        Raises:
            ValueError: if ``filter_params_fn`` returns a tensor that is not a parameter of this optimizer.
            TypeError: if it is no function, or returns anything else than tensors.
            TypeError, ValueError: if ``max_norm`` or ``norm_type`` is no number.
        """
        max_norm = to_float("clip_grad_norm", "max_norm", max_norm)
        norm_type = to_float("clip_grad_norm", "norm_type", norm_type)
        if filter_params_fn is not None and not callable(filter_params_fn):
            raise TypeError(f"clip_grad_norm: filter_params_fn must be a function, not {filter_params_fn!r}")
        owners = self.owners()
        mine = [parameter for parameter, owner in owners.items() if owner == self.rank and parameter.grad is not None]
        counted = mine if filter_params_fn is None else self._chosen(mine, filter_params_fn(mine))
        norm = self._total_norm(counted, norm_type)
        gradients = [dense_gradient(parameter) for parameter in owners if parameter.grad is not None]
        scale_to_norm(gradients, norm, max_norm)
        return norm

    def _chosen(self, mine: Sequence[torch.Tensor], given: Any) -> list[torch.Tensor]:
        """Those of ``mine`` that are ``given``, tensors or one: the others count on the ranks that own them."""
        is_one = isinstance(given, torch.Tensor) or not isinstance(given, Iterable)
        given = [given] if is_one else list(given)
        if wrong := [one for one in given if not isinstance(one, torch.Tensor)]:
            raise TypeError(
                f"clip_grad_norm: filter_params_fn returns those parameters that count, and it gave {wrong[0]!r}"
            )
        known, chosen = {id(parameter) for parameter in parameters_of(self)}, {id(one): one for one in given}
        if unknown := [parameter for key, parameter in chosen.items() if key not in known]:
            raise ValueError(
                f"clip_grad_norm: filter_params_fn gave a tensor of shape {tuple(unknown[0].shape)} that OSS does not "
                "have; it may only leave out some of those that it gets"
            )
        return [parameter for parameter in mine if id(parameter) in chosen]

    def _total_norm(self, counted: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        owners, device = self.owners(), self._device
        if not owners:
            return torch.zeros((), device=device)
        number = {id(parameter): index for index, parameter in enumerate(owners)}
        # A parameter that does not count leaves the total as it is.
        nothing = norm_of_nothing(norm_type)
        start = [nothing if owner == self.rank else 0.0 for owner in owners.values()]
        vector = sent_to(device, start, norm_dtype(owners))
        if counted:
            norms = [norm.to(vector) for norm in _norms([dense_gradient(p) for p in counted], norm_type)]
            places = [number[id(parameter)] for parameter in counted]
            vector[sent_to(device, places, torch.int64)] = torch.stack(norms)
        if self.world_size > 1:
            comm = self._comm(device)
            with communicating(OF_NORM, comm):
                comm.all_reduce_now(vector)
        total: torch.Tensor = torch.linalg.vector_norm(vector, norm_type)
        return total

    # -- State

    @torch.no_grad()
    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Bring the state of all parameters together on the host; a collective.

        Args:
            recipient_rank: of the group, on which `state_dict` then gives it; -1 for all ranks.

        Raises:
            ValueError: if there is no such rank; on all ranks, if they do not pass the same one.
        """
        if recipient_rank not in range(-1, self.world_size):
            raise ValueError(
                f"consolidate_state_dict(recipient_rank={recipient_rank!r}): pass a rank of the group, 0 to "
                f"{self.world_size - 1}, or -1 for all"
            )
        _copy_settings(self.param_groups, self.optim.param_groups)
        states = self._own_states()
        whole = self._exchange_states(states, recipient_rank) if self.world_size > 1 else map_tensors(states, _on_host)
        self._consolidated = whole if recipient_rank in (-1, self.rank) else None

    def _own_states(self) -> dict[Any, Any]:
        """State of the owned parameters, by their number in all param groups; of anything else, by its key."""
        numbers = _owned_numbers(self._owners, self.rank)
        states: dict[Any, Any] = self.optim.state_dict()["state"]
        return {numbers[key] if isinstance(key, int) else key: state for key, state in states.items()}

    def _exchange_states(self, own: dict[Any, Any], recipient: int) -> dict[Any, Any]:
        """All ranks' states on ``recipient`` (-1: everywhere). Large tensors are sent one by one, small ones with the
        description of the state."""
        comm = self._comm(self._device)
        large: list[torch.Tensor] = []

        def describe(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() <= SMALL_STATE or tensor.layout is not torch.strided:
                return _on_host(tensor)
            large.append(tensor)
            return torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)

        receives = recipient in (-1, comm.rank)
        found: dict[Any, Any] = {}
        told = recipient, map_tensors(own, describe)
        with communicating("gathering the optimizer's state", comm):
            everywhere = comm.gather_objects(told)
        for owner, (other, _) in enumerate(everywhere):
            if other != recipient:
                raise ValueError(
                    f"consolidate_state_dict: recipient_rank is {recipient} on rank {comm.rank} of the group and "
                    f"{other} on rank {owner}: pass the same on all ranks, -1 for all of them"
                )
        for owner, (_, described) in enumerate(everywhere):
            own_large = iter(large if owner == comm.rank else ())
            states = map_tensors(described, functools.partial(_fetch, comm, owner, recipient, own_large))
            if receives:
                found.update((key, state) for key, state in states.items() if key not in found)
        return found

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The state of all parameters as `consolidate_state_dict` last brought it together, in torch's own format.

        Args:
            all_ranks: consolidate first, on every rank; a collective.

        Returns:
            What the plain optimizer would give, and can load; tensors are on the host.

        Raises:
            RuntimeError: on a rank where the state was not consolidated.
        """
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        if self._consolidated is None:
            raise RuntimeError(
                "OSS.state_dict(): the optimizer state has not been consolidated on this rank, which has only its own "
                "part; call consolidate_state_dict(recipient_rank) on all ranks first, or state_dict(all_ranks=True)"
            )
        others = sorted(key for key in self._consolidated if isinstance(key, int))
        keys = [*others, *(key for key in self._consolidated if not isinstance(key, int))]
        whole = {key: self._consolidated[key] for key in keys}

        def fill(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {**state_dict, "state": whole}

        # Before the hooks that users registered, which are to see all of it.
        handle = self.register_state_dict_post_hook(fill, prepend=True)
        try:
            state_dict: dict[str, Any] = super().state_dict()
        finally:
            handle.remove()
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take hyper-parameters, and the state of the owned parameters; on each rank by itself.

        Args:
            state_dict: of all parameters, from this class at any world size or from the plain optimizer; it is not
                changed, and later steps do not change its tensors.

        Raises:
            ValueError: if it is no optimizer's, or its param groups do not have as many parameters as these.
        """
        given: dict[str, Any] = {}

        def keep(_: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
            check_state_dict("OSS.load_state_dict", whole)
            given.update(whole)
            return {**whole, "state": {}}

        def load(_: Optimizer) -> None:
            self._load_owned(given)

        # After the users' hooks of the one kind and before those of the other, as if torch itself loaded the state.
        handles = [
            self.register_load_state_dict_pre_hook(keep),
            self.register_load_state_dict_post_hook(load, prepend=True),
        ]
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for handle in handles:
                handle.remove()

    def _load_owned(self, state_dict: Mapping[str, Any]) -> None:
        """Give ``optim`` this rank's part."""
        saved_groups = state_dict["param_groups"]
        saved = [key for group in saved_groups for key in group["params"]]
        local = {saved[number]: index for index, number in enumerate(_owned_numbers(self._owners, self.rank))}
        states = state_dict["state"]
        mine = {index: map_tensors(states[key], torch.clone) for key, index in local.items() if key in states}
        numbers = set(saved)
        rest = {key: value for key, value in states.items() if key not in numbers}
        groups, first = [], 0
        for group, owners in zip(saved_groups, self._owners, strict=True):
            part = _select(group, [owner == self.rank for owner in owners])
            part["params"] = list(range(first, first + len(part["params"])))
            first += len(part["params"])
            groups.append(part)
        self.optim.load_state_dict({"state": {**rest, **mine}, "param_groups": groups})
        self.state = self.optim.state
        _copy_settings(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    def __getstate__(self) -> dict[str, Any]:
        """
        Raises:
            TypeError: for a subgroup, which another process could not find again.
        """
        if self.group is not dist.group.WORLD:
            raise TypeError("OSS over a subgroup cannot be pickled, since process groups cannot: save its state_dict")
        settings = ("broadcast_buffer_size", "broadcast_fp16", "force_broadcast_object")
        own = ("optim", *settings, "_owners", "_loads", "_consolidated", "rank")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch calls this for a part of the attributes too.
        if "optim" not in state:
            return
        self._plan, self._moved = None, {}
        self._join(None)  # sets the rank of this process
        if self.world_size != len(self._loads):
            raise RuntimeError(
                f"OSS was pickled on {len(self._loads)} ranks and cannot be unpickled on {self.world_size}: save its "
                "state_dict instead, which loads on any number"
            )
        if self.rank != state["rank"]:
            # What this rank owns would be stepped nowhere.
            raise RuntimeError(
                f"OSS was pickled on rank {state['rank']}, which has the state of its own parameters only, and cannot "
                f"be unpickled on rank {self.rank}: unpickle there what that rank pickled, or save its state_dict "
                "instead, which loads on all"
            )


@dataclass
class _BroadcastPlan:
    """What `OSS.step` sends, as long as no parameter changes its dtype or device or is frozen."""

    signature: Signature
    described: list[tuple[str, ...]]
    unsent: set[int]
    """Numbers of frozen ones, as long as no rank steps them."""
    parameters: list[torch.Tensor]
    broadcast: WholeBroadcast

    def run(self) -> None:
        """Send and receive, and wait."""
        self.broadcast.start()()
        # Owners' steps count as modifications as well: autograd must refuse the same graphs on all ranks.
        torch.autograd.graph.increment_version(self.parameters)


def _trace_of(parameter: torch.Tensor) -> tuple[bool, int]:
    """Whether it has a gradient, and a number that writes change, unless they go through ``.data``."""
    return parameter.grad is not None, 0 if parameter.is_inference() else get_version(parameter)


def _select(group: Mapping[str, Any], chosen: Sequence[bool]) -> dict[str, Any]:
    """A copy of a param group with some of its parameters."""
    part = dict(group)
    for key in _LISTS:
        if key in group:
            part[key] = [item for item, flag in zip(group[key], chosen, strict=True) if flag]
    return part


def _copy_settings(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Give the param groups of ``target`` the hyper-parameters of ``source``."""
    for old, new in zip(source, target, strict=True):
        new.update((key, value) for key, value in old.items() if key not in _LISTS)


def _owned_numbers(owners: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Numbers, counted over all param groups, of the parameters that ``rank`` owns."""
    return [number for number, owner in enumerate(itertools.chain.from_iterable(owners)) if owner == rank]


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each, in float32 at least: squares of float16 numbers above 255 are infinite in float16."""
    # Empty ones are left to `local_norms`: torch has no largest element of them.
    narrow = [g.dtype.itemsize < 4 and g.numel() > 0 for g in gradients]
    wide = [g for g, flag in zip(gradients, narrow, strict=True) if not flag]
    norms = iter(local_norms(wide, norm_type) if wide else ())
    return [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) if flag else next(norms)
        for g, flag in zip(gradients, narrow, strict=True)
    ]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that nothing else changes."""
    return tensor.detach().to("cpu", copy=True)


def _fetch(
    comm: Comm, owner: int, recipient: int, own_large: Iterator[torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """A tensor of ``owner``, which has it as the next of ``own_large``, on the host of ``recipient`` (-1: all);
    elsewhere ``like``, which describes it, or is it already if it is small."""
    if not like.is_meta:
        return like
    own, receives = next(own_large, None), recipient in (-1, comm.rank)
    if not receives and own is None:
        return like
    device = comm.host_device
    if own is not None:
        tensor = own.detach().to(device).resolve_conj().contiguous().view(-1)
    else:
        tensor = torch.empty(like.numel(), dtype=like.dtype, device=device)
    with communicating("gathering the optimizer's state", comm):
        if recipient < 0:
            for work in comm.broadcast(tensor, owner):
                work.wait()
        else:
            comm.move(tensor, owner, recipient)
    if not receives:
        return like
    return _on_host(tensor.view(like.shape)) if own is not None else tensor.to("cpu").view(like.shape)

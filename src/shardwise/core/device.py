"""Every private torch API that is not about communication, and operators on memory and on many tensors.

Each is here because torch shows what it does in no public way, unless its docstring gives another reason; its foreach
operators and `torch._chunk_cat` because one call takes the place of one for each tensor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import CodeType
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import Variable, forward_ad
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _foreach_supported_types,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import SUPPORTED_NODES, tree_map
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.hooks import RemovableHandle

from .changing import changing

ParallelSpec: TypeAlias = DTensorSpec
"""Mesh, placements, global shape and dtype of a DTensor."""

P = ParamSpec("P")
R = TypeVar("R")


REDUCES_IN_DTYPE_OF_SHARDS = torch.__version__ >= (2, 15)  # type: ignore[operator]
"""Whether a `MixedPrecisionPolicy` without ``reduce_dtype`` means the dtype of the shards, as its documentation says
from torch 2.15 on, and not that of the gradients, as before; also whether autograd rounds to a narrower one."""


# -- Memory -----------------------------------------------------------------------------------------------------


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether a contiguous ``tensor`` has all of its memory for itself: no view, array or graph refers to it.

    torch counts who holds a storage and shows that in no public way.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)
    return bool(storage.nbytes() == tensor.nbytes and count == 2)  # the tensor and `storage`


def storage_key(storage: torch.UntypedStorage) -> int:
    """Alike for all objects of one storage: torch makes one at each access, and addresses are 0 for all that have no
    memory. `copy.deepcopy` of tensors keeps copied storages by it."""
    return int(storage._cdata)


def shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are views of one storage."""
    return storage_key(tensor.untyped_storage()) == storage_key(other.untyped_storage())


def may_share_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write into one may change the other; not so for slices of one tensor that are apart."""
    tensor, other = unwrapped(local_of(tensor)), unwrapped(local_of(other))
    if tensor is other:
        return True
    if not (tensor.layout is other.layout is torch.strided and shares_storage(tensor, other)):
        return False
    rows = {*tensor.stride(), *other.stride(), tensor.untyped_storage().nbytes() + 1} - {0}
    return tensor.dtype != other.dtype or not any(_are_apart(tensor, other, row) for row in rows)


def _are_apart(tensor: torch.Tensor, other: torch.Tensor, row: int) -> bool:
    """Whether both take other columns of the storage, if its rows have ``row`` elements."""
    spans = []
    for one in (tensor, other):
        steps = [(size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True) if stride % row]
        start = one.storage_offset() % row
        spans.append((start, start + sum(steps)))
    (start, end), (other_start, other_end) = spans
    return max(end, other_end) < row and (end < other_start or other_end < start)


def pins_memory(device: torch.device) -> bool:
    """Whether host memory on ``device`` can be page-locked, so that copies from and to an accelerator need no wait."""
    return device.type == "cpu" and torch.cuda.is_available()


HOST = torch.device("cpu")


def sent_to(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """``values`` in a 1-D tensor on ``device``, where nothing waits for what it computes now."""
    is_pinned = device.type != "cpu" and pins_memory(HOST)
    return torch.tensor(values, dtype=dtype, device=HOST, pin_memory=is_pinned).to(device, non_blocking=True)


def is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is not in the memory of ``device``."""
    # A type is a string that torch makes each time.
    return tensor.device != device and tensor.device.type != device.type


_NOTHING = contextlib.nullcontext()


def not_inference() -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside are ordinary ones also under `torch.inference_mode`, so training can use them later."""
    return _ordinary() if torch.is_inference_mode_enabled() else _NOTHING


@contextlib.contextmanager
def _ordinary() -> Iterator[None]:
    # To leave inference turns gradients on, also inside of `no_grad`.
    is_on = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_on):
        yield


unfaked: Callable[[], contextlib.AbstractContextManager[object]] = unset_fake_temporarily
"""Inside, tensors have values under ``FakeTensorMode`` too, in which a `DeviceMesh` does not tell its ranks."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it was made under ``FakeTensorMode`` and has a shape alone."""
    return type(tensor) is FakeTensor


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Neither autograd nor `torch.inference_mode`, in which no DTensor can be detached; also a decorator."""
    with torch.no_grad(), not_inference():
        yield


# -- Many tensors in one call -----------------------------------------------------------------------------------


def chunk_cat(tensors: Sequence[torch.Tensor], world_size: int, out: torch.Tensor) -> None:
    """Cut each tensor on dim 0 into ``world_size`` chunks, padded with zeros, and lay rank ``r``'s chunks of all of
    them one after the other into row ``r`` of ``out`` (world size x sum of chunks), casting to its dtype."""
    torch._chunk_cat(list(tensors), 0, world_size, out=out)


MOST_COPIES = 6
"""On a GPU so many copies are queued sooner than one call that takes rows apart, which first sends lengths and
addresses (14 µs each, and 130 µs, on the host of an H100)."""


class RowSplitter:
    """Takes rows of staging memory apart: piece ``i`` of each of them becomes the row of that number in ``targets[i]``.

    Args:
        targets: rows x elements each, in one memory; the pieces of a row are as long as their rows, and in their order.
    """

    def __init__(self, targets: Sequence[torch.Tensor]):
        self._targets = [*targets]
        self._sizes = [target.shape[1] for target in targets]
        self._alike = [_joined(run) for run in _evenly_spaced(targets)]
        """Those that lie at equal distances, as one (pieces x rows x elements): each copy costs a call."""
        self._rows = targets[0].shape[0] if targets else 0
        self._cuts = [(len(run), run.shape[2]) for run in self._alike]
        self._key = self._rows, self._cuts

    def __call__(self, staging: torch.Tensor, *, is_own: bool, start: int = 0) -> None:
        """Copy everything.

        Args:
            staging: 1-D; as many rows, one after the other.
            is_own: whether it is a `Lane`'s; others may free its memory, or let it have another.
            start: element of each row at which the first piece begins.
        """
        is_on_host = staging.is_cpu
        if not is_on_host and len(self._cuts) <= MOST_COPIES:
            torch._foreach_copy_(self._alike, self._pieces(staging, start))
            return
        if not (is_on_host and is_own):
            rows = staging.view(self._rows, -1).narrow(1, start, sum(self._sizes))
            torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=self._targets)
            return
        # To make the views takes as long as to copy them: memory that is used again keeps those of its last cuts.
        kept = staging.__dict__.setdefault("_shardwise_pieces", {})
        key, views = kept.get(start, (None, ()))
        if key != self._key:
            views = self._pieces(staging, start)
            kept[start] = self._key, views
        torch._foreach_copy_(self._alike, views)

    def _pieces(self, staging: torch.Tensor, start: int) -> list[torch.Tensor]:
        # Not views of ``staging`` itself, which they would keep alive.
        memory, rows, pieces = staging.data, self._rows, []
        for count, size in self._cuts:
            where = staging.storage_offset() + start
            pieces.append(memory.as_strided((count, rows, size), (size, memory.numel() // rows, 1), where))
            start += count * size
        return pieces


def _evenly_spaced(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors``, of one memory, in runs of neighbours of the same shape, each as far behind the one before it."""
    runs: list[list[torch.Tensor]] = []
    for tensor in tensors:
        run = runs[-1] if runs else []
        if run and run[0].shape == tensor.shape and (len(run) == 1 or _step([run[-1], tensor]) == _step(run)):
            run.append(tensor)
        else:
            runs.append([tensor])
    return runs


def _step(run: Sequence[torch.Tensor]) -> int:
    return int(run[1].storage_offset() - run[0].storage_offset()) if len(run) > 1 else 0


def _joined(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of a run of `_evenly_spaced` as one tensor, of one more dim."""
    return run[0].as_strided((len(run), *run[0].shape), (_step(run), *run[0].stride()))


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """``targets[i]`` becomes ``sources[i]``, in the targets' dtype and on their device, in one call."""
    try:
        if targets:
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
    except RuntimeError:
        if not any(target.is_conj() or target.is_neg() for target in targets):
            raise
        # torch writes no conjugates or negatives of memory in a list.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def add_each(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    """``targets[i] += terms[i]`` in one call."""
    torch._foreach_add_(list(targets), list(terms))


def move_each(targets: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """``targets[i] += weight * (ends[i] - targets[i])`` in one call for tensors of the same device and dtype."""
    if targets:
        torch._foreach_lerp_(list(targets), list(ends), weight)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """``-tensor`` in the same memory, as ``conj().imag`` gives it; public functions write a new one."""
    return torch._neg_view(tensor)


def scale_each(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """``tensors[i] *= scale`` (0-dim) in one call."""
    torch._foreach_mul_(list(tensors), scale)


def unscale_each(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """``gradients[i] *= inverse_scale`` in one call; ``found_inf`` becomes 1 if any element is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def norm_each(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Norm of each tensor, 0-dim, in one call; there must be tensors, with elements."""
    return list(torch._foreach_norm(tensors, norm_type))


# -- DTensor: public constructors check and redistribute, ours only wrap ---------------------------------------


def make_spec(mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor) -> DTensorSpec:
    """Spec of a DTensor with the global shape, contiguous strides and dtype of ``like``."""
    strides = torch.empty(like.shape, device="meta").stride()
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(like.shape, strides, like.dtype))


@functools.lru_cache
def _at_offset_zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def wrap_local(
    local: torch.Tensor, spec: DTensorSpec, kind: type[DTensor] = DTensor, requires_grad: bool = False
) -> DTensor:
    """A DTensor (of class ``kind``) around ``local``, in its dtype, placed as ``spec`` says; without a copy, a check or
    a new autograd node."""
    if local.dtype != cast(TensorMeta, spec.tensor_meta).dtype:
        spec = respec(spec, dtype=local.dtype)
    with not_inference():
        return _wrap_each([local], [spec], kind, requires_grad)[0]


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the same memory, without a graph. What torch's own gives of a DTensor takes over its local tensor's
    offset, and torch can neither save nor copy such a one."""
    return wrap_local(local_of(tensor).detach(), spec_of(tensor)) if type(tensor) is DTensor else tensor.detach()


def _wrap_each(
    locals_: Sequence[torch.Tensor], specs: Iterable[DTensorSpec], kind: type[DTensor], requires_grad: bool
) -> list[DTensor]:
    """DTensors around ``locals_``, which have one dtype and are on one device."""
    made = []
    # Not around `local` itself: the DTensor would take over its offset, and torch can neither save nor copy one with an
    # offset. And not through the class: its `__init__` does nothing and costs more than the rest.
    base = _at_offset_zero(locals_[0].dtype, locals_[0].device)
    for local, spec in zip(locals_, specs, strict=True):
        wrapped: DTensor = DTensor.__new__(kind, base, spec, requires_grad=requires_grad)
        wrapped._local_tensor = local
        made.append(wrapped)
    return made


def wrap_at_offset(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient, at the offset of its local tensor if it is a DTensor: `torch.compile` traces no other."""
    if not isinstance(gradient, DTensor):
        return gradient
    wrapped: DTensor = DTensor.__new__(DTensor, local_of(gradient), spec_of(gradient), requires_grad=False)
    return wrapped


def wrap_gradients(locals_: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``locals_[i]``, all of one dtype and on one device, placed as ``parameters[i]`` is; themselves, if those are not
    DTensors."""
    if not parameters or not isinstance(parameters[0], DTensor):
        return locals_
    return _wrap_each(locals_, map(get_spec, parameters), DTensor, False)


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Mesh, placements, global shape and dtype of a DTensor."""
    spec: DTensorSpec = tensor._spec  # type: ignore[attr-defined]
    return spec


get_spec, get_local = attrgetter("_spec"), attrgetter("_local_tensor")
"""Of a DTensor, as functions that `map` calls without a line of Python for each; AttributeError for anything else."""
get_requires_grad, get_version = attrgetter("requires_grad"), attrgetter("_version")
"""Of a tensor; the latter counts writes, for which torch has a public function that increments and none that reads."""
_data: Any = torch.Tensor.data
get_data: Callable[[torch.Tensor], torch.Tensor] = _data.__get__
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__
"""Of a tensor, as `torch.overrides` calls them."""
_gradient: Any = torch.Tensor.grad
get_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _gradient.__get__
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _gradient.__set__
"""Of a tensor, past what its class defines; to be called inside `without_torch_function`."""


def region_of(spec: ParallelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes, per tensor dim, of this rank's part of a DTensor that is cut as ``spec`` says."""
    with HOST:  # torch reads offsets from tensors on the default device
        sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(offsets), tuple(sizes)


def respec(
    spec: DTensorSpec,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """``spec`` on another mesh, with other placements, or of another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return DTensorSpec(
        mesh if mesh is not None else spec.mesh,
        tuple(placements if placements is not None else spec.placements),
        tensor_meta=TensorMeta(meta.shape, meta.stride, dtype or meta.dtype),
    )


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several that were cut from the same one, which alone could be sliced in public, and
    which none of them shows."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """A mesh of one axis from one or more named axes of ``mesh``, which no public method of a mesh gives."""
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))


def shard_inside(dim: int, factor: int) -> Placement:
    """A cut on ``dim`` of what ``factor`` other ranks' cuts of the same dim left over, for which torch has no public
    placement."""
    return _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)


def complete(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, once the asynchronous collective that makes it is done."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself (`DTensor.to_local` gives an autograd view of it); a plain tensor is its own."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def set_local(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec | None = None) -> None:
    """Let a DTensor refer to other local memory of the same shape, placed as ``spec`` says where it is given."""
    tensor._local_tensor = local  # type: ignore[attr-defined]
    if spec is not None:
        tensor._spec = spec  # type: ignore[attr-defined]


def mark_parameter(tensor: DTensor) -> nn.Parameter:
    """``tensor``, which `isinstance` takes for an `nn.Parameter` from now on: ``nn.Parameter(tensor)`` would run an
    operator on it, the first of which imports the compiler."""
    tensor._is_param = True
    return cast(nn.Parameter, tensor)


def shard_like(value: torch.Tensor, sharded: DTensor) -> DTensor:
    """``value``, the same whole tensor on every rank, cut and placed as ``sharded`` is."""
    spec, local = make_spec(sharded.device_mesh, sharded.placements, value), local_of(sharded)
    for dim, (start, size) in enumerate(zip(region_of(spec)[0], local.shape, strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim]), size)
    return wrap_local(value.detach().clone().to(local.device), spec)


# -- Tensor subclasses and hooks on tensors ---------------------------------------------------------------------

without_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Attribute access on tensor subclasses inside goes straight to torch, which is faster."""


call_without_torch_function: Callable[[Any, Any, Any, Any], Any] = torch._C._disabled_torch_function_impl
"""``(func, types, args, kwargs)``: call ``func`` as torch does for a class whose ``__torch_function__`` is disabled."""


# Of those that were registered torch shows none, and runs them when an unsharded gradient comes, which is too early.
_get_hooks, _get_late_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def share_hooks(new: torch.Tensor, old: torch.Tensor) -> None:
    """Let ``new`` have the hooks that users registered on ``old``; the handles that they hold remove them from both."""
    with without_torch_function():
        if old._backward_hooks is not None:
            new._backward_hooks = old._backward_hooks
        if old._post_accumulate_grad_hooks is not None:
            new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def take_hooks(new: torch.Tensor, old: torch.Tensor) -> None:
    """`share_hooks`; what is registered to run after the accumulation into ``old`` from now on is its alone."""
    share_hooks(new, old)
    with without_torch_function():
        cast(Any, old)._post_accumulate_grad_hooks = None


def run_tensor_hooks(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``gradients[i]`` after the hooks that the user registered by ``parameters[i].register_hook``, which may give
    whole plain tensors, the same on every rank."""
    with without_torch_function():
        hooks = [*map(_get_hooks, parameters)]
    if not any(hooks):
        return gradients
    changed = [*gradients]
    with _plain_as_replicated():
        for index, own in enumerate(hooks):
            for hook in tuple(own.values()) if own else ():
                changed[index] = _changed_by(hook, changed[index])
    return changed


def _changed_by(hook: Callable[[torch.Tensor], torch.Tensor | None], gradient: torch.Tensor) -> torch.Tensor:
    if (given := hook(gradient)) is None:
        return gradient
    if isinstance(gradient, DTensor) and not isinstance(given, DTensor) and given.shape == gradient.shape:
        return shard_like(given, gradient)
    return given


def run_late_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Call what the user registered to run when the gradient of each of ``parameters`` is ready."""
    with without_torch_function():
        found = [*map(_get_late_hooks, parameters)]
    if any(found):
        with _plain_as_replicated():
            for parameter, hooks in zip(parameters, found, strict=True):
                for hook in tuple(hooks.values()) if hooks else ():
                    hook(parameter)


def _plain_as_replicated() -> contextlib.AbstractContextManager[None]:
    """Operators on DTensors take a plain tensor, such as the mask of a whole gradient, for the same one on every rank.

    torch's own ``implicit_replication`` would end one of the user's around it.
    """
    return changing([DTensor._op_dispatcher], "_allow_implicit_replication", True)


def plain_tensors_are_replicated() -> bool:
    """Whether operators take plain tensors beside a `DTensor` for replicated ones, as in ``implicit_replication``."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


# -- Autograd ---------------------------------------------------------------------------------------------------


is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether autograd sees a tensor as a view of another one; modifying it in place then loses the hooks on it."""

get_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""What autograd sees a tensor as a view of, which has to get hooks of its own; nothing public tells."""


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of ``base`` that ``view`` is of its own base; autograd has no public function that makes a view anew."""
    return view._view_func(base)  # type: ignore[attr-defined,no-any-return]


def keeping_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, writing to ``tensor`` does not count as modifying it: autograd would refuse the graphs that saved it."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def take_history(changed: torch.Tensor, alias: torch.Tensor) -> None:
    """Let ``changed`` continue the autograd history of ``alias``, through which its memory was modified in place."""
    with keeping_version(changed):
        changed.copy_(alias)


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread is inside, -1 outside; one inside another has its own. Nothing public
tells whether there is one."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return backward_number() != -1


next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Number of the autograd node that this thread makes next: what was made before is told from what was made since
without a reference to either."""


def is_made_since(tensor: torch.Tensor, number: int) -> bool:
    """Whether ``tensor`` comes from an autograd node that this thread made since `next_node` was ``number``."""
    try:
        node: Any = tensor.grad_fn
    except RuntimeError:  # a view of what was written to since in a way that allows no backward through the view
        return False
    return node is not None and node._sequence_nr() >= number


def runs_in_this_backward(node: Any) -> bool:
    """Whether the current backward pass goes through an autograd node, which only the engine knows."""
    return torch._C._will_engine_execute_node(node)


def in_compiled_autograd() -> bool:
    """Whether the current backward pass was compiled: nothing would run what `queue_end_of_backward` is given."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiler is not None and compiler.in_compiled_autograd_region


def queue_end_of_backward(
    callback: Callable[[], None], dropped: Callable[[object], None] | None = None
) -> Callable[[], Any]:
    """Run ``callback`` when the current backward pass has done everything else.

    Autograd drops it then, or when that pass fails: what is returned gives None from then on, and ``dropped`` runs.
    """
    end = functools.partial(callback)
    Variable._execution_engine.queue_callback(end)
    return weakref.ref(end, dropped)


# -- Profiler and log -------------------------------------------------------------------------------------------


is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler runs: ranges cost host time also while none does."""

_log = logging.getLogger("torch.distributed.fsdp.fully_shard")
"""That of torch's FSDP2, which ``TORCH_LOGS=+fsdp`` shows."""


def is_watched() -> bool:
    """Whether a profiler or the log shows ranges."""
    return is_profiled() or _log.isEnabledFor(logging.DEBUG)


def label(text: str) -> contextlib.AbstractContextManager[Any]:
    """A profiler range, and a line of the log; costs nothing while nobody sees them."""
    _log.debug(text)
    return torch.profiler.record_function(text) if is_profiled() else _NOTHING


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """No call within becomes an event of a profiler; costs nothing while none runs."""
    return _Unrecorded() if is_profiled() else _NOTHING


class _Unrecorded:
    def __enter__(self) -> None:
        torch._C._autograd._enable_record_function(False)

    def __exit__(self, *error: object) -> None:
        torch._C._autograd._enable_record_function(True)


Method = TypeVar("Method", bound=Callable[..., Any])


def labelled(text: str) -> Callable[[Method], Method]:
    """Calls of a method are profiler ranges and lines of the log in the class that `watched` gives.

    Args:
        text: of the range, with the object's ``{name}`` or another attribute of it (``{of.fqn}``), in parentheses only
            where that is not empty, and arguments ``{0}``.
    """

    def decorate(method: Method) -> Method:
        method.label = text  # type: ignore[attr-defined]
        return method

    return decorate


def _watched(kind: Any) -> Any:
    methods = {name: method for base in reversed(kind.__mro__) for name, method in vars(base).items()}
    ranges = {name: _as_range(method, method.label) for name, method in methods.items() if hasattr(method, "label")}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **ranges}) if ranges else kind


watched: Callable[[Any], Any] = functools.cache(_watched)
"""A class with its `labelled` methods as ranges: one of its own, since to ask at each call whether a profiler runs
takes a fiftieth of an iteration's host time."""


def _as_range(method: Callable[..., Any], text: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_watched():  # any more
            return method(self, *args, **kwargs)
        with label(text.format(*args, name=self.name, of=self).removesuffix(" ()")):
            return method(self, *args, **kwargs)

    del run.__dict__["label"]  # `watched` of this class is the class itself
    return run


# -- torch.func and torch.compile -------------------------------------------------------------------------------


in_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` runs, which wraps tensors that are made or used inside."""


def in_forward_mode() -> bool:
    """Whether `torch.autograd.forward_ad` computes derivatives."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` carries a derivative there."""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose operators see plain tensors within the transforms of `torch.func` too."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not in_transforms():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return run


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside one that transforms of `torch.func` have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def requires_grad_outside(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` requires gradients outside of a transform of `torch.func` that wrapped it, which it does not
    show inside."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` of a function that gives its tensors back; outside of the transforms of `torch.func` it
    skips what torch prepares for them, which takes longer than the rest."""
    if in_transforms():
        return function.apply(*args)
    given = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    if "spmd_types" in sys.modules:
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        for new, old in zip(given, tensors, strict=True):
            annotated_like(new, old)
    return given


def apply_to_gradients(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`apply_function` to gradients, of which each may stand for several, as ``is_grads_batched=True`` asks of
    `torch.autograd.grad`: those do not show their history, which what is inside of them has."""
    batched = [torch._C._functorch.is_legacy_batchedtensor(one) for one in args if isinstance(one, torch.Tensor)]
    if not any(batched):
        return apply_function(function, *args)
    # Autograd's thread for an accelerator does not know it; there it is that of the one call of `torch.autograd.grad`.
    level = max(torch._C._vmapmode_increment_nesting() - 1, 1)
    torch._C._vmapmode_decrement_nesting()
    others, gradients = args[: -len(batched)], args[-len(batched) :]
    pairs = zip(gradients, batched, strict=True)
    inside = [torch._remove_batch_dim(one, level, 1, 0) if is_batched else one for one, is_batched in pairs]
    pairs = zip(apply_function(function, *others, *inside), batched, strict=True)
    return tuple([torch._add_batch_dim(one, 0, level) if is_batched else one for one, is_batched in pairs])


def annotated_like(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``new``, which takes the place of ``old``, annotated by the package spmd_types as that is: `eager` functions do
    not propagate it."""
    if new is not old and (spmd := sys.modules.get("spmd_types")) is not None and spmd.has_local_type(old):
        spmd.assert_type_like(new, old)
    return new


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, never traced by `torch.compile`, checked by the package spmd_types, nor part of what a selective
    activation checkpoint saves and recomputes.

    Disabling Dynamo for a call costs more than most of our hooks, so it is done only where Dynamo is at work; and it
    is imported by whoever compiles, not by us, since that takes seconds.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._C._len_torch_dispatch_stack() and (modes := _selective_modes()):
            with _idle(modes):
                return run(*args, **kwargs)
        if get_eval_frame_callback() is None:  # nobody traces
            if "spmd_types" not in sys.modules or not (spmd := sys.modules["spmd_types"]).is_type_checking():
                return function(*args, **kwargs)
            with spmd.no_typecheck():  # of what is sharded it knows nothing
                return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped(run)


def _selective_modes() -> list[TorchDispatchMode]:
    """The modes in effect by which selective activation checkpoints count operators: recomputation takes what was saved
    by the numbers of its operators, and gathers at other times than forward."""
    return [
        mode
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) and not isinstance(mode, _Idle)
    ]


@contextlib.contextmanager
def _idle(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Let ``modes`` see nothing. They stay where they are among others: one that is popped would have to be put back
    whatever happens, or the program's own would be taken for it."""
    kinds: list[Any] = [type(mode) for mode in modes]
    try:
        for mode, kind in zip(modes, kinds, strict=True):
            mode.__class__ = _idle_kind(kind)
        yield
    finally:
        for mode, kind in zip(modes, kinds, strict=True):
            mode.__class__ = kind


class _Idle:
    """A mode that only passes operators on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@functools.cache
def _idle_kind(kind: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    return type(kind.__name__, (_Idle, kind), {})


def saved_may_be_written() -> bool:
    """Whether `torch.autograd.graph.allow_mutation_on_saved_tensors` is in effect."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def skipped(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose own code `torch.compile` never traces; what it calls may be traced."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return function


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose own code `torch.compile` never traces; what it calls may be traced. For methods that torch
    would wrap as a step of an optimizer: it does not."""
    function.hooked = function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped(function)


def trace_by(tracer: Any) -> Any:
    """Let `torch.compile` trace what is called from here on by ``tracer``, nothing if that is None; gives what traced
    before."""
    return set_eval_frame(tracer)


# -- Steps of optimizers ----------------------------------------------------------------------------------------


def step_without_hooks(optimizer_class: type[Optimizer]) -> Callable[..., Any]:
    """``optimizer_class.step`` without what torch wraps around it when the first instance is made."""
    step: Any = optimizer_class.step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def steps_are_hooked(optimizer: Optimizer, but: Sequence[RemovableHandle]) -> bool:
    """Whether anybody's hooks run around the steps of ``optimizer``, those of ``but`` aside; torch has functions that
    register them, and none that tells."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_post_hooks or _global_optimizer_pre_hooks.keys() - {one.id for one in but})


def step_by_foreach(kind: type[torch.Tensor]) -> None:
    """Let optimizers use foreach operators for parameters of type ``kind`` wherever they do for plain tensors: on an
    accelerator, where they would otherwise launch several kernels for each parameter."""
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


# -- Operators and containers -----------------------------------------------------------------------------------


OperatorMode: TypeAlias = TorchDispatchMode
"""Base of contexts that every ATen operator goes through; torch documents it, and has it in a private module."""


truncated_normal_code: CodeType | None = getattr(
    getattr(torch.nn.init, "_no_grad_trunc_normal_", None), "__code__", None
)
"""Of what `torch.nn.init.trunc_normal_` does to a tensor, with local variables ``mean``, ``std``, ``a``, ``b`` and
``generator``: it samples until it likes the values, so it cannot be recorded operator by operator."""


def schema_of(operator: Any) -> Any:
    """What an ATen operator says of its arguments and returns, in no public attribute; None of another function."""
    return getattr(operator, "_schema", None)


def parts_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What is in a container of a class that torch's trees know (a deque, and what libraries register), and a function
    that makes one of other parts; None of anything else."""
    if (node := SUPPORTED_NODES.get(type(value))) is None:
        return None
    parts, rest = node.flatten_fn(value)
    return list(parts), lambda new: node.unflatten_fn(new, rest)


map_leaves: Callable[[Callable[[Any], Any], Any], Any] = tree_map
"""``(function, value)``: nested containers with ``function`` of everything else in them."""


# -- What libraries look for -----------------------------------------------------------------------------------


def answer_pipelines(module: nn.Module, finish_iteration: Callable[[], None]) -> None:
    """Let ``torch.distributed.pipelining`` find on a wrapped stage what it looks for on one of torch's FSDP2: it asks
    ``fully_shard.state(module)`` for what reduces gradients after the last micro-batch."""
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[fully_shard.__wrapped__] = _PipelineState(finish_iteration)  # type: ignore[attr-defined]


def is_replicated_by_torch(module: nn.Module) -> bool:
    """Whether torch's composable ``replicate`` reduces the gradients of all parameters of ``module``."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def answer_replicate(module: nn.Module) -> None:
    """Let torch's composable ``replicate`` leave parameters of a wrapped module to its unit, as those of torch's
    FSDP2."""
    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault(fully_shard.__name__, RegistryItem())


def tell_libraries(module: nn.Module) -> None:
    """Mark a module of a unit as torch's FSDP2 marks it, for libraries that ask.

    Those of ``transformers`` keep ranks in step then: they run layers that they would drop at random, and generate
    until the last rank is done. dynamo asks too, and must find the second mark, that parameters are not flattened.
    """
    module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


class _PipelineState:
    all_states = ()
    """torch reduces these one by one first; here all is done at once after."""

    def __init__(self, finish_iteration: Callable[[], None]):
        self._root_post_backward_final_callback = finish_iteration
        self._state_ctx = type(self)


class StateForTorch:
    """What torch's code finds as the private state of a wrapped module: what a forward begins and ends with, which
    torch's ``register_fsdp_forward_method`` runs, and the communication context, by which pipelines tell stages that
    share one, and which torch's ``share_comm_ctx`` lets it share.

    Args:
        context: of the module.
        pre_forward: of its unit.
        post_forward: of its unit.
    """

    __slots__ = ("_context", "_post_forward", "_pre_forward")

    def __init__(self, context: Any, pre_forward: Callable[..., Any], post_forward: Callable[..., Any]):
        self._context, self._pre_forward, self._post_forward = context, pre_forward, post_forward

    @property
    def _comm_ctx(self) -> Any:
        return self._context

    @_comm_ctx.setter
    def _comm_ctx(self, shared: Any) -> None:
        if shared is not self._context:
            shared.take_over(self._context)
            self._context = shared

    @property
    def _fsdp_param_groups(self) -> list[_GroupForTorch]:
        return [self._fsdp_param_group]

    @property
    def _fsdp_param_group(self) -> _GroupForTorch:  # what torch 2.11 asks for
        return _GroupForTorch()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_private(name)


class _GroupForTorch:
    """A module's parameters, of which torch sets only the context that their state has got already."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name != "comm_ctx":
            _refuse_private(name)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_private(name)


def _refuse_private(name: str) -> NoReturn:
    raise AttributeError(
        f"shardwise modules have no torch FSDPState: what asked for its {name!r} is a private part of torch's "
        "FSDP2, or a method of torch's FSDPModule that is newer than this version of shardwise"
    )

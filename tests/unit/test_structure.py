"""Promises about the package itself: public names, order of imports, private torch APIs and who may use them."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import shardwise
from shardwise.core import step
from shardwise.core.device import (
    eager,
    is_made_since,
    mark_parameter,
    next_node,
    steps_are_hooked,
    truncated_normal_code,
    untraced,
)

SOURCE = Path(shardwise.__file__).parent

ORDER = [
    "placements",
    "arguments",
    "core.errors",
    "core.changing",
    "core.weak",
    "core.layout",
    "core.order",
    "core.device",
    "core.norms",
    "core.lanes",
    "core.tree",
    "core.comm",
    "core.posts",
    "core.agreement",
    "core.replicas",
    "core.mesh",
    "core.model_parallel",
    "core.annotated",
    "core.buffer",
    "core.joint",
    "core.gradient",
    "core.whole",
    "core.replaced",
    "core.parameter",
    "core.step",
    "core.place",
    "core.options",
    "core.slot",
    "core.extension",
    "core.shards",
    "core.flat",
    "core.reducer",
    "core.pending",
    "core.group",
    "core.batch",
    "core.lost",
    "core.iteration",
    "core.context",
    "core.boundary",
    "core.awaited",
    "core.root",
    "core.hooks",
    "core.module",
    "fully_shard",
    "sites",
    "checkpoint.objects",
    "checkpoint.atomic",
    "checkpoint.integrity",
    "checkpoint.asynchronous",
    "checkpoint.interrupts",
    "checkpoint.names",
    "checkpoint.peers",
    "checkpoint.groups",
    "checkpoint.weights",
    "checkpoint.matching",
    "checkpoint.reading",
    "checkpoint.model_state",
    "checkpoint.optimizer_state",
    "checkpoint.rng",
    "checkpoint.contents",
    "checkpoint.progress",
    "checkpoint.full_state",
    "checkpoint.ranks",
    "checkpoint.restoring",
    "checkpoint.tensor_files",
    "checkpoint.safetensors",
    "checkpoint.writing",
    "checkpoint.sharded",
    "ema",
    "init.streams",
    "init.record",
    "init.operators",
    "init.hollow",
    "init.replay",
    "init.recorder",
    "init.access",
    "init.agreement",
    "init.context",
    "init.targets",
    "init.fast",
    "init.initializers",
    "init.materialize",
    "grad_scaler",
    "grad",
    "fairscale.ranks",
    "fairscale.oss",
    "fairscale.sharded_ddp",
    "fairscale.flat_parameter",
    "fairscale.fsdp_parameters",
    "fairscale.fsdp_optimizer",
    "lightning_common.namespaces",
    "lightning_common.processes",
    "lightning_common.replacing",
    "lightning_common.files",
    "lightning_common.arguments",
    "fairscale.checkpoint_wrapper",
    "fairscale.fsdp_arguments",
    "fairscale.fsdp_norms",
    "fairscale.fsdp_settings",
    "fairscale.fsdp_sharing",
    "fairscale.fsdp_weights",
    "fairscale.testing",
    "fairscale.fsdp",
    "fairscale.wrap",
    "fairscale.batch_norm",
    "adapters.copies",
    "mmengine.whole",
    "adapters.whole",
    "mmengine.saving",
    "adapters.policies",
    "adapters.wrapping",
    "mmengine.policies",
    "mmengine.processes",
    "mmengine.arguments",
    "lightning_common.weights",
    "lightning_common.units",
    "mmengine.units",
    "optim.repointing",
    "optim.members",
    "optim.pieces",
    "optim.runs",
    "optim.flat",
    "lightning_common.layers",
    "lightning_common.optimizers",
    "lightning_common.precision",
    "lightning",
    "fabric",
    "mmengine.optimizers",
    "mmengine.wrapper",
    "mmengine.strategy",
    "mmengine.runner",
]


def test_public_names() -> None:
    assert shardwise.__all__ == [
        "EMA",
        "CPUOffloadPolicy",
        "CheckpointError",
        "CorruptFileError",
        "FSDPCommContext",
        "FSDPModule",
        "GradientReductionHandle",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "Placements",
        "UnshardHandle",
        "clip_grad_norm_",
        "full_state_dict",
        "fully_shard",
        "init_on_meta",
        "latest",
        "load",
        "load_full_state_dict",
        "load_safetensors",
        "materialize",
        "register_fsdp_forward_method",
        "repoint",
        "save",
        "save_safetensors",
        "share_comm_ctx",
        "wait",
    ]
    for name in shardwise.__all__:
        assert getattr(shardwise, name).__doc__, name


def test_policies_and_base_class_are_torchs_own() -> None:
    from torch.distributed import fsdp

    assert shardwise.MixedPrecisionPolicy is fsdp.MixedPrecisionPolicy
    assert shardwise.CPUOffloadPolicy is fsdp.CPUOffloadPolicy
    assert shardwise.OffloadPolicy is fsdp.OffloadPolicy
    assert issubclass(shardwise.FSDPModule, fsdp.FSDPModule)


def test_what_torch_exports_for_fsdp2_can_be_imported_from_here() -> None:
    from torch.distributed.fsdp import _fully_shard

    assert "fully_shard" in _fully_shard.__all__
    assert [name for name in _fully_shard.__all__ if not hasattr(shardwise, name)] == []


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a module imports when it is imported itself."""
    found = set()
    name = module_name(path)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = name.split(".")[: -node.level]
            named = [node.module] if node.module else [alias.name for alias in node.names]
            found.update(".".join([*base, *one.split(".")]) for one in named)
    return found


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py"]


def test_imports_run_one_way() -> None:
    for path in modules():
        name = module_name(path)
        assert name in ORDER, f"{name} has no place in the order"
        for imported in own_imports(path):
            assert place_of(imported) < ORDER.index(name), f"{name} imports {imported}"


def place_of(name: str) -> int:
    """Of a module in the order; a package's is that of its last module."""
    return max(index for index, other in enumerate(ORDER) if other == name or other.startswith(f"{name}."))


OWNERS = ("core.device", "core.comm")
"""Where private torch APIs are used, and nowhere else."""

TENSORS = {"_base", "_cdata", "_is_param", "_local_tensor", "_schema", "_sequence_nr", "_spec", "_timeout", "_version"}
"""Private attributes of torch's objects that may also be names of our own."""

REGISTRIES = {
    *("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"),
    *("_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_load_state_dict_post_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
}
"""What every package that puts parameters, modules or hooks in the place of others has to reach in an `nn.Module`."""

OTHERS = {
    *("_apply", "_metadata"),  # of modules and their state dicts; torch lets subclasses override, and save, them
    *("_average_model", "_checkpoint_io", "_lightning_optimizers", "_reset_optimizers_and_schedulers", "_trainer"),
    *("_device_mesh", "_fabric", "_layer_sync", "_optimizer"),  # of Lightning, too
    *("_init_weights", "_reset_parameters", "_tied_weights_keys"),  # of transformers
    *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"),
    *("_init_model_weights", "_setup_distributed"),  # of MMEngine
    *("_getframe", "_fields"),  # of Python
    "_mesh_axis",  # of spmd_types
}
"""Private attributes that are not torch's own matter."""

BY_NAME = {"attrgetter", "changing", "delattr", "getattr", "hasattr", "methodcaller", "setattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__")


def own_names() -> set[str]:
    """Private names that this package defines: functions, classes, variables, and attributes that methods set."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
                found.add(node.attr)
            elif isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == ["__slots__"]:
                found.update(ast.literal_eval(node.value))
    return {name for name in found if is_private(name)} - TENSORS


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def dotted(node: ast.expr) -> list[str]:
    """``a.b.c`` as its names, the first of which is empty if it is not a variable's."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def imported_from_torch(tree: ast.AST) -> tuple[set[str], set[str], set[str]]:
    """Names in this module that are torch's; those of them that are in private modules; and, of what was imported, what
    is private itself or by its module."""
    names, hidden, private = set(), set(), set()
    for node in ast.walk(tree):
        imports: list[tuple[list[str], str]] = []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            imports = [([*node.module.split("."), one.name], one.asname or one.name) for one in node.names]
        elif isinstance(node, ast.Import):
            imports = [(one.name.split("."), one.asname or one.name.partition(".")[0]) for one in node.names]
        for path, name in imports:
            if path[0] == "torch":
                names.add(name)
                private.update(filter(is_private, path))
                if any(map(is_private, path)):
                    private.add(path[-1])
                    hidden.update({name} - {"torch"})
    return names, hidden, private


def private_names(source: str, own: set[str]) -> set[str]:
    """Of torch that are used in a module: imported, reached from what was, or attributes of anything else that neither
    this package defines nor is known to be of others."""
    tree = ast.parse(source)
    roots, hidden, found = imported_from_torch(tree)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    set_here = {node.attr for node in attributes if is_of_self(node) and isinstance(node.ctx, ast.Store)}
    known = own | REGISTRIES | OTHERS
    for node in attributes:
        root = dotted(node)[0]
        if isinstance(node.value, ast.Name) and root in hidden and node.value.id[:1].islower():
            found.add(node.attr)  # of a private module
        elif is_private(node.attr) and (root in roots or node.attr not in known):
            found |= {node.attr} - (set_here if is_of_self(node) else set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func)[-1] in BY_NAME:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            parts = {part for text in texts for part in text.split(".") if is_private(part)}
            found |= {part for part in parts if not part.startswith("_shardwise")} - known
    return found


def test_private_torch_apis_have_one_place() -> None:
    own = own_names()
    for path in [*modules(), *SOURCE.rglob("__init__.py")]:
        if module_name(path) not in OWNERS:
            used = private_names(path.read_text(), own)
            assert not used, f"{module_name(path)} uses {used}: let core.device or core.comm do it, for a reason"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._get_tracing_state()", {"_C", "_get_tracing_state"}),
        ("import torch._dynamo as dynamo", {"_dynamo"}),
        ("def f():\n    from torch._C import Node", {"_C", "Node"}),
        ("from torch.optim.optimizer import _use_grad_for_differentiable", {"_use_grad_for_differentiable"}),
        ("import torch.distributed as dist\ndist.group._own", {"_own"}),
        ("from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher.x", {"_op_dispatcher"}),
        ("tensor._version", {"_version"}),
        ("self.tensors[0]._version", {"_version"}),
        ("self._version = self.tensor._version", {"_version"}),
        ("import torch.distributed._memory as memory\nmemory.pool(1)", {"_memory", "pool"}),
        ("parameter._is_param = True", {"_is_param"}),
        ("self._spec", {"_spec"}),
        ("getattr(tensor, '_local_tensor', tensor)", {"_local_tensor"}),
        ("operator.attrgetter('x._base')", {"_base"}),
        ("tensor._something_new()", {"_something_new"}),
        ("self._version = self._own, other._own, module._parameters, x.__dict__, f(_)", set()),
    ],
)
def test_private_names_are_seen(source: str, found: set[str]) -> None:
    assert private_names(source, {"_own"}) == found


def test_registries_of_modules_exist() -> None:
    assert vars(nn.Module()).keys() >= REGISTRIES


PRIVATE_APIS = [
    "torch._add_batch_dim",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._enable_record_function",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._DisableFuncTorch",
    "torch._C._distributed_c10d.AllgatherOptions",
    "torch._C._distributed_c10d.Backend.Options._timeout",
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._storage_Use_Count",
    "torch._C._vmapmode_decrement_nesting",
    "torch._C._vmapmode_increment_nesting",
    "torch._C._will_engine_execute_node",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._chunk_cat",
    "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_lerp_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._neg_view",
    "torch._remove_batch_dim",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.autograd._profiler_enabled",
    "torch.autograd._unsafe_preserve_version_counter",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.RegistryItem",
    "torch.distributed._composable.contract.STATE_KEY",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.distributed._symmetric_memory.get_mem_pool",
    "torch.distributed._symmetric_memory.rendezvous",
    "torch.distributed._symmetric_memory.set_backend",
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._get_object_coll_device",
    "torch.distributed.distributed_c10d._hash_ranks_to_str",
    "torch.distributed.ProcessGroup._allgather_base",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._reduce_scatter_base",
    "torch.distributed.ProcessGroup.allgather_into_tensor_coalesced",
    "torch.distributed.ProcessGroup.bound_device_id",
    "torch.distributed.ProcessGroup.reduce_scatter_tensor_coalesced",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor.DTensor._op_dispatcher._allow_implicit_replication",
    "torch.distributed.tensor.DTensor._spec",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.nn.init._no_grad_trunc_normal_",
    "torch.ops.aten.add.Tensor._schema",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._base",
    "torch.Tensor._is_view",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.Tensor._view_func",
    "torch.UntypedStorage._cdata",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.SUPPORTED_NODES",
    "torch.utils._pytree.tree_map",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
    "torch.utils.checkpoint._CachingTorchDispatchMode",
]
"""What `OWNERS` use, by its path."""

TRIED = {"_is_param", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_sequence_nr", "_torchdynamo_disable"}
"""Attributes of objects alone, which no path leads to: a test below looks for each."""


@pytest.mark.parametrize("path", PRIVATE_APIS)
def test_private_torch_api_exists(path: str) -> None:
    assert pkgutil.resolve_name(path) is not None


def test_every_private_torch_api_is_looked_for() -> None:
    own, looked_for = own_names(), {part for path in PRIVATE_APIS for part in path.split(".")} | TRIED
    used = {name for owner in OWNERS for name in private_names(path_of(owner).read_text(), own)}
    assert used >= TRIED | TENSORS - {"_schema"}, "the names are not found any more"
    assert used <= looked_for, f"no test notices when torch drops {used - looked_for}"


def path_of(name: str) -> Path:
    return SOURCE.joinpath(*name.split(".")).with_suffix(".py")


def test_a_marked_dtensor_is_a_parameter(fake_mesh: Callable[..., DeviceMesh]) -> None:
    tensor: Any = distribute_tensor(torch.ones(2), fake_mesh(2), [Shard(0)])
    assert not isinstance(tensor, nn.Parameter)
    assert mark_parameter(tensor) is tensor
    assert isinstance(tensor, nn.Parameter)


def test_hooks_around_steps_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    own = register_optimizer_step_pre_hook(lambda *_: None)
    known = [own, *step._guard]  # other tests of this process have sharded something
    try:
        assert not steps_are_hooked(optimizer, known)
        assert steps_are_hooked(optimizer, step._guard)
        registrations: list[Callable[[Any], RemovableHandle]] = [
            optimizer.register_step_pre_hook,
            optimizer.register_step_post_hook,
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        ]
        for register in registrations:
            handle = register(lambda *_: None)
            assert steps_are_hooked(optimizer, known)
            handle.remove()
        assert not steps_are_hooked(optimizer, known)
    finally:
        own.remove()


def test_functions_that_are_not_traced_have_torchs_mark() -> None:
    marks = [vars(torch.compiler.disable(lambda: None)), vars(eager(lambda: None)), vars(untraced(lambda: None))]
    assert [mark["_torchdynamo_disable"] for mark in marks] == [True] * 3


def test_autograd_numbers_nodes_as_they_are_made() -> None:
    x = torch.ones(1, requires_grad=True)
    before = x * 2
    number = next_node()
    after = before * 2
    assert [is_made_since(one, number) for one in (x, before, after)] == [False, False, True]


def test_truncated_normal_keeps_its_arguments_in_the_variables_that_are_read() -> None:
    assert truncated_normal_code is not None
    assert {"mean", "std", "a", "b", "generator"} <= set(truncated_normal_code.co_varnames)


def test_functions_are_short() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1  # type: ignore[operator]
                assert lines < 60, f"{module_name(path)}.{node.name}: {lines} lines"


def test_import_does_not_pull_in_the_compiler() -> None:
    code = "import sys, shardwise; print('torch._dynamo' in sys.modules, 'torch._inductor' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.split() == ["False", "False"]

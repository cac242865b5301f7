"""Promises about the package itself: public names, order of imports, private torch APIs and who may use them."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise

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
    "core.parameter",
    "core.step",
    "core.slot",
    "core.extension",
    "core.shards",
    "core.flat",
    "core.reducer",
    "core.pending",
    "core.group",
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
    "checkpoint.reading",
    "checkpoint.peers",
    "checkpoint.groups",
    "checkpoint.weights",
    "checkpoint.matching",
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


PRIVATE = re.compile(
    r"torch(?:\.\w+)*\._(?!_)|from torch\S* import .*\b_\w"
    r"|\._C\b|_execution_engine|\._get_backend|_base\(|\._spec\b|\._local_tensor"
)


def test_private_torch_apis_have_one_place() -> None:
    allowed = {"core.device", "core.comm"}
    for path in modules():
        if module_name(path) not in allowed:
            used = PRIVATE.findall(path.read_text())
            assert not used, f"{module_name(path)} uses {used}"


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._are_functorch_transforms_active",
        "torch._C._current_graph_task_id",
        "torch._C._DisableFuncTorch",
        "torch._C._functorch.get_unwrapped",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.is_legacy_batchedtensor",
        "torch._C._vmapmode_increment_nesting",
        "torch._add_batch_dim",
        "torch._remove_batch_dim",
        "torch.autograd.forward_ad._current_level",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C._disabled_torch_function_impl",
        "torch._C._storage_Use_Count",
        "torch._C._dynamo.eval_frame.get_eval_frame_callback",
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "torch._chunk_cat",
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
        "torch.autograd._profiler_enabled",
        "torch._C._autograd._enable_record_function",
        "torch._C._autograd._get_sequence_nr",
        "torch._C._distributed_c10d.AllgatherOptions",
        "torch.autograd.Variable._execution_engine.queue_callback",
        "torch._C._len_torch_dispatch_stack",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.distributed._composable.contract.REGISTRY_KEY",
        "torch.distributed._composable.contract.RegistryItem",
        "torch.distributed.ProcessGroup._allgather_base",
        "torch.distributed.ProcessGroup._device_types",
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._reduce_scatter_base",
        "torch.distributed.ProcessGroup.allgather_into_tensor_coalesced",
        "torch.distributed.ProcessGroup.bound_device_id",
        "torch.distributed.ProcessGroup.reduce_scatter_tensor_coalesced",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.optim.optimizer._foreach_supported_types",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree.SUPPORTED_NODES",
        "torch.nn.init._no_grad_trunc_normal_",
        "torch.Tensor._is_view",
        "torch.Tensor._view_func",
    ],
)
def test_private_torch_api_exists(path: str) -> None:
    assert pkgutil.resolve_name(path) is not None


def test_autograd_numbers_nodes_as_they_are_made() -> None:
    from shardwise.core.device import is_made_since, next_node

    x = torch.ones(1, requires_grad=True)
    before = x * 2
    number = next_node()
    after = before * 2
    assert [is_made_since(one, number) for one in (x, before, after)] == [False, False, True]


def test_truncated_normal_keeps_its_arguments_in_the_variables_that_are_read() -> None:
    from shardwise.core.device import truncated_normal_code

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

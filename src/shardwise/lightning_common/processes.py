"""Where a strategy runs: its processes, their group and mesh, and what they tell each other."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from .namespaces import InEachNamespace, check_plugin

AXIS = "data_parallel"
"""Name of the mesh axis, as in Lightning's own strategies."""
REPLICATED_AXES = ("replicate", "shard")
"""Names of the axes where the model is sharded over a part of the ranks. None is ``AXIS``: a model that is wrapped over
one axis alone would not average gradients over the other."""


class ProcessesStrategy(InEachNamespace):
    """One process for each device, started by Lightning's script launcher or from outside."""

    _given_group: dist.ProcessGroup | None
    _mesh: DeviceMesh | None

    def _init_processes(self, backend: str | None, timeout: timedelta | None, process_group: Any) -> None:
        """
        Raises:
            TypeError: naming an argument of a wrong type, Lightning's own too.
            ValueError: if this rank is not in ``process_group``.
        """
        devices = self.parallel_devices
        is_list = isinstance(devices, (list, tuple)) and all(isinstance(device, torch.device) for device in devices)
        if devices is not None and not is_list:
            raise TypeError(f"parallel_devices must be a list of torch.device, one for each process, not {devices!r}")
        environment, plugin = self.cluster_environment, self._checkpoint_io
        check_plugin("cluster_environment", environment, "fabric", "plugins.environments", "ClusterEnvironment")
        check_plugin("checkpoint_io", plugin, "fabric", "plugins.io", "CheckpointIO")
        if not isinstance(backend, str | None):
            raise TypeError(f"process_group_backend must be the name of a backend, not {backend!r}")
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("process_group: this rank is not in the group that was passed to the strategy")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group must be a ProcessGroup, not {type(process_group).__name__}")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a timedelta, not {timeout!r}")
        self._process_group_backend, self._timeout, self._given_group = backend, timeout, process_group
        self._mesh, self._nodes = None, 1

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes, each with as many processes."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._nodes = number

    # Fabric's connector sets this one.
    _num_nodes = num_nodes

    @property
    def is_distributed(self) -> bool:
        """Always: Lightning then gives each process its part of the data."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the data are divided: over all processes."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Name of the backend; None for that of the device."""
        return self._process_group_backend

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that the model is sharded over, this one among them.

        Raises:
            RuntimeError: before the processes have found each other.
        """
        return self.device_mesh.get_group(self.device_mesh.ndim - 1)

    @property
    def device_mesh(self) -> DeviceMesh:
        """A mesh of all ranks, with one axis; with a smaller ``process_group`` two, the last of which shards.

        Raises:
            RuntimeError: before the processes have found each other.
        """
        if self._mesh is None:
            raise RuntimeError("the device mesh exists once the Trainer runs, or after Fabric.launch()")
        return self._mesh

    def _configure_launcher(self) -> None:
        """Run the script again for each further process."""
        if not self.cluster_environment.creates_processes_externally:
            module, name = "strategies.launchers.subprocess_script", "_SubprocessScriptLauncher"
            launcher = self.namespace.of(self.part, module, name)
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the process group, and make the mesh.

        Raises:
            ValueError: if the launcher started another number of processes than Lightning was told.
        """
        # Lightning's launcher does this too, which is not there where another one starts the processes.
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        super().setup_environment()
        self.namespace.of("fabric", "utilities.seed", "reset_seed")()
        self._set_world_ranks()
        device = self.root_device
        if self._process_group_backend is None:
            name = "_get_default_process_group_backend_for_device"
            self._process_group_backend = self.namespace.of("fabric", "utilities.distributed", name)(device)
        connect = self.namespace.of("fabric", "utilities.distributed", "_init_dist_connection")
        device_id = device if device.type != "cpu" else None
        connect(self.cluster_environment, self._process_group_backend, timeout=self._timeout, device_id=device_id)
        if self._mesh is None:
            self._mesh = self._make_mesh(device)

    def _make_mesh(self, device: torch.device) -> DeviceMesh:
        given = self._given_group
        if given is None:
            return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(AXIS,))
        own = dist.get_process_group_ranks(given)
        groups: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(groups, own)
        rows = sorted(map(list, set(map(tuple, groups))))
        is_partition = sorted(rank for row in rows for rank in row) == list(range(len(groups)))
        if not is_partition or len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"process_group has the ranks {own}, and the groups of all ranks are {rows}: every rank must be in "
                "one, and all must have the same size"
            )
        if len(rows) == 1:
            return DeviceMesh.from_group(given, device.type, mesh_dim_names=(AXIS,))
        # Lightning deals the data to all ranks, so gradients are averaged over the groups too.
        columns = [dist.new_group(column, timeout=self._timeout) for column in map(list, zip(*rows, strict=True))]
        return DeviceMesh.from_group(
            [columns[own.index(dist.get_rank())], given],
            device.type,
            mesh=torch.tensor(rows),
            mesh_dim_names=REPLICATED_AXES,
        )

    def _set_world_ranks(self) -> None:
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for package in ("lightning_utilities.core", f"{self.namespace.fabric}.utilities"):
            importlib.import_module(f"{package}.rank_zero").rank_zero_only.rank = self.global_rank

    # -- Messages

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until all processes are here."""
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The picklable object of rank ``src``, on every rank."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if isinstance(tensor, DTensor):  # as torch's clip_grad_norm_ gives
            tensor = tensor.full_tensor()
        reduce = self.namespace.of("fabric", "utilities.distributed", "_sync_ddp_if_available")
        return reduce(tensor, group, reduce_op=reduce_op)

"""What the Trainer's strategy does with each of its arguments."""

from __future__ import annotations

from ..arguments import Argument, Support

ACCEPTED = Support.ACCEPTED

TRAINER_ARGUMENTS = {
    "accelerator": Argument("the accelerator to run on, if not by the Trainer's argument; any that has devices"),
    "cpu_offload": Argument("keep shards, gradients and the optimizer's state in the host's memory"),
    "flatten_parameters": Argument(
        "parameters are cut one by one into DTensors, and kept and communicated in one buffer per unit all the same, "
        "which is what flattening is for; results do not depend on it",
        ACCEPTED,
    ),
    "reshard_after_forward": Argument(
        "free gathered parameters between forward and backward; those of the root, which backward needs first, "
        "are kept in any case"
    ),
    "move_grads_to_cpu": Argument(
        "None, or equal to cpu_offload: gradients are kept where their parameters are; anything else is an error"
    ),
    "fp32_reduce_scatter": Argument(
        "reduce gradients in float32; otherwise in the dtype that parameters are gathered in"
    ),
    "compute_dtype": Argument(
        "dtype that parameters are gathered in, and inputs of units converted to; None for the parameters' own. "
        "Mixed precision needs none: it computes in its dtype by autocast, from float32 parameters, as without sharding"
    ),
    "bucket_cap_mb": Argument(
        "gradients are reduced one unit at a time as soon as they are there; results do not depend on it", ACCEPTED
    ),
    "min_num_params": Argument(
        "modules with at least as many parameters become units, if there is no auto_wrap_policy"
    ),
    "state_dict_to_cpu": Argument("full state dicts are put into the host's memory, otherwise they stay on the device"),
    "parallel_devices": Argument("devices of this node, if not by the Trainer's argument"),
    "cluster_environment": Argument("how processes find each other, if not detected"),
    "checkpoint_io": Argument("reads and writes full checkpoints; sharded ones are written by torch.distributed"),
    "precision_plugin": Argument("precision, if not by the Trainer's argument"),
    "process_group_backend": Argument('"nccl", "gloo" …; None for that of the device'),
    "timeout": Argument("of collectives"),
    "auto_wrap_policy": Argument(
        "chooses the units: classes of modules, a function of a module, or one of torch's or FairScale's form"
    ),
    "mp_policy": Argument("dtypes of the units (torch's MixedPrecisionPolicy), instead of compute_dtype"),
    "activation_checkpointing_policy": Argument(
        "chooses, as auto_wrap_policy does, the modules that compute their activations again in backward"
    ),
    "state_dict_type": Argument('checkpoints are one file ("full") or a directory of torch.distributed ("sharded")'),
    "process_group": Argument(
        "the ranks to shard over; None for all. If groups of one size divide all ranks, each holds a copy of the "
        "model, and gradients are averaged over all ranks"
    ),
}


def checked_state_dict_type(value: str) -> str:
    """
    Raises:
        ValueError: if it is neither of the two.
    """
    if value not in ("full", "sharded"):
        raise ValueError(f"state_dict_type must be 'full' or 'sharded', not {value!r}")
    return value

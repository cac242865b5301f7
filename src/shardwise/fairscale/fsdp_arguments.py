"""What FullyShardedDataParallel does with each of FairScale's arguments."""

from __future__ import annotations

from ..arguments import Argument, Support

ARGUMENTS = {
    "module": Argument("what to wrap, in place; parameters of instances inside it are left to them"),
    "process_group": Argument("the ranks that share each parameter; None for all"),
    "process_group_reduce_scatter": Argument(
        "the ranks' group for gradients: 'reduce_scatter' for a communicator of its own, 'default' or None for that of "
        "the gathers, or a group of the same ranks"
    ),
    "reshard_after_forward": Argument("whether whole parameters are freed between forward and backward"),
    "disable_reshard_on_root": Argument("whether the outermost instance keeps its whole parameters all the same"),
    "mixed_precision": Argument("whether compute_dtype differs from that of the parameters, which is then float32"),
    "fp32_reduce_scatter": Argument("whether gradients are reduced in float32; needs mixed_precision"),
    "flatten_parameters": Argument(
        "whether an instance's parameters are joined to one; otherwise each is flattened and cut by itself"
    ),
    "move_params_to_cpu": Argument("whether shards, gradients and with them the optimizer's state live on the host"),
    "compute_dtype": Argument("dtype of the whole parameters; float16 with mixed_precision, float32 without"),
    "buffer_dtype": Argument("dtype of floating-point buffers; compute_dtype by default"),
    "move_grads_to_cpu": Argument(
        "on an accelerator it must equal move_params_to_cpu, since torch wants parameters and gradients on one device"
    ),
    "bucket_cap_mb": Argument("an instance's gradients are one collective anyway", Support.ACCEPTED),
    "compute_device": Argument("where whole parameters are; by default where process_group communicates"),
    "no_broadcast_optim_state": Argument("whether gathered optimizer state leaves out that of this instance"),
    "state_dict_device": Argument(
        "where `state_dict` and `local_state_dict` put tensors; by default where it computes, or stores"
    ),
    "clear_autocast_cache": Argument("whether autocast forgets cast weights after each forward"),
    "force_input_to_fp32": Argument("whether half-precision inputs become float32 where mixed_precision is off"),
    "verbose": Argument("whether printing the module shows all settings"),
    "cpu_offload": Argument("another name of move_params_to_cpu"),
    "state_dict_on_rank_0_only": Argument("whether ranks other than the first get an empty `state_dict`"),
    "gradient_predivide_factor": Argument(
        "divides gradients before they are summed; the number of ranks divided by it divides the sum"
    ),
    "allow_reset_parameters": Argument("whether `reset_parameters` may be called"),
}

"""PyTorch's own tests of DDP, with gradcast in its place: what passes with DDP on the CPU has to pass with gradcast.

Attached are all DDP modules that a test makes, by everywhere.py. In overlap mode where the test makes an optimizer of
exactly the module's parameters. Tests that exist as text only, inside of a string in PyTorch's file, are not tests.
"""

import subprocess
import sys

import pytest

from training.pool import environment

_SYNC_BATCH_NORM = "needs a GPU: SyncBatchNorm has no version for the CPU"
_MIXED = "needs a GPU: DDP's mixed precision uses CUDA streams"
_OPTIM_IN_BACKWARD = "needs a GPU: DDP's optimizer in backward uses CUDA streams (gradcast refuses such parameters)"
_SKIPPED = "PyTorch itself skips it: "
_NO_MODULE = "makes no DDP module: "
_IGNORED = "refused: DDP ignores parameters or buffers"
_HOOK = "refused: the test's only module has a communication hook, and gradcast takes its place"
_OWN_ERROR = "expects an error of DDP's own, where gradcast trains on: "
_OWN_WORK = "looks at DDP's own work, which gradcast takes over: "

# Not run with gradcast, and why.
NOT_APPLICABLE = {
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BATCH_NORM,
    "test_ddp_inference": _SYNC_BATCH_NORM,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BATCH_NORM,
    "test_sync_bn_logged": _SYNC_BATCH_NORM,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_native_mixed_precision_ignored_params": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_apply_optim_in_backward": _OPTIM_IN_BACKWARD,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _OPTIM_IN_BACKWARD,
    "test_ddp_apply_optim_in_backward_ignored_params": _OPTIM_IN_BACKWARD,
    "test_ddp_device": "needs a GPU: that DDP moves inputs to it is what is tested",
    "test_ddp_logging_data_gpu": "needs a GPU: checks what DDP notes about GPUs",
    "test_ddp_hook_pickling_powerSGD": "fails without gradcast: torch.load refuses the state of PowerSGD's hook",
    "test_ddp_has_finalized": _SKIPPED + "PyTorch issue 102751",
    "test_ddp_sync_bn_training_vs_eval": _SKIPPED + "PyTorch pull request 113620",
    "test_ddp_profiling_execution_trace": _SKIPPED + "without NCCL, whose records it reads",
    "test_DistributedDataParallel_requires_grad": _NO_MODULE + "DDP refuses the one of the test",
    "test_ddp_model_diff_num_params_across_ranks": _NO_MODULE + "DDP refuses the one of the test",
    "test_ddp_model_diff_shape_across_ranks": _NO_MODULE + "DDP refuses the one of the test",
    "test_dump_DDP_relevant_env_vars": _NO_MODULE + "prints variables of the environment",
    "test_ddp_ignore_params_arg": _IGNORED,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _IGNORED,
    "test_get_data_parallel_params": _IGNORED,
    "test_accumulate_gradients_no_sync_allreduce_hook": _HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _HOOK,
    "test_ddp_create_graph": "refused: in backward, gradients with a graph of their own (create_graph=True)",
    "test_ddp_multiple_nested_unused_params_error": _OWN_ERROR + "unused parameters without find_unused_parameters",
    "test_ddp_unused_params_rebuild_buckets_exception": _OWN_ERROR + "unused parameters without find_unused_parameters",
    "test_invalid_static_graph": _OWN_ERROR + "a static graph that changes",
    "test_ddp_control_flow_different_across_ranks": _OWN_WORK + "the reducer's map of used parameters",
    "test_ddp_control_flow_same_across_ranks": _OWN_WORK + "the reducer's map of used parameters",
    "test_ddp_logging_data_cpu": _OWN_WORK + "times and bucket sizes in its log",
    "test_ddp_profiling_autograd_profiler": _OWN_WORK + "the number of its all-reduces",
    "test_ddp_profiling_torch_profiler": _OWN_WORK + "the number of its all-reduces",
    "test_skip_all_reduce_unused_parameters": _OWN_WORK + "the number of its buckets",
}

_HOOKED = "the module with a communication hook stays DDP's; the other one is gradcast's"
_WRAPPED_AGAIN = "the module is wrapped in DDP again while the wrapper before is alive; the first one is gradcast's"

# Tests in which some of the modules stay DDP's, or are given back before the end.
IN_PART = {
    "test_ddp_build_debug_param_to_name_mapping": "the module with parameters that DDP ignores stays DDP's",
    "test_ddp_comm_hook_logging": "modules with a communication hook stay DDP's; the others are gradcast's",
    "test_ddp_hook_parity_allreduce": _HOOKED,
    "test_ddp_hook_parity_allreduce_process_group": _HOOKED,
    "test_ddp_hook_parity_post_localSGD": _HOOKED,
    "test_ddp_hook_parity_powerSGD": _HOOKED,
    "test_ddp_uneven_inputs": "modules with a communication hook stay DDP's; the others are gradcast's",
    "test_ddp_new_tensor_in_fwd": _WRAPPED_AGAIN,
    "test_ddp_new_tensor_in_fwd_static_graph": _WRAPPED_AGAIN,
    "test_ddp_returns_tensor_with_no_grad": _WRAPPED_AGAIN,
    "test_ddp_static_graph_nested_types": _WRAPPED_AGAIN,
    "test_detect_ddp_is_actually_static": _WRAPPED_AGAIN,
    "test_ddp_device_mesh_initialization": "the module is detached where the test wraps it again, which DDP refuses",
    "test_ddp_python_error_logged": "the module is detached where the test registers a communication hook",
    "test_ddp_remove_autograd_hooks": "the first module is detached where the test takes DDP's own hooks off",
}


def names() -> list[str]:
    command = [sys.executable, "-m", "peers.suite", "list"]
    return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout.split()


NAMES = names()


def events(result: dict) -> set[str]:
    return {event for event, _ in result["notes"]}


def applies(result: dict, mode: str) -> bool:
    """Whether every module of the test was gradcast's, and the test passed."""
    return (
        result["outcome"] == "passed"
        and mode in events(result)
        and not events(result) & {"refused", "refused overlap", "detached"}
    )


def test_every_listed_test_exists():
    assert {*NOT_APPLICABLE, *IN_PART} <= set(NAMES)
    assert not set(NOT_APPLICABLE) & set(IN_PART)
    assert len(NAMES) >= 100, "too few tests were found"


@pytest.mark.parametrize("name", NAMES)
def test_of_pytorch(name, runners, record_property):
    def run(mode):
        result = runners(mode, name)
        record_property(mode, result["outcome"])
        return result

    plain = run("plain")
    if name in NOT_APPLICABLE:
        reason = NOT_APPLICABLE[name]
        record_property("reason", reason)
        passes = plain["outcome"] == "passed" and applies(run("hook"), "hook")
        assert not passes, "passes with gradcast: take it off NOT_APPLICABLE"
        pytest.skip(f"not applicable: {reason}")
    assert plain["outcome"] == "passed", f"fails without gradcast: give a reason in NOT_APPLICABLE\n{plain['text']}"
    hook = run("hook")
    assert hook["outcome"] == "passed", f"in hook mode: {hook['text']}"
    assert "hook" in events(hook), "gradcast was attached to nothing: give a reason in NOT_APPLICABLE"
    assert applies(hook, "hook") == (name not in IN_PART), f"what stays DDP's belongs in IN_PART: {hook['notes']}"
    if name in IN_PART:
        record_property("part", IN_PART[name])
    if "owned" not in events(hook):
        return
    overlap = run("overlap")
    assert overlap["outcome"] == "passed", f"in overlap mode: {overlap['text']}"
    assert applies(overlap, "overlap"), f"in overlap mode gradcast refuses: {overlap['notes']}"

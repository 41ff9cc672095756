"""Accelerate's own test programs on two ranks, with gradcast attached to every DDP module that they make."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from peers.everywhere import NOTES_VARIABLE
from training.launch import free_port
from training.pool import environment

SCRIPTS = "accelerate.test_utils.scripts"
PROGRAMS = ["test_script", "test_sync"]
_DATA = "needs data sets and models from the network"
NOT_APPLICABLE = {
    "test_cli": "makes no DDP module: prints how many GPUs there are",
    "test_ddp_comm_hook": "needs a GPU: gives DDP the number of one (gradcast refuses communication hooks)",
    "test_distributed_data_loop": "fails without gradcast: Accelerate leaves join() out on the CPU, and DDP waits",
    "test_merge_weights": "FSDP, not DDP",
    "test_notebook": "makes no DDP module: starts processes from a notebook",
    "test_ops": "makes no DDP module: gathers and broadcasts tensors",
    "external_deps.test_checkpointing": _DATA,
    "external_deps.test_ds_alst_ulysses_sp": "DeepSpeed, not DDP",
    "external_deps.test_ds_multiple_model": "DeepSpeed, not DDP",
    "external_deps.test_metrics": _DATA,
    "external_deps.test_peak_memory_usage": _DATA,
    "external_deps.test_performance": _DATA,
    "external_deps.test_pippy": "pipelines, not DDP",
    "external_deps.test_zero3_integration": "DeepSpeed, not DDP",
}


def run(program, mode, folder: Path) -> list[str]:
    """What happened to the modules, on rank 0."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    job = {"ACCELERATE_USE_CPU": "true", NOTES_VARIABLE: str(folder / "rank")}
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "peers.run_with_gradcast", mode, f"{SCRIPTS}.{program}"],
        env=environment() | job,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher then ends its ranks
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, f"{mode}: {told[-8000:]}"
    path = folder / "rank0"
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_every_program_is_run_or_has_a_reason():
    folder = Path(find_spec(SCRIPTS).submodule_search_locations[0])
    found = {str(path.relative_to(folder))[:-3].replace(os.sep, ".") for path in folder.rglob("test_*.py")}
    assert found == {*PROGRAMS, *NOT_APPLICABLE}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mode", ["hook", "overlap"])
def test_of_accelerate(program, mode, tmp_path, record_property):
    happened = run(program, mode, tmp_path)
    record_property(mode, "passed")
    assert not {"refused", "refused overlap", "detached"} & set(happened)
    assert mode in happened


@pytest.mark.parametrize("program", NOT_APPLICABLE)
def test_not_applicable(program):
    pytest.skip(f"not applicable: {NOT_APPLICABLE[program]}")

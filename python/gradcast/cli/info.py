"""``gradcast info``: the parts of this installation, and why parts are missing."""

import argparse
import json
import platform
import subprocess
from typing import Any

from gradcast import __version__, bench
from gradcast.cli import common
from gradcast.errors import Error


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "info",
        "show what this installation consists of",
        "Lists versions, the extension for torch, and the parts of gradcast-bench: MPI, CUDA, NCCL.",
        "gradcast info",
    )
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    parts = {"gradcast": __version__, "python": platform.python_version(), **_torch(), **_bench()}
    if args.json:
        common.print_json(parts)
        return
    common.print_table([[name, text] for name, text in parts.items()], ["part", "state"], "ll")


def _torch() -> dict[str, str]:
    try:
        import torch
    except ImportError:
        return {"torch": "not installed; planning works without it, training needs it"}
    dist = torch.distributed
    names = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device here"
    return {
        "torch": torch.__version__,
        "torch's CUDA": f"{torch.version.cuda or 'none, this is a CPU build'}; {devices}",
        "torch's backends": ", ".join(names) or "none",
        "part for torch": _extension(),
    }


def _extension() -> str:
    from gradcast.training.compat import extension, native_build

    try:
        path = extension.find()
    except (Error, native_build.BuildError) as error:
        return f"cannot be built: {error}"
    return (
        str(path) if path is not None else "not built yet; the first training compiles it, which takes a minute or two"
    )


def _bench() -> dict[str, str]:
    if not bench.PROGRAM.exists():
        return {"gradcast-bench": "not built; in the source tree `pip install -v .` shows why"}
    done = subprocess.run([bench.PROGRAM, "--parts"], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:  # a library that it was built with is missing
        return {"gradcast-bench": f"cannot run: {done.stderr.strip()}"}
    return {"gradcast-bench": str(bench.PROGRAM)} | {
        f"built with {name}": state for name, state in json.loads(done.stdout).items()
    }

"""Starts the workers of ``gradcast dev lab train`` on hosts made for them, and reads their results."""

from pathlib import Path
from typing import IO, Any

from gradcast import _core
from gradcast.lab.errors import LabError
from gradcast.lab.hosts import Network
from gradcast.lab.settings import Settings
from gradcast.lab.workers import run_for_result

# Copies of each tensor: parameter, gradient, momentum, and the buffer that the gradient is sent from.
_COPIES = 4
_PROCESS_BYTES = 400e6  # Python with torch, per rank


def train(settings: Settings, *, timeout_s: float, output: IO[str]) -> dict[str, Any]:
    """Returns rank 0's measurements, see worker.py. ``output``: for the progress."""
    _check_memory(settings)
    rates = settings.rates_bits_per_s
    with Network(settings.hosts, rates[0], settings.latency_s) as network:
        for host, rate in enumerate(rates):
            network.set_rate(host, rate)
        return run_for_result(
            "gradcast.lab.worker:measure",
            [settings],
            settings.world_size,
            promptly=settings.stand_in,
            timeout_s=timeout_s,
            network=network,
            ranks_per_host=settings.ranks_per_host,
            output=output,
        )


def _check_memory(settings: Settings) -> None:
    """Raises LabError if the memory does not suffice, before the kernel kills some process during the run."""
    if settings.profile is None:
        return
    tensors = _core.Profile.from_json(settings.profile).tensors
    model_bytes = settings.scale_size * sum(tensor.bytes for tensor in tensors)
    needed = settings.world_size * (_PROCESS_BYTES + _COPIES * model_bytes * len(settings.names))
    available = _available_bytes()
    if needed > available:
        raise LabError(
            f"{settings.world_size} ranks with {len(settings.names)} models of {model_bytes / 1e6:.0f} MB each need "
            f"about {needed / 1e9:.0f} GB of memory, and {available / 1e9:.0f} GB are free; make --scale-size smaller "
            "or compare less"
        )


def _available_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), float("inf"))

"""The random generators that programs use by default."""

import random
import sys
from typing import Any

import torch

from gradcast.errors import refused


def random_state(device: torch.device) -> dict[str, Any]:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def require_random_state(state: dict[str, Any]) -> None:
    """Raises Error(invalid_use) for a state that cannot be restored."""
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(state["torch"])
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(state["numpy"])
    except Exception as error:  # of each generator's own kind
        raise refused(f"its random state cannot be restored ({type(error).__name__}: {error})") from None

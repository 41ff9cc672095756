"""What all plots share."""

from typing import Any

import matplotlib.pyplot as plt

from gradcast.errors import Error

__all__ = ["bare", "plt", "save"]

_DPI = 150


def bare(axes: Any) -> None:
    """Removes all axis lines but the time axis."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise Error(f"the plot cannot be written to {path}: {error}; name a file such as plot.png") from None
    finally:
        plt.close(figure)

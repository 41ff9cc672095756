"""Pictures of plans and sweeps. Needs matplotlib, which is optional: import this only where a picture is asked for."""

from gradcast.errors import Error

try:
    import matplotlib as _matplotlib
except ImportError as error:
    raise Error("pictures need matplotlib, which is not installed: pip install 'gradcast[plot]'") from error

# Files only: a machine in a rack has no display.
_matplotlib.use("Agg")

from gradcast.plots.adapt import draw_adapt
from gradcast.plots.bench import draw_bench
from gradcast.plots.lab import draw_lab
from gradcast.plots.lanes import draw_comparison, draw_plan
from gradcast.plots.scaling import draw_scaling
from gradcast.plots.sweep import draw_sweep

__all__ = ["draw_adapt", "draw_bench", "draw_comparison", "draw_lab", "draw_plan", "draw_scaling", "draw_sweep"]

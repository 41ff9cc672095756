"""Plots. They need matplotlib, which is optional, so this is imported only when a plot is requested."""

from gradcast.errors import Error

try:
    import matplotlib as _matplotlib
except ImportError as error:
    raise Error("plots need matplotlib, which is not installed; pip install 'gradcast[plot]'", "environment") from error
except ValueError as error:
    raise Error(f"matplotlib does not start: {error}; correct MPLBACKEND or matplotlibrc", "environment") from error

# Writes files only: servers have no display.
_matplotlib.use("Agg")

from gradcast.plots.bench import draw_bench
from gradcast.plots.lab import draw_adapt, draw_lab
from gradcast.plots.lanes import draw_comparison, draw_plan
from gradcast.plots.scaling import draw_scaling
from gradcast.plots.sweep import draw_sweep

# A picture is the same for everyone: a user's own settings may need programs, such as LaTeX.
_matplotlib.rcdefaults()

__all__ = ["draw_adapt", "draw_bench", "draw_comparison", "draw_lab", "draw_plan", "draw_scaling", "draw_sweep"]

"""Draw a run. Only this folder uses matplotlib, and it is imported when a picture is drawn.

Every function takes a `Record`, a `Run`, a recorder, a Watcher or a Learner. It returns the Axes
(pass `ax=`) if it draws one panel, and the Figure (pass `fig=`) if it draws several. Steps are
optimizer steps; dotted lines mark epochs; colours go from the first layer (dark) to the last
(light) and suit colour-blind readers; vermilion means NaN or Inf and nothing else. Layers without
values are left out, and the title says so.

    figures   figures, files, colours, and helpers for axes
    heatmaps  plot_run: layers by steps
    lines     plot_stats, plot_updates, plot_dead, plot_layer_stats, plot_depth: a line per layer;
              plot_loss and plot_lr_find: one line
    spread    color_dim, plot_density: histograms
"""

from hookkit.plotting import figures as figures  # first: it says how to install matplotlib
from hookkit.plotting.figures import offscreen, png, save
from hookkit.plotting.heatmaps import plot_run
from hookkit.plotting.lines import (
    plot_dead,
    plot_depth,
    plot_layer_stats,
    plot_loss,
    plot_stats,
    plot_updates,
)
from hookkit.plotting.spread import color_dim, plot_density

__all__ = [
    "color_dim",
    "offscreen",
    "plot_dead",
    "plot_density",
    "plot_depth",
    "plot_layer_stats",
    "plot_loss",
    "plot_run",
    "plot_stats",
    "plot_updates",
    "png",
    "save",
]

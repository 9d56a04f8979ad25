"""Draw a run: the only folder that knows matplotlib, loaded only when a picture is drawn.

Every function takes what was recorded (a `Record`, a `Run`, a recorder or a driver that gives one)
and returns what it drew on: an Axes (pass `ax=`) where there is one panel, a Figure (pass `fig=`)
where there are several. Steps are optimizer steps; dotted lines mark epochs; colours run from the
first layer (dark) to the last (light) and are safe for colour-blind readers; vermilion means NaN or
Inf and nothing else. Layers without values are left out, and the title says so.

    figures   figures, files, colours, and what axes have in common
    heatmaps  plot_run: layers by steps
    lines     plot_stats, plot_updates, plot_dead, plot_layer_stats, plot_depth: a line a layer;
              plot_loss, and what lr_find found: one line
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

"""The pictures of a run: the only place that knows matplotlib, loaded only when one is drawn.

Every function takes what was recorded (a `Record`, a `Run`, a recorder or a driver that gives one)
and returns what it drew on: an Axes (pass `ax=`) where there is one panel, a Figure (pass `fig=`)
where there are several. Steps are optimizer steps; dotted lines mark epochs; colours run from the
first layer (dark) to the last (light) and are safe for colour-blind readers; vermilion means NaN or
Inf and nothing else.

    canvas      figures, files, colours; imports matplotlib, or says how to get it
    plotdata    ticks, edges, limits, smoothing: what can be decided without matplotlib
    naming      which layers, in which order, under which names
    axes        titles, layers' names, marks of epochs and of NaN or Inf
    heatmaps    plot_run
    spreads     color_dim, plot_density
    curves      plot_stats, plot_updates, plot_dead, plot_layer_stats
    profiles    plot_depth, plot_loss
"""

from hookkit.plotting.canvas import offscreen, png, save
from hookkit.plotting.curves import plot_dead, plot_layer_stats, plot_stats, plot_updates
from hookkit.plotting.heatmaps import plot_run
from hookkit.plotting.profiles import plot_depth, plot_loss
from hookkit.plotting.spreads import color_dim, plot_density

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

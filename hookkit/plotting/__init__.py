"""The pictures of a run: the only place that knows matplotlib, loaded only when one is drawn.

Every function takes what was recorded (a `Record`, a `Run`, a recorder or a driver that gives one)
and returns what it drew on: an Axes (pass `ax=`) where there is one panel, a Figure (pass `fig=`)
where there are several. Steps are optimizer steps; dotted lines mark epochs; colours run from the
first layer (dark) to the last (light) and are safe for colour-blind readers; vermilion means NaN or
Inf and nothing else.

    figures     figures, files, colours, text; says how to install matplotlib
    arrays      edges, limits, smoothing: what can be decided without matplotlib
    labels      names of layers that fit where they are drawn
    axes        titles, scales and ticks, names of layers, marks of epochs and of NaN or Inf
    bins        axes of histograms: where bins lie, how wide they are, densities, ticks
    heatmaps    plot_run
    histograms  color_dim, plot_density
    lines       plot_stats, plot_updates, plot_dead, plot_layer_stats
    depth       plot_depth
    loss        plot_loss
    rates       the learning rate over a training, and what lr_find found
    svg         a picture as SVG for a page, light or dark
"""

from hookkit.plotting import figures as figures  # first: it says how to install matplotlib
from hookkit.plotting.depth import plot_depth
from hookkit.plotting.figures import offscreen, png, save
from hookkit.plotting.heatmaps import plot_run
from hookkit.plotting.histograms import color_dim, plot_density
from hookkit.plotting.lines import plot_dead, plot_layer_stats, plot_stats, plot_updates
from hookkit.plotting.loss import plot_loss

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

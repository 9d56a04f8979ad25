"""Draws nbs/images/mended.png: a training that fails, named by `diagnose`, and the mended one.

python docs/first_picture.py nbs/images
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib import rc_context, style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

from hookkit import ActivationStats, GradientStats, ParamStats, Run, watch
from hookkit.plotting import plot_run, save


def train(lr: float, warm: int) -> Run:
    """Eight layers that learn digits, with Adam."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16 - 0.3, torch.tensor(digits.target)
    layers = [m for _ in range(7) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1, (step + 1) / warm))
    recorders = ActivationStats(units=True), GradientStats(), ParamStats()
    with watch(model, opt, *recorders) as w:
        for _ in range(4):
            for batch in torch.randperm(len(x)).split(32):
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                opt.zero_grad()
                loss.backward()
                opt.step()
                schedule.step()
                w.loss(loss)
            w.epoch()
    return w.run_record()


def draw(runs: dict[float, Run], path: Path) -> None:
    """Draws gradients and updates of the runs side by side into a PNG file."""
    fig = Figure((10, 5), layout="constrained")
    for part, (lr, run) in zip(fig.subfigures(1, 2), runs.items(), strict=True):
        plot_run(replace(run, activations=None), findings=[], fig=part)
        found = [f for f in run.diagnose() if f.severity != "note"]
        named = f"{found[0].severity}: {found[0].rule}" if found else "healthy"
        loss = f"the loss goes from {run.losses[0]:.2g} to {run.losses[-20:].mean():.2g}"
        words = {"x": 0.02, "ha": "left", "fontsize": 10, "weight": "bold"}
        part.suptitle(f"lr={lr:g}: {named}\n{loss}", **words)
    save(fig, path, dpi=130)


def main(folder: Path) -> None:
    """Draws mended.png, and mended_dark.png for dark pages."""
    runs = {lr: train(lr, warm) for lr, warm in ((0.1, 1), (1e-3, 20))}
    draw(runs, folder / "mended.png")
    with rc_context(dict(style.library["dark_background"], **{"figure.facecolor": "#14181e"})):
        draw(runs, folder / "mended_dark.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

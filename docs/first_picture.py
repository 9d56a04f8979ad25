"""Draws nbs/images/mended.png: a training that fails, named by `diagnose`, and the mended one."""

import sys
import textwrap
from pathlib import Path

import torch
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


def main(path: Path) -> None:
    """Draws both runs side by side into a PNG file."""
    fig = Figure((16, 7.6), layout="constrained")
    for part, (lr, warm) in zip(fig.subfigures(1, 2), ((0.1, 1), (1e-3, 20)), strict=True):
        run = train(lr, warm)
        found = run.diagnose()
        alarms = [f for f in found.findings if f.severity != "note"]
        plot_run(run, findings=alarms, fig=part)
        said = [f"lr={lr:g}: {found.headline}", *(f"{f.rule}: {f.evidence}" for f in alarms[:1])]
        part.suptitle("\n".join(textwrap.fill(line, 90) for line in said), fontsize=12)
    save(fig, path, dpi=80)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

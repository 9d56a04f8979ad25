"""What each extra is for: works if it is installed, else an error with the pip command for it."""

import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from torch import nn

import hookkit
from hookkit import ActivationStats, Learner, ParamStats, hook_outputs, summary, watch
from hookkit.callbacks import ProgressCallback

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x, y = torch.randn(32, 4), torch.randint(2, (32,))
folder = Path(tempfile.mkdtemp())


def learner(*cbs: object) -> Learner:
    learn = Learner(([(x, y)] * 3, [(x, y)]), model, nn.CrossEntropyLoss(), cbs=list(cbs))
    learn.logger = lambda row: None
    return learn


def trained() -> hookkit.Watcher:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, ActivationStats(with_hist=True), ParamStats()) as w:
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            w.loss(loss)
    return w


def plot() -> None:
    run.plot().savefig(folder / "run.png")


def tensorboard() -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        run.log_to(str(folder / "runs"))  # an error with the way to a writer
    else:
        run.log_to(SummaryWriter(str(folder / "runs")))


def distributed() -> None:
    with (learn := learner()).distrib_ctx(cpu=True):
        learn.fit(1)


def collect() -> None:
    with hook_outputs(model) as h:
        model(x)
    h.save(folder / "acts.safetensors")


def demo() -> None:
    from hookkit.testing.demo import digits

    assert len(digits().train.dataset) == 1437


NEEDS = {
    "plot": plot,
    "progress": lambda: learner(ProgressCallback()).fit(1),
    "pandas": lambda: run.to_df(),
    "tensorboard": tensorboard,
    "distributed": distributed,
    "collect": collect,
    "demo": demo,
}


def installed(extra: str) -> bool:
    for line in requires("hookkit") or ():
        if f"extra == '{extra}'" in line.replace('"', "'"):
            try:
                version(line.partition(">")[0].strip())
            except PackageNotFoundError:
                return False
    return True


run = trained()
print(summary(model, x).n_params, run.report(folder / "run.html").stat().st_size, "bytes of report")
for extra, use in NEEDS.items():
    command = f'pip install "hookkit[{extra}]"'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", hookkit.HookkitWarning)
            use()
    except (hookkit.MissingExtraError, hookkit.OptionError) as e:
        assert not installed(extra), f"{extra} is installed: {e}"
        assert command in str(e), str(e)
    else:
        assert installed(extra), f"{extra} is not installed, and no error came"
print(f"extra {sys.argv[1]}: there are {[e for e in NEEDS if installed(e)]}; the others say so")

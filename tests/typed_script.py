"""What a user writes, for a type checker: it must find fault with the marked lines, and no others.

Read by `test_types`; it is never run.
"""

from typing import assert_type

import torch
from matplotlib.figure import Figure
from pandas import DataFrame
from torch import nn

from hookkit import (
    ActivationStats,
    DataLoaders,
    FeatureExtractor,
    HookCallback,
    Learner,
    ParamStats,
    Run,
    feature_extractor,
    hook_output,
    hook_outputs,
    select,
    summary,
    watch,
)

net, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)


class Norms(HookCallback):
    """A callback without a constructor of its own, and one with one that calls no other's."""

    def hook(self, m: nn.Module, i: object, o: torch.Tensor) -> torch.Tensor:
        return o.norm()


learn = Learner(DataLoaders([(x, x)]), net, nn.MSELoss(), cbs=[Norms(every=2), ActivationStats])
learn.fit(3)
learn.fit(n_epochs=3)  # wrong
ActivationStats(everyy=10)  # wrong
Norms(evry=10)  # wrong

with watch(net, opt, ActivationStats(), ParamStats()) as w:
    w.loss(net(x).sum())
w.diagnose().finding  # wrong
assert_type(w.to_df(), DataFrame)
assert_type(w.plot(), Figure)

summary(net, x, depth=3)
summary(net, x, deptth=3)  # wrong
summary(net, input=x, mask=None)
summary(net, x).n_param  # wrong

hook_output(net, detatch=False)  # wrong
with hook_outputs(select(net, "0")) as h:
    net(x)
h.storde  # wrong
h["0"].storde  # wrong
h["0"].stored.shape

run = Run.load("run.npz")
run.activation  # wrong
assert_type(run.plot(), Figure)
assert_type(feature_extractor(net, "0"), FeatureExtractor)

"""`watch`: callbacks around any training loop, with nothing to subclass and nothing to write.

watcher           `watch` and `Watcher`: begin, end, report, read.
external_loop     `ExternalLoop`: the loop as callbacks see it.
loop_table        What it does: for each of its states and each signal, the events and next state.
loop_hooks        `LoopHooks`: where a batch and a step begin and end, and the loss; the signals.
optimizer_groups  `OptimizerGroups`: which of several optimizers make a step together.
losses            The losses of such a loop: in what a model returns, as reported, by epoch.
checks            `watch`'s arguments, checked and unwrapped; what a run did not record, and why.
"""

from hookkit.watching.watcher import Watcher, watch

__all__ = ["Watcher", "watch"]

"""`watch`: callbacks around any training loop, with nothing to subclass and nothing to write.

watcher           `watch` and `Watcher`: begin, end, report, read.
external_loop     `ExternalLoop`: the loop as callbacks see it.
loop_table        What it does: for each of its states and each signal, the events and next state.
loop_hooks        `LoopHooks`: where a batch and a step begin and end; sends the signals.
optimizer_groups  `OptimizerGroups`: which of several optimizers make a step together.
losses            The losses of such a loop: found in what a model or a loss function returns.
checks            `watch`'s arguments, checked and unwrapped; its warnings for runs without steps.
"""

from hookkit.watching.watcher import Watcher, watch

__all__ = ["Watcher", "watch"]

"""`watch`: callbacks around any training loop, with nothing to subclass and nothing to write.

watcher  `watch` and `Watcher`: begin, end, report, read.
loop     `WatchedLoop`: the loop as callbacks see it; what a step is.
hooks    `LoopHooks`: sees forwards, losses and optimizer steps, and tells the loop.
losses   The losses of such a loop: in what a model returns, as reported, by epoch.
checks   `watch`'s arguments, checked and unwrapped; what a run did not record, and why.
"""

from hookkit.watching.watcher import Watcher, watch

__all__ = ["Watcher", "watch"]

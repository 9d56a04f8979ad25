"""The two training loops: `Learner`, which runs its own, and `watch`, which follows any other.

learner       `Learner`: options, the loop, predictions, files, reading.
predicting    What `validate`, `get_preds` and `predict` are made of.
distributing  `distrib_ctx`: accelerate's model, optimizer and loaders in place of the Learner's.
groups        Parameter groups, learning rates; freezing, one cycle.
lr_finder     `lr_find`.
data          `DataLoaders`.

watcher       `watch` and `Watcher`: begin, end, report, read.
watched_loop  `WatchedLoop`: the loop as callbacks see it; its hooks, states and events.
watch_checks  `watch`'s arguments, checked and unwrapped; what a run did not record, and why.
live          A watched run while it trains.

loop          `Loop`, the base of both: callbacks by event, steps, rates; all that was recorded.
"""

from hookkit.training.learner import Learner
from hookkit.training.watcher import Watcher, watch

__all__ = ["Learner", "Watcher", "watch"]

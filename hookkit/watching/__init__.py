"""`watch`: callbacks around any training loop, with nothing to subclass and nothing to write.

external_loop  A training loop that is not ours, followed: the events, and the state that callbacks
            read.
stepping    Where a step begins and ends, in a loop that is not ours.
loop_hooks  Where a batch and a step begin and end, in a training loop that is not ours.
checks      What `watch` is given, checked and unwrapped; and what it says when nothing comes of
            it.
losses      The losses of a loop that is not ours: found in what a model returns, kept on their
            device.
optimizer_groups  Which optimizers make a step together, in a loop that has several.
eval_passes  Forwards that are not for training, in a loop that is not ours: validation, and
            rollouts.
readout     What was recorded of a watched loop, read: as a `Run`, a diagnosis, a page.
"""

from hookkit.watching.watcher import (
    Watcher,
    watch,
)

__all__ = [
    "Watcher",
    "watch",
]

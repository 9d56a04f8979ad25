"""`Learner`: data, model, loss, optimizer and callbacks in one place, and what one does with them.

loop          The loop: `fit`, and the parts it is made of.
groups        From a splitter's parameter groups to a torch optimizer: groups, learning rates,
              freezing.
predicting    Passes without learning: `validate` and `get_preds`.
readout       What one reads of a Learner: callbacks by name, summary, diagnosis, report.
distributing  Training over several processes, on accelerate's engine: what
              `Learner.distrib_ctx` does.
checks        A Learner's arguments, checked.
saving        Weights and optimizer state, to a file and back: what `Learner.save` and
              `Learner.load` do.
"""

from hookkit.learner.learner import Learner

__all__ = ["Learner"]

"""`Learner`: data, model, loss, optimizer and callbacks in one place, and what one does with them.

learner       `Learner`: fit, freeze, save, load; what one reads of it.
loop          The loop: `fit`, and the parts it is made of.
predicting    Passes without training: `validate` and `get_preds`.
groups        From a splitter's parameter groups to a torch optimizer: learning rates, freezing.
saving        Weights and optimizer state, to a file and back.
distributing  Training over several processes, on accelerate's engine.
checks        A Learner's arguments, checked.
"""

from hookkit.learner.learner import Learner

__all__ = ["Learner"]

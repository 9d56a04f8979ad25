"""`Learner`: data, model, loss, optimizer and callbacks in one place, and what one does with them.

learner       `Learner`: fit, freeze, save, load; what one reads of it.
loop          The loop: `fit`, and the parts it is made of.
predicting    Passes without training: `validate` and `get_preds`.
groups        From a splitter's parameter groups to a torch optimizer: learning rates, freezing.
checkpoints   A training as it stands: what `save` writes, and `load` and `fit(resume=)` take up.
lr_finder     `lr_find`: a learning rate from a short training of which nothing stays.
saving        Checkpoint files: written whole, read without running code.
distributing  Training over several processes, on accelerate's engine.
checks        A Learner's arguments, checked.
"""

from hookkit.learner.learner import Learner

__all__ = ["Learner"]

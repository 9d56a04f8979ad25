"""A model at a glance: `summary(model, *inputs)`, and the same in fastai's layout for a Learner.

building     From a run to a `Summary`: rows, totals, what is told of the optimizer, and the
             warnings.
inventory    The rows of a summary: what each module owns, in the order of execution, counted
             once.
outline      A summary as a value: rows of plain numbers and text, with totals, and no reference
             to the model.
folding      The lines of a drawn summary: rows as a tree, equal siblings as one line, cut at a
             depth.
texttable    A summary as text that fits the terminal.
htmltable    A summary as HTML that folds, for notebooks: no script, no outside file, light and
             dark.
comparing    What differs between two summaries, by qualified name: rows, numbers, totals.
learnerview  fastai's layout of a summary, drawn from the same value as the rich one, and a
             Learner's own.
optimizing   What an optimizer holds of a model: its groups, the bytes of its state, and what is
             amiss.
"""

from hookkit.summaries.summaries import (
    Row,
    Summary,
    layer_info,
    learner_summary,
    module_summary,
    summary,
)

__all__ = [
    "Row",
    "Summary",
    "layer_info",
    "learner_summary",
    "module_summary",
    "summary",
]

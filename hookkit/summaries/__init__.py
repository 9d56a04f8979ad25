"""A model at a glance: `summary(model, *inputs)`, and the same in fastai's layout for a Learner.

build        From a run to a `Summary`: rows, totals, what is told of the optimizer, and the
             warnings.
rows         The rows of a summary: what each module owns, in the order of execution, counted
             once.
result       A summary as a value: rows of plain numbers and text, with totals, and no reference
             to the model.
folding      The lines of a drawn summary: rows as a tree, equal siblings as one line, cut at a
             depth.
text         A summary as text that fits the terminal.
html         A summary as HTML that folds, for notebooks: no script, no outside file, light and
             dark.
diff         What differs between two summaries, by qualified name: rows, numbers, totals.
fastai_layout  fastai's layout of a summary, drawn from the same value as the rich one, and a
             Learner's own.
optimizer_info  What an optimizer holds of a model: its groups, the bytes of its state, and what is
             amiss.
"""

from hookkit.summaries.making import (
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

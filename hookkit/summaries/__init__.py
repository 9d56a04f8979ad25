"""A model at a glance: `summary(model, *inputs)`, and the same in fastai's layout for a Learner.

rows           `Row`: what each module owns, in the order of execution, counted once.
drawing        Rows as lines, as text that fits the terminal and as HTML that folds.
result         `Summary`: the value, which draws itself by these two.
summarizing    `summary`: checks, the run, and the `Summary` that is built from it.
fastai_layout  fastai's layout of a summary, and a Learner's own.

Each file imports only from those above it.
"""

from hookkit.summaries.fastai_layout import layer_info, learner_summary, module_summary
from hookkit.summaries.result import Summary
from hookkit.summaries.rows import Row
from hookkit.summaries.summarizing import summary

__all__ = [
    "Row",
    "Summary",
    "layer_info",
    "learner_summary",
    "module_summary",
    "summary",
]

"""A model at a glance: `summary(model, *inputs)`, and the same in fastai's layout for a Learner.

rows           `Row`: what each module owns, in the order of execution, counted once.
optimizer      What an optimizer holds of a model: its groups and the bytes of its state.
lines          What is drawn: the content of a summary, and its rows as lines, folded and cut.
columns        The columns of a drawn summary: their names, headings, cells and notes.
text           A summary as text that fits the terminal.
html           A summary as HTML that folds, for notebooks.
diff           What differs between two summaries, by qualified name.
result         `Summary`: the value, which draws and compares itself by the three above.
making         `summary`: checks, the run, and the `Summary` that is built from it.
fastai_layout  fastai's layout of a summary, and a Learner's own.
cli            `python -m hookkit`: a summary from the shell.

Each file imports only from those above it. There are eleven, since each is one layout, one source
of numbers, or what two of them share.
"""

from hookkit.summaries.fastai_layout import layer_info, learner_summary, module_summary
from hookkit.summaries.making import summary
from hookkit.summaries.result import Summary
from hookkit.summaries.rows import Row

__all__ = [
    "Row",
    "Summary",
    "layer_info",
    "learner_summary",
    "module_summary",
    "summary",
]

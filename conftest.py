"""What is not collected: pictures without matplotlib, and files without examples.

Without matplotlib the pictures and the page cannot be imported. Bridges import their libraries,
which takes seconds.
"""

from importlib.util import find_spec

collect_ignore = [
    "tests/typed_script.py",  # a type checker reads it
    "hookkit/bridges/lightning.py",
    "hookkit/bridges/transformers.py",
]
collect_ignore_glob = [] if find_spec("matplotlib") else ["hookkit/plotting/*", "hookkit/pages/*"]

"""Without matplotlib the pictures and the page cannot be imported: their examples are not run."""

from importlib.util import find_spec

collect_ignore = ["tests/typed_script.py"]  # a type checker reads it
collect_ignore_glob = [] if find_spec("matplotlib") else ["hookkit/plotting/*", "hookkit/pages/*"]

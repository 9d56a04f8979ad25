"""What is not collected, and a time limit for each test.

Without matplotlib the pictures and the page cannot be imported, and the example of the progress bar
needs tqdm. Bridges import their libraries, which takes seconds.
"""

import faulthandler
import os
from importlib.util import find_spec

import pytest

collect_ignore = [
    "tests/typed_script.py",  # a type checker reads it
    "hookkit/bridges/lightning.py",
    "hookkit/bridges/transformers.py",
]
if not find_spec("tqdm"):
    collect_ignore.append("hookkit/callbacks/progress.py")
collect_ignore_glob = [] if find_spec("matplotlib") else ["hookkit/plotting/*"]

LIMIT = 300  # seconds from the start of a test to the start of the next one


def pytest_configure(config: pytest.Config) -> None:
    """Set the limit, and keep the terminal before pytest captures what a test prints there."""
    global limit, terminal
    # A process that waits for workers of pytest-xdist has more time than they have: it says which
    # test a worker was running when that ended.
    limit = LIMIT if hasattr(config, "workerinput") else 2 * LIMIT
    terminal = os.dup(2)


def pytest_runtest_logstart() -> None:
    """End the process, and print the traces of its threads, if no other test starts in time.

    pytest's own `faulthandler_timeout` stops counting between two tests, where workers have hung.
    """
    faulthandler.dump_traceback_later(limit, exit=True, file=terminal)

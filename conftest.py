"""What is not collected, and a time limit for each test.

Without matplotlib the pictures and the page cannot be imported. Bridges import their libraries,
which takes seconds.
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
collect_ignore_glob = [] if find_spec("matplotlib") else ["hookkit/plotting/*", "hookkit/pages.py"]

LIMIT = 300  # seconds from the start of a test to the start of the next one


def pytest_configure(config: pytest.Config) -> None:
    global limit, terminal
    # longer where pytest-xdist only waits for its workers: it names the test of one that has ended
    limit = LIMIT if hasattr(config, "workerinput") else 2 * LIMIT
    terminal = os.dup(2)  # what a test prints there is kept from it


def pytest_runtest_logstart() -> None:
    """Ends the process with the traces of its threads if no other test starts in time.

    pytest's own `faulthandler_timeout` does not count while a worker waits for its next test.
    """
    faulthandler.dump_traceback_later(limit, exit=True, file=terminal)

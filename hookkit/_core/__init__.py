"""Helpers that know nothing of hooks.

checks       Checks of arguments: an error says what was asked, found, and what to do.
messages     Warnings, the names nearest to an unknown one, a missing package.
files        Files that are written whole.
pytree       Structures of tensors: dicts, tuples, named tuples, dataclasses.
globs        Globs of dotted names.
modules      Modules and their names; wrappers that PyTorch puts around them.
text, html   Text widths; HTML.
devices      The widest float, copies to the CPU, the accelerator.
distributed  The number of this process; values of all processes joined or added.
graph        The autograd graph behind a tensor.
random_state The random states of the process and of loaders: saved, restored.
batches      Batches and loaders: the inputs in a batch, moved to a device.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hookkit")
except PackageNotFoundError:  # imported from a folder that pip has not installed
    __version__ = "unknown"

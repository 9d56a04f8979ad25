"""The exceptions and warnings of hookkit, all under one base each.

    HookkitError
    ├── SelectionError      (KeyError)      no module of that name, pattern or type
    ├── OptionError         (ValueError)    an argument has a value that cannot work
    ├── ArgumentError       (TypeError)     an argument is of a kind that cannot work
    ├── HookError           (RuntimeError)  a hook, edit or swap cannot work here
    ├── ModelRunError       (RuntimeError)  the model cannot take the input it was given
    ├── NonFiniteError      (ArithmeticError)  NaN or Inf, where the user wants an error for it
    └── MissingExtraError   (ImportError)   an optional package is needed; prints its pip command

    HookkitWarning (UserWarning)
    ├── NeverFiredWarning   a hook, edit or stop was never reached
    ├── OverwrittenWarning  a stored value is no copy, and was changed since, or is not detached
    └── CompiledWarning     a compiled model will not see this hook

Each message has three parts: what was given, what was found, what to do.
"""

__all__ = [
    "ArgumentError",
    "CompiledWarning",
    "HookError",
    "HookkitError",
    "HookkitWarning",
    "MissingExtraError",
    "ModelRunError",
    "NeverFiredWarning",
    "NonFiniteError",
    "OptionError",
    "OverwrittenWarning",
    "SelectionError",
]


class HookkitError(Exception):
    """Base of every error that hookkit raises itself."""


class SelectionError(HookkitError, KeyError):
    """No module (or layer, or unit) has this name, pattern or type."""

    __str__ = Exception.__str__  # a KeyError shows the repr of its message


class OptionError(HookkitError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentError(HookkitError, TypeError):
    """An argument is of a kind that cannot work."""


class HookError(HookkitError, RuntimeError):
    """A hook, an edit or a swap cannot work here."""


class ModelRunError(HookkitError, RuntimeError):
    """The model cannot take the input it was given, or lacks what the call needs."""


class NonFiniteError(HookkitError, ArithmeticError):
    """A NaN or an Inf was found, and the user wants an error for it."""


class MissingExtraError(HookkitError, ImportError):
    """An optional package is needed; the message is the pip command that installs it."""


class HookkitWarning(UserWarning):
    """Base of every warning that hookkit gives."""


class NeverFiredWarning(HookkitWarning):
    """A hook, an edit or a stop was never reached."""


class OverwrittenWarning(HookkitWarning):
    """A stored value is no copy, and was changed since, or is not what the options say."""


class CompiledWarning(HookkitWarning):
    """A compiled model ignores a hook added after its first call."""

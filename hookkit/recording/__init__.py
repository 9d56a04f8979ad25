"""`HookCallback`: where hooks meet a training loop. Subclass it with `def hook(self, m, i, o)`.

backward   `BackwardHooks`: a function called in each backward pass with a module's gradients,
           in and out.
parts      `Parts`: whether a model still has the modules that were hooked.
"""

from hookkit.recording.recording import (
    HookCallback,
)

__all__ = [
    "HookCallback",
]

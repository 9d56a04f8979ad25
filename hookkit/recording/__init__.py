"""`HookCallback`: where hooks meet a training loop. Subclass it with `def hook(self, m, i, o)`."""

from hookkit.recording.recording import HookCallback

__all__ = ["HookCallback"]

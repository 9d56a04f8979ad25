"""What torch.compile does to hooks, and how a capture is right all the same.

A hook added after a compiled function has run is ignored by it without a word: empty hook dicts
are not guarded. Inside a `with` block the answer is to run eagerly (the compiler's own stance,
no recompilation afterwards); a hook that stays has to be there before the first call.
"""

from __future__ import annotations

import sys
from typing import Any


def enter_eager() -> Any:
    """Compiled functions run eagerly from now on, until `leave_eager` gets what this returns.

    Nothing is done, and None returned, where no compiler is loaded or this is being compiled.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not hasattr(frames, "set_stance") and not hasattr(frames, "_set_stance"):
        return None
    import torch

    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError:  # inside a compiled region: its hooks are being traced
        return None


def leave_eager(stance: Any) -> None:
    """Undoes `enter_eager`."""
    if stance is not None:
        stance.__exit__(None, None, None)

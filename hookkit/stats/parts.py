"""`Parts`, for the recorders: see `hookkit.recording.parts`."""

from hookkit.recording.parts import Parts

__all__ = ["Parts"]

"""The version of hookkit, where every package can read it."""

__version__ = "0.2.0"

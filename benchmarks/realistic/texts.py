"""Text to train on: the sources of Python's own library, by character and by word."""

import inspect
import random
import re
from collections import Counter
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

MODULES = (
    "argparse", "dataclasses", "shutil", "tarfile", "statistics", "fractions",
    "textwrap", "heapq",
)  # fmt: skip


@cache
def sources() -> dict[str, str]:
    """The source of each module by name."""
    return {name: inspect.getsource(import_module(name)) for name in MODULES}


@cache
def characters() -> tuple[Tensor, Tensor, int]:
    """Training and held-out text as ids of characters, and how many there are."""
    text = "".join(sources().values()).lower()
    known = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([known[c] for c in text])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(known)


@cache
def words(size: int = 400) -> tuple[Tensor, Tensor, int]:
    """Training and held-out text as ids of its most frequent words; 0 is any other word."""
    found = re.findall(r"\w+|[^\w\s]", " ".join(sources().values()))
    known = {w: i for i, (w, _) in enumerate(Counter(found).most_common(size - 1), 1)}
    ids = torch.tensor([known.get(w, 0) for w in found])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], size


def windows(ids: Tensor, n: int, length: int) -> Tensor:
    """(n, length + 1) random windows: inputs and the next token of each."""
    starts = torch.randint(len(ids) - length - 1, (n,))
    return ids[starts[:, None] + torch.arange(length + 1)]


def generator() -> random.Random:
    """Python's random numbers, seeded as torch is."""
    return random.Random(torch.initial_seed())

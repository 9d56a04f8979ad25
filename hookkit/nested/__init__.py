"""Walk, map and describe whatever a module takes and returns, with every container's type kept.

containers   `Inputs`; how a container is taken apart and put together again.
tensors      leaves, named_leaves, tmap, describe: the tensors in a structure.
paths        pick, put, paths_of, is_path: one of its places, by a path such as `[0].h`.

Containers: tuple, namedtuple, `torch.return_types.*`, list, deque, dict and other mappings (Hugging
Face's ModelOutput too), dataclasses, PackedSequence, `Inputs`. All else is passed by reference.
"""

from hookkit.nested.containers import Inputs
from hookkit.nested.paths import is_path, paths_of, pick, put
from hookkit.nested.tensors import describe, leaves, named_leaves, tmap

__all__ = [
    "Inputs",
    "describe",
    "is_path",
    "leaves",
    "named_leaves",
    "paths_of",
    "pick",
    "put",
    "tmap",
]

"""The parts that transformers have under other names in each family: `@resid`, `@attn`, `@mlp`."""

from __future__ import annotations

from collections.abc import Iterator

from hookkit.errors import SelectionError

ROLES: dict[str, tuple[str, ...]] = {
    "resid": ("**.block.#", "**.blocks.#", "**.layers.#", "**.h.#", "**.layer.#"),
    "attn": (
        "@resid.#.{self_attn,attn,attention,self_attention,mixer}",
        "@resid.#.layer.*.SelfAttention",
    ),
    "mlp": (
        "@resid.#.{mlp,feed_forward,ffn,block_sparse_moe}",
        "@resid.#.layer.*.DenseReluDense",
        "@resid.#.{output.dense,fc2,linear2}",
    ),
}
"""Patterns of each role; the first that matches something in a model is meant.

`#` is the number of the block, and a pattern may begin with another role. `resid` is a block, which
returns the residual stream; `attn` its self-attention; `mlp` what the feed-forward part returns.
For a family that is missing: `ROLES["attn"] += ("@resid.#.my_attention",)`.
"""


def patterns_of(text: str) -> Iterator[str]:
    """The patterns that `@role`, `@role.3` or `@role.3.child` can mean, in order.

    >>> list(patterns_of("@attn.3.o_proj"))[0]
    '**.block.3.{self_attn,attn,attention,self_attention,mixer}.o_proj'

    Raises:
        SelectionError: there is no such role.
    """
    role, _, rest = text[1:].partition(".")
    number, _, child = rest.partition(".")
    if role not in ROLES:
        known = ", ".join(f"@{name}" for name in ROLES)
        raise SelectionError(
            f'"@{role}" is no role of a module: there are {known}. Use one of these, add a row to '
            "hookkit.roles.ROLES, or select by the model's own names."
        )
    for pattern in ROLES[role]:
        full = pattern.replace("#", number or "*") + (f".{child}" if child else "")
        yield from patterns_of(full) if full.startswith("@") else [full]

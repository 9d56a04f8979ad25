"""Names for the parts that all transformers have: `@resid`, `@attn`, `@mlp`."""

from __future__ import annotations

from collections.abc import Iterator

from hookkit.errors import SelectionError

ROLES: dict[str, tuple[str, ...]] = {
    "resid": ("**.block.#", "**.blocks.#", "**.layers.#", "**.h.#", "**.layer.#"),
    "attn": (
        "@resid.#.attention.{output.dense,attn.o,post_proj}",
        "@resid.#.self_attention.dense",
        "@resid.#.{self_attn,attn,attention,self_attention,mixer}",
        "@resid.#.layer.*.SelfAttention",
    ),
    "mlp": (
        "@resid.#.{mlp.dense_4h_to_h,ffn.down_proj,ffn.linear_2}",
        "@resid.#.{mlp,feed_forward,ffn,block_sparse_moe}",
        "@resid.#.layer.*.DenseReluDense",
        "@resid.#.{output.dense,fc2,linear2}",
    ),
}
"""Glob patterns of each role; the first pattern that matches modules that run is used.

`#` is the number of the block, and a pattern may begin with another role. `resid` is a block, which
returns the residual stream. `attn` and `mlp` return what the self-attention and the feed-forward
part of a block add to the stream. Where such a module adds the stream itself (BERT, BLOOM), the
role is its last layer; hooks on attention patterns then take the block:
`edit_attention(select(model, "@resid.3"), …)`. Add a family that is missing by
`ROLES["attn"] += ("@resid.#.my_attention",)`.
"""


def patterns_of(text: str) -> Iterator[str]:
    """Yield the glob patterns that `@role`, `@role.3` or `@role.3.child` can mean, in order.

    >>> list(patterns_of("@mlp.3.act"))[-1]
    '**.layer.3.{output.dense,fc2,linear2}.act'

    Raises:
        SelectionError: there is no such role.
    """
    role, _, rest = text[1:].partition(".")
    number, _, child = rest.partition(".")
    if role not in ROLES:
        known = ", ".join(f"@{name}" for name in ROLES)
        raise SelectionError(
            f'"@{role}" is no role of a module: there are {known}. Use one of these, add a row to '
            "hookkit.hooks.ROLES, or select by the model's own names."
        )
    for pattern in ROLES[role]:
        full = pattern.replace("#", number or "*") + (f".{child}" if child else "")
        yield from patterns_of(full) if full.startswith("@") else [full]

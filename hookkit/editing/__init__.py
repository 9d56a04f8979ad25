"""Change what a layer gives, takes, or gets as gradient, for the time of a `with`.

making    `edit_output`, `edit_input`, `edit_grad`, `edit_function`: hooks that replace.
edit      What such a hook calls: a user's function, at some calls, or another for each layer.
changes   Ready-made edits: `zero`, `scale`, `add`, `replace`, `patch_from`, for all of a value or
          a part of it.

`hookkit.edits` is their door.
"""

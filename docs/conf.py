"""The site: pages in Markdown (MyST), the reference from docstrings, notebooks as they are in nbs/.

`make docs` builds it, with every warning an error. Sphinx, which PyTorch's own documentation is
made with, imports the package: the reference shows the signatures that a reader's Python has.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

from hookkit import __version__
from hookkit.callbacks.events import EVENTS

sys.path.insert(0, str(Path(__file__).parent))
from tables import costs, diagnosis_rates, notebooks

project = "hookkit"
author = "the hookkit authors"
copyright = "the hookkit authors, Apache-2.0"  # Sphinx's name for the last line of a page
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]
default_role = "code"  # `x` in a docstring is code, as in Markdown

# Every name in a signature that is hookkit's own has to lead somewhere; those of other libraries
# would need the network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!hookkit\.[A-Za-z_]+$)[\w.]+")]

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {
    "diagnosis_rates": diagnosis_rates(),
    "notebooks": notebooks(),
    "costs": costs(),
}
myst_heading_anchors = 3
nb_execution_mode = "off"  # the suite runs the notebooks and compares what they print

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # `opt_func=Adam`, not `<class 'torch.optim.adam.Adam'>`

# What a class has from hookkit's own bases is described with it: `Learner.get_preds`,
# `ActivationStats.stats`, `Watcher.save`. From the first base named here on, nothing is.
bases = "HookCallback, Callback, Wrapper, Module, dict, Mapping, Sequence, Collection"
bases += ", Exception, object"
# Called by training loops and by other files of hookkit, never by a user. Callback's page has its
# own list, as a callback of one's own may define them.
not_called = "cleanup_fit, state_dict, load_state_dict, of, of_named, made, register, switch"
not_called += ", removed, silent, never_called, holds_callbacks, in_closure, finds_opts"
not_called += ", stepped_opts, all_batches, extra_repr, find_methods, keep_rates, rates_of"
not_called += ", pause_recorders, run_since, cbs_by_name"
autodoc_default_options = {
    "members": True,
    "inherited-members": bases,
    "exclude-members": ", ".join((not_called, *EVENTS)),
}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False  # a sentence with a colon is no type: types are the annotations

toc_object_entries_show_parents = "hide"  # `fit`, not `Learner.fit`: there is a column for it

html_theme = "pydata_sphinx_theme"
html_title = "hookkit"  # the menu beside it has the version
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["site.css"]
html_sidebars = {page: [] for page in ("index", "start", "questions")}  # nothing is below them
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": True,
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
    "switcher": {"json_url": "_static/versions.json", "version_match": version},
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


class LinkNames(SphinxPostTransform):
    """Links public names in prose, `watch` or `watch(model)`, to the reference."""

    default_priority = 5  # before references are resolved

    def run(self, **_: Any) -> None:
        """Called for each page."""
        if self.env.docname.startswith("reference/"):
            return
        known = self.env.domains["py"].data["objects"]
        for node in list(self.document.findall(nodes.literal)):
            name = re.match(r"(\w+)(\(.*\))?$", node.astext())
            if (
                name
                and f"hookkit.{name[1]}" in known
                and not isinstance(node.parent, nodes.reference)
            ):
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=f"hookkit.{name[1]}", refwarn=False
                )
                link["refdoc"] = self.env.docname
                node.replace_self(link)
                link += node


def _join_names(*args: Any) -> None:
    """Writes `:ivar a,b:` for `:ivar a, b:`, which Sphinx reads as a variable b of type a."""
    lines = args[-1]
    lines[:] = [re.sub(r"^:ivar .*?:", lambda m: m[0].replace(", ", ","), line) for line in lines]


def setup(app: Any) -> None:
    """Runs after napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _join_names, priority=600)
    app.add_post_transform(LinkNames)

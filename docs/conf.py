"""The site: pages in Markdown (MyST), the reference from docstrings, notebooks as they are in nbs/.

`make docs` builds it, with every warning an error. Sphinx, which PyTorch's own documentation is
made with, imports the package: the reference shows the signatures that a reader's Python has.
"""

import sys
from pathlib import Path

from hookkit import __version__

sys.path.insert(0, str(Path(__file__).parent))
from tables import rules, rules_not_met

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
myst_substitutions = {"rules": rules(), "rules_not_met": rules_not_met()}
myst_heading_anchors = 3
nb_execution_mode = "off"  # the suite runs the notebooks and compares what they print

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = f"hookkit {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": True,
    "navbar_align": "left",
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

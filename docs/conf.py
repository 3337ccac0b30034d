"""Sphinx builds these pages: ``sphinx-build -W docs docs/_build/html``."""

import importlib.metadata
import pathlib
import sys

import latex2mathml.converter
from docutils import nodes

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import notebooks  # of this folder

project = "jdistadam"
author = "the authors of jdistadam"
release = importlib.metadata.version("jdistadam")
html_title = "jdistadam"

extensions = [
    "myst_nb",  # pages in Markdown, and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "jupyter_execute"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_excludepatterns = ["*.ipynb"]  # they are run by notebooks.py, and show what they keep
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True  # what a cell prints stays together

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "sphinx_book_theme"
html_theme_options = {
    "navbar_persistent": [],  # one search field is enough
    "show_toc_level": 2,
    "use_download_button": False,
}
html_copy_source = False

# Formulas are MathML in the pages themselves: no script, and nothing from another server.
html_math_renderer = "mathml"


def _visit_inline(translator, node):
    translator.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def _visit_block(translator, node):
    translator.body.append(latex2mathml.converter.convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app):
    """Registers the renderer of formulas; runs the notebooks."""
    app.connect("builder-inited", lambda app: notebooks.check())
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))

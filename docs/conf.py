"""Configuration of the site that ``make docs`` builds from these pages and the docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

import trajpack

project = "trajpack"
author = copyright = "the trajpack contributors"
version = release = trajpack.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "reference",  # these two are in docs/site
    "paste",
]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = f"trajpack {version}"
html_static_path = ["site/static"]
html_css_files = ["paste.css"]
html_js_files = ["paste.js"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

default_role = "py:obj"
nitpicky = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "inherited-members": "object, int, tuple, BaseException, Enum, Protocol, ThreadingHTTPServer",
}
nitpick_ignore_regex = [  # types of other packages and of type variables
    ("py:class", r"(?!trajpack\.).*"),
    ("py:.*", r"(asyncio|collections|contextlib|torch|typing)\..*"),
]
root_doc = "index"
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Reference"]
python_use_unqualified_type_names = True
doctest_test_doctest_blocks = ""  # tests/repository/test_examples.py runs them

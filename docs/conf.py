"""Settings of the documentation site; `make docs` builds it."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

project = "moe_ffn"
author = "The moe_ffn authors"
version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
describe = ["git", "describe", "--tags", "--always", "--dirty"]
commit = ""  # as in an archive without git
if shutil.which("git"):
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
release = version if commit in ("", f"v{version}") else f"Unreleased (after {version}, {commit})"
html_title = f"moe_ffn {release}"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated",
    "notebooks",
]
source_suffix = {
    ".md": "markdown",
    ".ipynb": "markdown",
}  # `notebooks` makes Markdown of the latter
exclude_patterns = ["_ext"]
root_doc = "README"  # which a code host shows below the list of files

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3  # `page.md#a-heading`, as on a code host

autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "model_config, members"}  # pydantic's, a registry
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
suppress_warnings = ["ref.python"]  # `type` in an annotation, which many configs have as option
default_role = "code"  # docstrings have `name`, as Markdown has
python_maximum_signature_line_length = 88

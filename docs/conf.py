# SPDX-License-Identifier: Apache-2.0
"""The site: the .md files of the repository, each where it lies, and the reference. docs/build.sh builds it.

Sphinx's source folder is the repository's root, so that a link between .md files leads to the same place here and on a forge. A link
to another file downloads it, and one to a folder is text.
"""
import ctypes
import html
import os
import pathlib
import re
import sys
from unittest import mock

from docutils import nodes
from sphinx import addnodes
from sphinx.ext.autodoc.mock import ismock
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = (ROOT / "include/flash3/version.h").read_text(encoding="utf-8")

project = "flash3"
author = project_copyright = "the flash3 authors"
release = re.search(r'FLASH3_VERSION_STRING "(.*)"', VERSION)[1]

extensions = ["breathe", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "src/**.md", "bindings/**.md", "data/*.md", "bench/*.md"]
exclude_patterns = ["build*", "dist", ".*", "**/.*"]
nitpicky = True
smartquotes_action = "D"  # dashes alone: i' is no quotation

# Pages. A link to a heading is spelt as on a forge.
myst_heading_anchors = 6
highlight_language = "none"
default_role = "code"

# C and C++, from what Doxygen wrote. The C functions are shown as C++ sees them, so that the wrapper's types lead to them.
breathe_projects = {}  # docs/build.sh says where it is
breathe_default_project = "flash3"
breathe_show_include = False
breathe_show_define_initializer = True
nitpick_ignore = [("cpp:identifier", name) for name in ("uint8_t", "int32_t", "int64_t", "uint64_t", "size_t")]

# Python. Signatures and docstrings need neither torch nor the compiled library, nor what is written on torch alone.
sys.path[:0] = [str(ROOT / "bindings/python"), str(ROOT / "bindings/dropin")]
sys.dont_write_bytecode = True
ctypes.CDLL = mock.MagicMock()
ctypes.CDLL.return_value.flash3_backend_head_dims.return_value = 0  # FLASH3_OK: the package asks as it is imported
autodoc_mock_imports = ["torch", "transformers", "flash3._torch", "flash_attn_3._C"]
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"flash3 {release}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False

# A picture in a page: a file that follows the theme of the page that shows it (bench/report/draw.py).
PICTURE = re.compile(r'<img alt="(?P<alt>[^"]+)" src="(?P<stem>[^":]+)\.svg">')
# What such a file says of the dark theme.
DARK = re.compile(r"@media \(prefers-color-scheme:dark\)\{((?:[^{}]*\{[^{}]*\})*)\}")
PICTURES = {}  # {file: [(page that shows it, parts of PICTURE), …]}

# The versions that a reader may choose from, where FLASH3_DOCS_VERSIONS names them: "0.1.0=../0.1.0/ 0.2.0=./", each with its address,
# absolute or relative to this site's folder.
VERSIONS = dict(entry.split("=", 1) for entry in os.environ.get("FLASH3_DOCS_VERSIONS", "").split())

logger = logging.getLogger(__name__)


def require_docstring(app, what, name, obj, skip, options):
    """A public function or class of these packages without a docstring is a warning, as an undocumented member is in C."""
    ours = (getattr(obj, "__module__", None) or "").partition(".")[0] in ("flash3", "flash_attn_interface")
    if skip and ours and callable(obj) and not ismock(obj) and not name.startswith("_") and not obj.__doc__:
        logger.warning("%s.%s has no docstring", obj.__module__, name)


def show_pictures(app, doctree):
    """Copies the pictures that HTML in a page shows, since Sphinx does not look into HTML, one for each theme: the site shows that of the
    theme that the reader has chosen."""
    page = pathlib.Path(doctree["source"])
    for raw in doctree.findall(nodes.raw):
        text = raw.astext()
        for found in PICTURE.finditer(text):
            picture = (page.parent / f"{found['stem']}.svg").resolve()
            if not picture.is_file():
                logger.warning("%s: there is no picture %s.svg", page.relative_to(ROOT), found["stem"])
                continue
            svg = picture.read_text(encoding="utf-8")
            if not DARK.search(svg):
                logger.warning("%s: %s.svg has no dark theme", page.relative_to(ROOT), found["stem"])
            copy = (pathlib.Path(app.outdir) / picture.relative_to(ROOT)).with_suffix("")
            copy.parent.mkdir(parents=True, exist_ok=True)
            for theme, drawn in (("light", DARK.sub("", svg)), ("dark", DARK.sub(r"\1", svg))):
                copy.with_name(f"{copy.name}_{theme}.svg").write_text(drawn, encoding="utf-8")
            PICTURES.setdefault(picture, []).append((app.env.path2doc(page), found.groupdict()))
        shown = PICTURE.sub(r'''<div class="figure" tabindex="0">
<img class="only-light" loading="lazy" alt="\g<alt>" src="\g<stem>_light.svg">
<img class="only-dark" loading="lazy" alt="\g<alt>" src="\g<stem>_dark.svg">
</div>''', text)
        if len(re.findall("<(?:img|picture) ", text)) != len(PICTURE.findall(text)):
            logger.warning("%s: a picture of another form than conf.py's PICTURE", page.relative_to(ROOT))
        raw.replace_self(nodes.raw("", shown, format="html"))


class Gallery(SphinxDirective):
    """A place for all pictures of other pages, small, each with a link to the first page that shows it."""

    def run(self):
        return [nodes.raw("", "", format="html", classes=["gallery"])]


def fill_galleries(app, doctree, docname):
    """When all pages have been read."""
    for place in doctree.findall(lambda node: isinstance(node, nodes.raw) and "gallery" in node["classes"]):
        parts = []
        for shown_on in PICTURES.values():
            page, picture = shown_on[0]
            if any(other == docname for other, _ in shown_on):
                continue
            folder = pathlib.PurePosixPath(app.builder.get_relative_uri(docname, page)).parent
            images = "".join(f'<img class="only-{theme}" loading="lazy" alt="{picture["alt"]}" src="{folder / picture["stem"]}_{theme}.svg">'
                             for theme in ("light", "dark"))
            title = html.escape(app.env.titles[page].astext())
            parts.append(f'<p><a href="{app.builder.get_relative_uri(docname, page)}">{images}<br>{title}</a>: {picture["alt"]}</p>')
        place.replace_self(nodes.raw("", "".join(parts), format="html"))


def unlink_folders(app, doctree):
    """Leaves the text of a link to a folder, which has no page."""
    folder = pathlib.Path(doctree["source"]).parent
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def offer_versions(app, page, template, context, doctree):
    """A menu of versions above each page."""
    if not VERSIONS:
        return
    up = "../" * page.count("/")
    choices = "".join(f'<option value="{html.escape(address if "://" in address else up + address, quote=True)}"'
                      f'{" selected" if version == release else ""}>{html.escape(version)}</option>' for version, address in VERSIONS.items())
    context["theme_announcement"] = f'<label>Version <select class="versions" onchange="location = this.value">{choices}</select></label>'


def setup(app):
    app.connect("html-page-context", offer_versions)
    app.connect("autodoc-skip-member", require_docstring)
    app.add_directive("gallery", Gallery)
    app.connect("doctree-read", show_pictures)
    app.connect("doctree-resolved", fill_galleries)
    app.connect("doctree-read", unlink_folders)

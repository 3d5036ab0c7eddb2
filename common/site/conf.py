"""Sphinx's settings for the course's site, which common.site.build builds."""

import os
from pathlib import Path

from common.site import links

import nbformat
from docutils import nodes

project = "FlashAttention"
html_title = "FlashAttention, from the online softmax to tuned kernels"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design", "sphinxext.opengraph"]
extensions += ["sphinx.ext.mathjax", "sphinx-mathjax-offline"]
html_theme = "furo"
html_static_path = ["static", "pictures"]
html_favicon = "static/favicon.svg"
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_show_sphinx = html_show_copyright = False
html_copy_source = False
smartquotes = False  # a quote in code that stands in a sentence stays as it is typed
nb_execution_mode = "off"  # the stored outputs are what the tests hold the cells against
nb_merge_streams = True
nb_code_prompt_show = "Show the cell"
nb_code_prompt_hide = "Hide the cell"
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
copybutton_selector = "div.cell_input pre, div.highlight-default pre, div.highlight-bash pre"
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]
owner, _, repository = os.environ.get("GITHUB_REPOSITORY", "").partition("/")  # where GitHub builds the site
ogp_site_name = project
ogp_site_url = f"https://{owner}.github.io/{repository}/" if owner else "/"
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}


def setup(app):
    app.connect("doctree-read", describe_figures)
    app.connect("doctree-resolved", links.add)


def describe_figures(app, doctree):
    """Give a notebook's figures the alternative texts that are stored with them, in their order."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    outputs = (o for c in nbformat.read(path, as_version=4).cells for o in c.get("outputs", ()))
    texts = [o.metadata.get("image/png", {}).get("alt", "") for o in outputs if "image/png" in o.get("data", {})]
    boxes = (box for box in doctree.findall(nodes.container) if box.get("nb_element") == "mime_bundle")
    figures = [image for box in boxes for image in box.findall(nodes.image)]
    if len(figures) != len(texts):
        raise ValueError(f"{path.name}: {len(figures)} figures on the page, {len(texts)} stored")
    for image, text in zip(figures, texts, strict=True):
        image["alt"] = text

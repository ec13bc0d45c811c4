"""Python blocks of the site: what each needs of those above it, and a button that copies both."""

from __future__ import annotations

from html import escape
from typing import Any

import sphinx.application
from blocks import Block, blocks, code
from docutils import nodes


def pasted(block: Block) -> str:
    """Return what the button of a block copies: a program that runs alone."""
    return block.setup + code(block.text).rstrip("\n") + "\n"


def add_setup(app: Any, doctree: nodes.document) -> None:
    """Put the set-up of each Python block into a fold above it, and the program of its button."""
    found = [
        node
        for node in doctree.findall(nodes.literal_block)
        if node.get("language") == "python" and not node.get("in_docstring")
    ]
    for node, block in zip(found, blocks(node.astext() + "\n" for node in found), strict=True):
        opened = [f'<div class="paste" data-program="{escape(pasted(block))}">']
        parts: list[nodes.Node] = [nodes.raw("", opened[0], format="html")]
        if block.setup:
            parts += [
                nodes.raw("", "<details><summary>set-up of this block</summary>", format="html"),
                nodes.literal_block(block.setup, block.setup, language="python"),
                nodes.raw("", "</details>", format="html"),
            ]
        closed = nodes.raw("", "</div>", format="html")
        node.replace_self([*parts, node.deepcopy(), closed])


def setup(app: sphinx.application.Sphinx) -> dict[str, Any]:
    """Register the transformation of pages."""
    app.connect("doctree-read", add_setup)
    return {"parallel_read_safe": True}

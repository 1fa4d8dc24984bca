"""Equations: LaTeX in ```math blocks becomes MathML when the site is built, so that no page loads a script for them."""

import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert

_BLOCK = re.compile(r"^```math\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_BESIDE = {"munder": "msub", "munderover": "msubsup"}

ElementTree.register_namespace("", "http://www.w3.org/1998/Math/MathML")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' hook."""
    return _BLOCK.sub(lambda found: f'<div class="equation">{_mathml(found[1].strip())}</div>', markdown)


def _mathml(latex: str) -> str:
    tree = ElementTree.fromstring(convert(latex, display="block"))
    for element in tree.iter():
        # Indices of sums go beside the sign: below it they touch it in browsers without a font for mathematics.
        name = element.tag.rpartition("}")[2]
        if name in _BESIDE and element[0].text in ("∑", "∏"):
            element.tag = element.tag.replace(name, _BESIDE[name])
    return ElementTree.tostring(tree, encoding="unicode")

"""Formulas in words' characters, for excerpts of pages, where nothing sets TeX: search.js shows them in its results."""

import html
import re
from functools import cache
from typing import Any

from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="math notranslate nohighlight"(?P<more>[^>]*)>(?P<tex>\s*\\[(\[].*?\\[)\]]\s*)</(?P=tag)>', re.DOTALL
)
"""As Sphinx writes one for MathJax."""

AS = {"tfrac": "frac", "ne": "neq", "bmod": "mathrm{mod}", "arg": "mathrm{arg}"}
"""What pylatexenc does not know, in what it knows."""

SIZES = ("left", "right", "bigl", "bigr", "Bigl", "Bigr", "Big", "textstyle")
"""What a text has not."""


def readable(page: str) -> str:
    """A page whose formulas say, beside their TeX, how they read as a text (``data-text``)."""
    return FORMULA.sub(_with_text, page)


def _with_text(found: re.Match[str]) -> str:
    tex = html.unescape(found["tex"].strip()[2:-2])
    said = html.escape(text(tex))
    return f'<{found["tag"]} class="math notranslate nohighlight" data-text="{said}"{found["more"]}>{found["tex"]}</{found["tag"]}>'


def text(tex: str) -> str:
    """A formula as a text in one line. Raises :class:`ValueError` for a command that is not known."""
    plain = re.sub(r"\\([a-zA-Z]+)", lambda found: "\\" + AS.get(found[1], found[1]), tex)
    plain = re.sub(r"([_^])\{([^{}]*[-+/=<>,][^{}]*)\}", r"\1{(\2)}", plain)  # else w_{k+1} reads as w_k + 1
    return " ".join(_writer().latex_to_text(f"${plain}$").split())


@cache
def _writer() -> LatexNodes2Text:
    """Of texts. By default it passes over commands that it does not know."""
    known = get_default_latex_context_db()
    own = [*(MacroTextSpec(name, "") for name in SIZES), MacroTextSpec("frac", simplify_repl=_fraction)]
    known.add_context_category("own", own, prepend=True)
    known.set_unknown_macro_spec(MacroTextSpec("", simplify_repl=_refuse))
    return LatexNodes2Text(math_mode="text", latex_context=known)


def _fraction(node: Any, l2tobj: LatexNodes2Text) -> str:
    """With what is above and below in parentheses, where it is more than a name or a number."""
    parts = [l2tobj.node_arg_to_text(node, place) for place in (0, 1)]
    return "/".join(part if re.fullmatch(r"\w+|[^\W\d]_\w|\S", part.strip()) else f"({part.strip()})" for part in parts)


def _refuse(node: Any) -> str:
    raise ValueError(f"docs/generators/formulas.py does not know how \\{node.macroname} reads: name it in AS")

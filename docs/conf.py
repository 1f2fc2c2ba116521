"""The site: sphinx-build -W -n docs docs/_build/html. .ci/docs does it in an environment of its own."""

import atexit
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from sphinx import addnodes
from sphinx.util.parallel import make_chunks

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from generators import api, differences, formulas, gallery, links  # noqa: E402

import lightning_fed  # noqa: E402

project = "lightning-fed"
author = "lightning-fed contributors"
copyright = author
version = release = lightning_fed.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",  # the site fetches nothing from elsewhere
]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [  # of other libraries, whose inventories would have to be fetched
    (r"py:.*", rf"({'|'.join(names)})(\..*)?")
    for names in [
        [
            "abc",
            "collections",
            "jsonargparse",
            "lightning",
            "numpy",
            "pandas",
            "pathlib",
            "peft",
            "torch",
            "torchmetrics",
            "transformers",
        ]
    ]
]

html_theme = "furo"
html_title = "lightning-fed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_logo = html_favicon = "_static/logo.svg"
html_theme_options = {
    "top_of_page_buttons": [],
}
copybutton_prompt_text = r"\$ "
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 4

# Notebooks are text, and are run whenever the site is built: in a temporary folder, with the configurations of this checkout. Their
# kernels and commands are forks of one process, since importing torch for each of them takes longer than all that they do.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
kernel = Path(tempfile.mkdtemp(prefix="lightning_fed_kernel_"))
atexit.register(shutil.rmtree, kernel, ignore_errors=True)
(kernel / "profile_default" / "startup").mkdir(parents=True)
shutil.copy(DOCS / "kernel.py", kernel / "profile_default" / "startup" / "00-site.py")
(kernel / "bin").mkdir()
(kernel / "bin" / "lightning-fed").symlink_to(DOCS / "commands.py")
(kernel / "kernels" / "python3").mkdir(parents=True)
program = [sys.executable, str(DOCS / "commands.py"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
named = {"argv": program, "display_name": "Python 3", "language": "python"}
(kernel / "kernels" / "python3" / "kernel.json").write_text(json.dumps(named))
os.environ["JUPYTER_PATH"] = str(kernel)
os.environ["PATH"] = f"{kernel / 'bin'}{os.pathsep}{os.environ['PATH']}"
os.environ["LIGHTNING_FED_COMMANDS"] = str(kernel / "commands")
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(os.environ["LIGHTNING_FED_COMMANDS"])
    listener.listen()  # commands wait from now on
    process = subprocess.Popen([sys.executable, DOCS / "commands.py", str(listener.fileno())], pass_fds=[listener.fileno()])
atexit.register(process.kill)
os.environ["IPYTHONDIR"] = str(kernel)
os.environ["LIGHTNING_FED_CHECKOUT"] = str(DOCS.parent)
os.environ["OMP_NUM_THREADS"] = "1"

autosummary_generate = False
autodoc_inherit_docstrings = False  # an override without a text means what the method it overrides says
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

MARK = re.compile(r"<!-- generated: (?P<what>\w+) ?(?P<argument>.*?) -->")


def generated(what: str, argument: str) -> str:
    """What stands in a page in place of a comment that asks for it."""
    if what == "gallery":
        return gallery.cards(gallery.methods())
    if what == "file":
        path, _, until = argument.partition(" until ")
        text = (DOCS.parent / path).read_text()
        text = text.partition(f"\n{until}\n")[0] if until else text
        return MARK.sub(lambda match: generated(match["what"], match["argument"]), text)
    if what == "options":
        from generators import options  # waits for torch

        return options.section(argument)
    if what == "hooks":
        from generators import hooks  # waits for torch

        return hooks.table()
    if what == "differences":
        return differences.sections()
    if what == "api":
        return api.page(argument)
    raise ValueError(f"a page asks for {what!r}, which nothing generates")


def spread(app: object, env: object, docnames: list[str]) -> None:
    """Notebooks take longest to read: each process begins with its share of them, and pages fill the time that is left. What all of
    them import is imported before they are forked.
    """
    import lightning_fed.cli.fork_server  # noqa: F401 - which imports all of it

    notebooks = [name for name in docnames if name.startswith("tutorials/") and name != "tutorials/index"]
    others = [name for name in docnames if name not in notebooks]
    chunk = max(map(len, make_chunks(docnames, app.parallel)), default=0)
    docnames.clear()
    for share in make_chunks(notebooks, app.parallel):
        beside = max(chunk - len(share), 0)
        docnames += share + others[:beside]
        others = others[beside:]
    docnames += others


def write_in(app: object, docname: str, source: list[str]) -> None:
    """Complete the text of a page before it is read: what is generated, and links out of the documentation."""
    page = DOCS / f"{docname}.md"
    found = MARK.search(source[0])
    home = DOCS.parent if found and found["what"] == "file" else page.parent
    text = MARK.sub(lambda match: generated(match["what"], match["argument"]), source[0])
    if page.parent == gallery.PAGES and (facts := gallery.facts(page)):
        text = re.sub(r"^(# .*\n)", lambda match: f"{match[1]}\n{facts}\n", text, count=1, flags=re.MULTILINE)
    source[0] = links.rebased(text, home, page)


SENTENCES = ("attribute", "data", "property")
"""Whose texts are sentences. Napoleon would take what stands before a colon for a type."""

sentences: dict[str, list[str]] = {}


def keep_sentence(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Before napoleon: remember a text that is not for it."""
    if what == "data" and (text := api.comments().get(name.rpartition(".")[2])):
        lines[:] = [*text, ""]
    if what in SENTENCES:
        sentences[name] = list(lines)


def restore_sentence(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """After napoleon: as if it had not been there."""
    if what in SENTENCES:
        lines[:] = sentences.pop(name)


def own_name(app: object, env: object, node: object, content: object) -> object:
    """Where a docstring refers to something of this package by another name than its public one, or to something internal.

    A name that the package has nowhere stays unresolved, which ends the build.
    """
    if node.get("refdomain") != "py":
        return None
    domain, last = env.get_domain("py"), node["reftarget"].rpartition(".")[2]
    public = [name for name in domain.objects if name.rpartition(".")[2] == last]
    if len(public) == 1:
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public[0], node, content)
    return content if last in api.defined() else None


def spell_formulas(app: object, pagename: str, templatename: str, context: dict[str, object], doctree: object) -> None:
    """For excerpts of a page."""
    if "body" in context:
        context["body"] = formulas.readable(str(context["body"]))


def titles_first(app: object, pagename: str, templatename: str, context: dict[str, object], doctree: object) -> None:
    """Before furo asks for the site's titles, for each page: Sphinx would first copy all sections and all public names, and then
    drop them. That was nine tenths of the time that writing takes.
    """
    of_site = context["toctree"]

    def toctree(**options: object) -> str:
        every, app.env.tocs = app.env.tocs, titles(app.env)
        try:
            return of_site(**options)
        finally:
            app.env.tocs = every

    context["toctree"] = toctree


@cache
def titles(env: object) -> dict[str, object]:
    """Tables of contents of all pages: their titles, and which pages are below them."""
    found = {name: toc.deepcopy() for name, toc in env.tocs.items()}
    for toc in found.values():
        for title in toc:
            for sections in title[1:]:
                sections[:] = list(sections.findall(addnodes.toctree))
                if not sections:
                    title.remove(sections)
    return found


BACK = re.compile(r'(<a class="viewcode-back" href="(?P<page>[^"#]*)#)(?P<target>[^"]*)')


def mend_source_pages(app: object, pagename: str, templatename: str, context: dict[str, object], doctree: object) -> None:
    """Pages of sources name what leads back to the API by the first page that shows anything of a file, and list modules that have
    none. What is shown on a page is called by the page's name there.
    """
    if not pagename.startswith("_modules/"):
        return
    known = app.env.get_domain("py").objects

    def leading_back(match: re.Match[str]) -> str:
        module, parts = Path(match["page"]).stem, match["target"].split(".")
        names = (".".join([module, *parts[start:]]) for start in range(len(parts)))
        return match[1] + next((name for name in names if name in known), match["target"])

    body = BACK.sub(leading_back, str(context["body"]))
    context["body"] = body.replace('<li><a href="builtins.html">builtins</a></li>\n', "")


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("env-before-read-docs", spread)
    app.connect("source-read", write_in)
    app.connect("autodoc-process-docstring", keep_sentence, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restore_sentence, priority=600)
    app.connect("missing-reference", own_name)
    app.connect("html-page-context", titles_first, priority=400)  # furo has 500
    app.connect("html-page-context", spell_formulas)
    app.connect("html-page-context", mend_source_pages)
    app.extensions["sphinx-mathjax-offline"].parallel_read_safe = True  # it sets a path and does not say so

"""Add to the site the pages that are outside `docs/`, and lead links to them.

`docs/index.md` is the site's first page, the README its second; an example is a page of its own. Links are written for
readers of the repository; here they lead to the site's pages. A link to a file that is no page is left as it is, and
`mkdocs build --strict` ends with an error that names it.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?P<head>\[[^\]]*\]\()(?P<target>[^)#\s]+)(?P<tail>(?:#[^)\s]*)?\))")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def repository_pages() -> dict[str, str]:
    """Return the site's page for each file outside `docs/` that is a page."""
    pages = {"README.md": "overview.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
    pages[".github/CONTRIBUTING.md"] = "contributing.md"
    pages["tests/GUARANTEES.md"] = "guarantees.md"
    for path in sorted((ROOT / "examples").rglob("*.py")):
        source = path.relative_to(ROOT)
        pages[source.as_posix()] = source.with_suffix(".md").as_posix()
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.md")):
        report = path.relative_to(ROOT).as_posix()
        pages[report] = report
    return pages


PAGES = repository_pages()
SOURCES = {page: source for source, page in PAGES.items()}


def relinked(text: str, page: str) -> str:
    """Return a page's Markdown, in which links out of `docs/` lead to the site's pages for those files."""
    folder = posixpath.dirname(SOURCES.get(page, f"docs/{page}"))

    def to_page(found: re.Match[str]) -> str:
        if "://" in found["target"]:
            return found[0]
        source = posixpath.normpath(posixpath.join(folder, found["target"]))
        named = "examples.md" if source == "examples" else PAGES.get(source, source.removeprefix("docs/"))
        if named == source and source not in PAGES:
            return found[0]
        return f"{found['head']}{posixpath.relpath(named, posixpath.dirname(page) or '.')}{found['tail']}"

    pieces, end = [], 0
    for code in CODE.finditer(text):
        pieces += [LINK.sub(to_page, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(to_page, text[end:])])


def example_page(path: Path) -> str:
    """Return an example as Markdown: its docstring, how to run it, its code."""
    code = path.read_text(encoding="utf-8")
    module = ast.parse(code)
    about = ast.get_docstring(module) or ""
    rest = "\n".join(code.splitlines()[module.body[0].end_lineno or 0 :]).strip()
    return f"# {path.stem}\n\n{about}\n\n`python {path.relative_to(ROOT)}`\n\n```python\n{rest}\n```\n"


def content_of(source: str) -> str:
    """Return the content of the page for a file. The search omits benchmark reports, which would match everything."""
    path = ROOT / source
    if path.suffix == ".py":
        return example_page(path)
    unsearched = "---\nsearch:\n  exclude: true\n---\n" if source.startswith("benchmarks/") else ""
    return unsearched + path.read_text(encoding="utf-8")


def on_files(files: Any, *, config: Any) -> Any:
    """Add pages to the files of `docs/`. Called by mkdocs."""
    from mkdocs.structure.files import File, InclusionLevel

    for source, page in PAGES.items():
        file = File.generated(config, page, content=content_of(source))
        file.inclusion = InclusionLevel.INCLUDED if "/" not in page else InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page as it is rendered. Called by mkdocs."""
    return relinked(markdown, page.file.src_uri)

"""Build the site: `make docs`, or `python -m docs.site.build`.

Pages are gathered in build/docs, and their links are changed to match. Zensical makes the site from mkdocs.yml.
Formulas become MathML, which browsers show without scripts. The site loads nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from book import build as chapters
from docs.site import reference

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|mailto:)([^)#\s]+)((?:#[^)]*)?\))")
ROW = re.compile(r"^\|.*`(?P<code>[^`]+)` \| \[(?P<name>[^\]]+)\]\((?P<target>[^)]+)\) \|$", re.M)
SHIM = "https://unpkg.com/iframe-worker/shim"  # lets search work from file://; the theme would fetch it
PRIMED = re.compile(r"([A-Za-z])'")  # fonts raise a prime themselves; as a superscript, it would be raised twice
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)


def pages() -> dict[Path, Path]:
    """Return {file in the repository: its page in the site}."""
    found = {ROOT / "README.md": Path("index.md")}
    found |= {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))}
    found |= {ROOT / name: Path(name.lower()) for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
    found |= {path: Path("examples") / path.name for path in sorted((ROOT / "examples").glob("*.md"))}
    found |= {path: Path("book") / f"{path.stem}.md" for path in chapters.CHAPTERS}
    return found


def page_of_source(path: Path) -> Path:
    """Return the page that shows a source file."""
    return Path("code") / path.relative_to(ROOT).with_suffix(".md")


def linked_sources(text: str, page: Path) -> set[Path]:
    """Return the Python files that a page links to."""
    targets = {(page.parent / match[2]).resolve() for match in LINK.finditer(text)}
    return {target for target in targets if target.suffix == ".py" and target.is_file()}


def with_line_numbers(text: str, page: Path) -> str:
    """Let the rows `| ... | code | [file](file) |` of a table link to the line that holds the code."""

    def numbered(match: re.Match[str]) -> str:
        target = (page.parent / match["target"]).resolve()
        number = reference.line_of(target, match["code"].replace("\\|", "|"))
        link = f"[{match['name']}:{number}]({match['target']}#__codelineno-0-{number})"
        return match[0].replace(f"[{match['name']}]({match['target']})", link)

    return ROW.sub(numbered, text)


def moved(text: str, page: Path, places: dict[Path, Path]) -> str:
    """Change the links of a page to where the linked files are in the site."""
    here = places[page].parent

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if target in places:
            place = places[target]
        elif target.is_relative_to(ROOT / "docs"):
            place = target.relative_to(ROOT / "docs")  # a picture
        else:
            return re.sub(r"^!?\[|\]\($", "", match[1])  # a file that the site does not have: its name alone
        return f"{match[1]}{os.path.relpath(place, here)}{match[3]}"

    return LINK.sub(link, text)


def gather(folder: Path, book: bool = True) -> None:
    """Write every page, picture and reference.

    Args:
        folder: where to write them; removed first.
        book: whether to execute the book's notebooks, which takes minutes (default: True).
    """

    def put(place: Path, text: str) -> None:
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    shutil.rmtree(folder, ignore_errors=True)
    places = pages()
    written = {path: path.read_text(encoding="utf-8") for path in places if path.suffix == ".md"}
    sources = {source for path, text in written.items() for source in linked_sources(text, path)}
    places |= {path: page_of_source(path) for path in sources}
    for path, text in written.items():
        put(places[path], moved(with_line_numbers(text, path), path, places))
    for path in sources:
        put(places[path], reference.source(path, ROOT))
    put(Path("reference/commands.md"), reference.commands())
    put(Path("reference/python.md"), reference.python())
    shutil.copytree(ROOT / "docs" / "pictures", folder / "pictures")
    shutil.copytree(Path(__file__).with_name("assets"), folder / "assets")
    for path in chapters.CHAPTERS:
        notebook = chapters.run(path) if book else nbformat.read(path, as_version=4)
        chapters.markdown(notebook, folder / "book", path.stem, docs="../")


def finish(folder: Path) -> int:
    """Make pages load nothing from elsewhere and turn LaTeX formulas into MathML; return the number of formulas."""
    from latex2mathml.converter import convert

    count = 0

    def mathml(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        latex = html.unescape(match[2]).strip()
        display = "block" if latex.startswith("\\[") else "inline"
        several = re.split(r"\$\$\s*\$\$", latex[2:-2].strip())  # displayed formulas that follow each other
        return "".join(convert(PRIMED.sub(r"{\1\\text{′}}", one.strip()), display=display) for one in several)

    for page in folder.rglob("*.html"):
        text = FORMULA.sub(mathml, page.read_text(encoding="utf-8"))
        ours = os.path.relpath(folder / "assets" / "iframe-worker.js", page.parent)
        page.write_text(text.replace(SHIM, ours), encoding="utf-8")
    return count


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--book", action=argparse.BooleanOptionalAction, default=True, help="Execute the notebooks.")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="Folder for docs/ and site/ (default: build).")
    options = parser.parse_args()
    out = options.out.resolve()
    gather(out / "docs", options.book)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace(" build/", " ")
    (out / "mkdocs.yml").write_text(settings, encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([str(zensical), "build", "--clean", "--strict"], cwd=out, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    count = finish(out / "site")
    files = [file for file in (out / "site").rglob("*") if file.is_file()]
    size, pages = sum(file.stat().st_size for file in files), sum(file.suffix == ".html" for file in files)
    print(f"{pages} pages, {count} formulas, {size / 1e6:.1f} MB: {out / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()

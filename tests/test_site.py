"""The site of `make docs`: every page is reached, every link leads somewhere, and nothing comes from elsewhere."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import vitkit
from docs.site import build, reference
from vitkit.cli import COMMANDS

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*?\ssrc="([^"]+)"|<link\b[^>]*?\shref="([^"]+)"')


def nav(entries: object) -> list[str]:
    """The pages of mkdocs.yml, flat."""
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for value in values for page in nav(value)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site without the book's outputs."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "docs.site.build", "--no-book", "--out", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_the_navigation_has_every_page(site: Path) -> None:
    listed = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len(set(listed))
    places = {place.as_posix() for place in build.pages().values()}
    assert set(listed) == places | {"reference/commands.md", "reference/python.md"}
    for page in listed:
        assert (site / page).with_suffix(".html").is_file(), page


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        loaded = [found for pair in LOADED.findall(text) for found in pair if found]
        assert not [address for address in loaded if urlsplit(address).netloc], page.name
        if page.name == "404.html":
            continue  # its links start from the root of a server
        for address in [*loaded, *re.findall(r'<a\b[^>]*?\shref="([^"]+)"', text)]:
            parts = urlsplit(html.unescape(address))
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page.relative_to(site)} links to {address}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in anchors[target], f"{page.relative_to(site)} links to {address}"


def test_formulas_are_mathml(site: Path) -> None:
    text = (site / "paper-to-code.html").read_text(encoding="utf-8")
    assert text.count("<math") >= 10
    assert "arithmatex" not in text
    text = (site / "book" / "03-attention.html").read_text(encoding="utf-8")
    assert text.count('display="block"') >= 5  # formulas that follow each other are not one
    assert "$$" not in re.sub(r"<code.*?</code>", "", text, flags=re.S)


def test_the_reference_has_every_command_and_every_name() -> None:
    text = reference.commands()
    for names in COMMANDS.values():
        for name in names:
            assert f"\n### {name}\n" in text
    assert "| `--out` | Folder for the run" in text
    text = reference.python()
    for name in vitkit.__all__:
        assert name.startswith("__") or f"\n## vitkit.{name}\n" in text
    assert "### ViT.attention" in text


def test_docstrings_become_markdown() -> None:
    made = reference.docstring(
        "Do it.\n\nArgs:\n    a: one,\n        more.\n    b: two.\n\nReturns:\n    A thing.\n\n"
        "Example:\n    >>> 1\n    1"
    )
    assert made == (
        "Do it.\n\n\n**Args**\n\n- `a`: one,\n  more.\n- `b`: two.\n\n\n**Returns**\n\nA thing.\n\n\n"
        "**Example**\n\n```pycon\n>>> 1\n1\n```\n"
    )


def test_the_paper_in_code_shows_lines_that_exist() -> None:
    page = ROOT / "docs" / "paper-to-code.md"
    text = page.read_text(encoding="utf-8")
    numbered = build.with_line_numbers(text, page)  # raises if a line is gone
    rows = [line for line in text.splitlines() if line.startswith("|") and ".py)" in line]
    assert len(re.findall(r"#__codelineno-0-\d+\)", numbered)) == len(rows) >= 25
    for equation in range(1, 9):
        assert re.search(rf"^\| Eqs?\. (\d and )?{equation}\b", text, re.M), equation
    with pytest.raises(ValueError, match="0 lines with 'z = z - z'"):
        reference.line_of(ROOT / "vitkit" / "model" / "vit.py", "z = z - z")

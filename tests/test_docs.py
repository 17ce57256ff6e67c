"""Every code block of the README and of docs/ runs, in the order of its page, in an empty folder.

A block that cannot run here stands under a line `<!-- no-run: reason -->`, and the list of those is frozen below.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- no-run: (?P<reason>.+?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
SILENT = {"", "text", "json", "toml"}  # shown, not run

# page -> first line of each block that does not run
NO_RUN: dict[str, list[str]] = {
    "README.md": ["make demo"],
    "CONTRIBUTING.md": ["make check"],
    "speed.md": ["vitkit export small.safetensors --to onnx --out small.onnx"],  # tests/speed/test_export.py does
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page.name, text.count("\n", 0, match.start()) + 1, match["language"], match["code"], match["reason"])
        for match in BLOCK.finditer(text)
    ]


def test_what_does_not_run_is_frozen() -> None:
    found = {
        page.name: [block.code.splitlines()[0].split("#")[0].strip() for block in blocks(page) if block.reason]
        for page in PAGES
    }
    assert {name: lines for name, lines in found.items() if lines} == NO_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{block.page}, line {block.line}"
        if block.reason or block.language in SILENT:
            continue
        if block.language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                exec(compile(block.code, where, "exec"), names)
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
        else:
            pytest.fail(f"{where}: blocks are python, bash, or one of {sorted(SILENT)}; got {block.language!r}")


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_no_number_of_variants_in_prose() -> None:
    """The README's table of variants is the command's own output, not a copy that ages."""
    assert "86,567,656" not in (ROOT / "README.md").read_text(encoding="utf-8")

"""The Dockerfiles start a command that exists, with options that it has, from files that are there."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import typer.main

from vitkit.cli import app
from vitkit.server.pages import PAGE

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("file", ["Dockerfile", "examples/space/Dockerfile"])
def test_what_a_container_starts(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    entry, command = (
        json.loads(re.search(rf"^{word} (\[.*\])$", text, re.M)[1])  # type: ignore[index]
        for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["vitkit", "serve"]
    with typer.main.get_command(app).commands["serve"].make_context("serve", list(command)) as context:  # type: ignore[attr-defined]
        assert context.params["host"] == "0.0.0.0"
        assert f"EXPOSE {context.params['port']}" in text
    assert re.search(r"^USER (?!root)", text, re.M)


@pytest.mark.parametrize("file", ["Dockerfile", "examples/space/Dockerfile"])
def test_a_container_has_the_cpu_build_of_torch(file: str) -> None:
    """Its index comes before anything that needs torch, and is asked for torch alone: it lacks most other packages."""
    text = (ROOT / file).read_text(encoding="utf-8")
    installs = re.findall(r"^RUN pip install (.*)$", text, re.M)
    index = "https://download.pytorch.org/whl/cpu"
    given = re.search(r"^ARG TORCH_INDEX=(.*)$", text, re.M)
    if given:
        assert given[1] == index
        installs[0] = installs[0].replace('${TORCH_INDEX:+--index-url "$TORCH_INDEX"}', f"--index-url {index}")
    assert installs[0].split()[-3:] == ["--index-url", index, "torch"]
    assert "--no-deps" in installs[0]
    assert not any("index" in line for line in installs[1:])


def test_an_installed_vitkit_has_the_page() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]["vitkit"]
    for name, _ in PAGE.values():
        assert (ROOT / "vitkit/server/page" / name).is_file()
        assert f"**/*{Path(name).suffix}" in patterns
    assert {file.name for file in (ROOT / "vitkit/server/page").iterdir()} == {name for name, _ in PAGE.values()}


def test_the_build_context_holds_what_is_copied() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for line in re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M):
        for name in line.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored

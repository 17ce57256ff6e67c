"""Run the chapters and write them as Markdown with their pictures, for a site or any Markdown reader.

    python book/build.py OUT                                   # all chapters
    python book/build.py OUT 02 07 --docs ../                  # two of them, for a site whose pages are one folder up

Notebooks are stored without outputs. This program runs them in a scratch folder, so that nothing is left behind, and
writes OUT/NAME.md and OUT/NAME_files/*.png, *.svg. It needs `pip install 'vitkit[book]'`. A cell that fails stops it.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

BOOK = Path(__file__).parent
CHAPTERS = sorted(BOOK.glob("[01][0-9]-*.ipynb"))
SECONDS = 300  # that a cell may take
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # of a terminal


def run(path: Path) -> Any:
    """Return a notebook with the outputs of all its cells.

    Args:
        path: the .ipynb file; it is not changed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="vitkit-book-") as folder:
        for stored in path.parent.glob("*.json"):  # the stored curves that chapters show
            shutil.copy(stored, folder)
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            kernel_name="python3",
            extra_arguments=["--IPKernelApp.log_level=40"],
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, "XDG_STATE_HOME": folder})  # leave the reader's own progress alone
    return notebook


def links(text: str, docs: str) -> str:
    """Return Markdown whose links lead to built chapters and to the documentation.

    Args:
        text: Markdown of a chapter.
        docs: where the pages of docs/ are, relative to the built chapters.
    """
    text = re.sub(r"\]\(((?:\d\d)-[\w-]+)\.ipynb", r"](\1.md", text)
    return re.sub(r"\]\(\.\./docs/", f"]({docs}", text)


def picture(data: Any, kind: str, file: Path, alt: str) -> str:
    """Write an image of an output to a file, and return the Markdown that shows it.

    Args:
        data: its content: text for SVG, base64 for PNG.
        kind: svg or png.
        file: path of the file, without its suffix.
        alt: what it shows, for those who cannot see it.
    """
    path = file.with_suffix(f".{kind}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if kind == "svg" else base64.b64decode(data))
    return f"![{alt}]({path.parent.name}/{path.name})"


def shown(output: Any, file: Path, alt: str) -> str:
    """Return the Markdown of one output: a picture, an HTML table, or text.

    Args:
        output: an output of a cell.
        file: path for a picture, without its suffix.
        alt: what a picture shows.
    """
    data = output.get("data", {})
    for mime, kind in (("image/svg+xml", "svg"), ("image/png", "png")):
        if mime in data:
            return picture(data[mime], kind, file, alt)
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{data["text/html"].strip()}\n</div>'
    text = COLOURS.sub("", output.get("text", data.get("text/plain", ""))).strip("\n")
    fence = "`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", text))])
    return f"{fence}text\n{text}\n{fence}" if text.strip() else ""


def joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs of a cell without warnings, and with printed lines that follow each other as one output."""
    found: list[Any] = []
    for output in outputs:
        if output.get("name") == "stdout" and found and found[-1].get("name") == "stdout":
            found[-1] = {**found[-1], "text": found[-1]["text"] + output["text"]}
        elif output.get("name") != "stderr":
            found.append(output)
    return found


def markdown(notebook: Any, out: Path, name: str, docs: str = "../docs/") -> Path:
    """Write an executed notebook as Markdown, and return its path.

    Args:
        notebook: what `run` returned.
        out: folder to write to.
        name: name of the files, without a suffix.
        docs: where the pages of docs/ are, relative to the built chapters.
    """
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(links(cell.source.strip(), docs))
            continue
        parts.append(f"```python\n{cell.source.strip()}\n```")
        alt = cell.metadata.get("alt", "")
        for i, output in enumerate(joined(cell.outputs), start=1):
            parts.append(shown(output, out / f"{name}_files" / f"{cell.id}-{i}", alt))
    path = out / f"{name}.md"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Build the chapters that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("chapters", nargs="*", help="numbers or beginnings of names, such as 02 (default: all)")
    parser.add_argument("--docs", default="../docs/", help="where the pages of docs/ are (default: ../docs/)")
    args = parser.parse_args()
    wanted = [path for path in CHAPTERS if not args.chapters or path.name.startswith(tuple(args.chapters))]
    if not wanted:
        parser.error(f"Expected the beginnings of chapters' names, such as 02; got {' '.join(args.chapters)}.")
    for path in wanted:
        print(f"{path.name} ...", end=" ", flush=True)
        print(markdown(run(path), args.out, path.stem, args.docs), flush=True)


if __name__ == "__main__":
    main()

"""Who may import whom: the table of docs/design.md as a test. Imports flow one way; heavy libraries have one owner."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vitkit

ROOT = Path(vitkit.__file__).parent

# room -> rooms of ours that it may import
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "seeds": set(),
    "types": set(),
    "places": set(),
    "optional": {"errors"},
    "cpu_features": set(),
    "cpu_products": {"cpu_features"},
    "cuda_capture": set(),
    "devices": {"errors"},
    "model": {"errors"},
    "paper": {"errors"},
    "learn": {"errors"},
    "huggingface": {"errors", "model.config", "model.parts", "interfaces"},
    "checkpoints": {"errors", "devices", "model"},
    "interfaces": {"errors", "model", "paper", "huggingface", "checkpoints"},
    "data": {"errors", "model.config", "cuda_capture", "places"},
    "explanations": {"errors", "model", "huggingface"},
    "speed": {"errors", "optional", "cpu_features", "cpu_products", "cuda_capture", "model", "places"},
    "explore": {"errors", "optional", "model"},
    "server": {
        "errors",
        "optional",
        "cpu_features",
        "model",
        "data",
        "checkpoints",
        "evaluation",
        "explanations",
        "features",
        "speed",
        "training.lock",
    },
    "process_group": {"errors"},
    "runtime": {"errors", "cpu_features", "cpu_products", "devices", "process_group"},
    "evaluation": {"errors", "cpu_products", "model", "data", "runtime", "explanations.draw", "speed.frozen"},
    "features": {"errors", "cpu_products", "model", "data", "evaluation.labels", "runtime", "speed.frozen"},
    "training": {"errors", "model", "data", "checkpoints", "evaluation", "runtime", "cuda_capture"},
    "cluster": {
        "errors",
        "optional",
        "model",
        "data",
        "checkpoints.atomic",
        "evaluation",
        "features",
        "runtime",
        "speed.frozen",
    },
    "reports": {"errors", "data", "evaluation", "explanations", "features", "training.run_folder"},
    "jobs": {
        "errors",
        "cpu_features",
        "cpu_products",
        "cuda_capture",
        "places",
        "model",
        "checkpoints",
        "cluster",
        "data",
        "process_group",
        "runtime",
        "evaluation",
        "explanations",
        "explore",
        "features",
        "reports",
        "speed",
        "training",
    },
    "cli": {
        "api",
        "devices",
        "errors",
        "optional",
        "model",
        "process_group",
        "checkpoints",
        "data",
        "runtime",
        "evaluation",
        "explanations",
        "features",
        "jobs",
        "learn",
        "reports",
        "server",
        "speed",
        "training",
    },
    "results": {"checkpoints", "explanations", "model", "training"},
    "api": {
        "checkpoints",
        "data",
        "errors",
        "evaluation",
        "explanations",
        "features",
        "interfaces",
        "jobs",
        "model",
        "results",
        "runtime",
        "server",
        "training",
    },
    "__main__": {"cli"},
}
# third-party package -> where it may be imported
OWNERS: dict[str, set[str]] = {
    "matplotlib": {"explanations/draw.py"},
    "jinja2": {"reports"},
    "accelerate": {"runtime.py"},
    "typer": {"cli"},
    "rich": {"cli", "jobs"},
    "huggingface_hub": {"checkpoints"},
    "safetensors": {"checkpoints"},
    "sklearn": {"data", "features", "jobs"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "uvicorn": {"server"},
    "prometheus_client": {"server"},
    "ray": {"server", "cluster/on_ray.py"},
    "torchvision": {"data/gpu.py"},
    "timm": {"checkpoints/verify.py"},
    "transformers": {"checkpoints/verify.py"},
}


def imports(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import in a file, except those under `if TYPE_CHECKING`."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by full name"
            found.extend((f"{node.module}.{name.name}", node.lineno) for name in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in FILES} == set(MAY_IMPORT)


def test_the_documentation_has_the_same_table() -> None:
    """Except for the rooms that bring the others together: the page says that in words."""
    page = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.split("| room | what it does | may import (of ours) |\n")[1].split("\n\n")[0]
    found: dict[str, set[str]] = {}
    for line in table.splitlines()[1:]:
        rooms, _, allowed = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in re.findall(r"`([a-z_]+)(?:\.py|/)`", rooms):
            found[name] = set(allowed.split(", ")) - {"-"}
    in_words = {"jobs", "api", "cli"}
    assert set(found) == set(MAY_IMPORT) - {"__main__"}
    assert {name: rooms for name, rooms in found.items() if name not in in_words} == {
        name: rooms for name, rooms in MAY_IMPORT.items() if name not in {*in_words, "__main__"}
    }


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports(path: Path) -> None:
    allowed = MAY_IMPORT[room(path)] | {room(path), "types"}
    for module, line in imports(ROOT / path):
        head, _, rest = module.partition(".")
        if head == "vitkit" and rest:
            assert any(f"{rest}.".startswith(f"{name}.") for name in allowed), (
                f"vitkit/{path}:{line} imports {module}; {room(path)} may import {sorted(allowed)}"
            )
        if head in OWNERS:
            assert any(str(path) == owner or path.parts[0] == owner for owner in OWNERS[head]), (
                f"vitkit/{path}:{line} imports {head}; only {sorted(OWNERS[head])} may"
            )


def opens_text_without_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the locale's encoding, which is not UTF-8 everywhere."""
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if any(word.arg == "encoding" for word in call.keywords):
        return False
    if name not in ("open", "fdopen"):
        return name in ("read_text", "write_text")
    if name == "open" and owner in ("os", "Image", "tarfile", "gzip", "RunFolder", "cls"):  # these open no text
        return False
    at = 0 if method and owner != "os" else 1
    modes = [word.value for word in call.keywords if word.arg == "mode"] or call.args[at : at + 1]
    texts = [node.value for mode in modes for node in ast.walk(mode) if isinstance(node, ast.Constant)]
    return not texts or not all("b" in str(text) for text in texts)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("open(path)", True),
        ("path.open('w')", True),
        ("os.fdopen(handle, mode='w')", True),
        ("path.read_text()", True),
        ("path.write_text('x')", True),
        ("open(path, 'a' if more else 'wb')", True),
        ("open(path, 'ab' if more else 'wb')", False),
        ("open(path, 'rb')", False),
        ("path.open('wb')", False),
        ("open(path, encoding='utf-8')", False),
        ("path.write_text('x', encoding='utf-8')", False),
    ],
)
def test_the_search_for_encodings_finds(code: str, found: bool) -> None:
    assert opens_text_without_encoding(ast.parse(code, mode="eval").body) is found  # type: ignore[arg-type]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_text_files_name_their_encoding(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [f"vitkit/{path}:{call.lineno}" for call in calls if opens_text_without_encoding(call)]


@pytest.mark.parametrize("folder", sorted(p.parent for p in ROOT.rglob("__init__.py") if p.parent != ROOT), ids=str)
def test_rooms_open_with_what_belongs(folder: Path) -> None:
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert "does not belong" in words, f"{folder.name}/__init__.py: say what belongs here and what does not"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_lazy() -> None:
    assert run("import sys, vitkit; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False"


def test_model_needs_nothing_optional() -> None:
    """The model runs without typer, matplotlib, scikit-learn, accelerate and the hub's client."""
    code = """
import sys
for name in ("typer", "rich", "matplotlib", "sklearn", "accelerate", "huggingface_hub", "jinja2", "tensorboard"):
    sys.modules[name] = None
import torch, vitkit
from vitkit import ViT, ViTConfig, create, load, save
print(tuple(create("vit-ti/16", num_classes=2)(torch.zeros(1, 3, 224, 224)).shape))
"""
    assert run(code) == "(1, 2)"


def test_help_imports_no_torch() -> None:
    code = """
import sys
from vitkit.cli import app
try:
    app(["--help"])
except SystemExit:
    pass
print('torch' in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False"


def test_listing_models_imports_no_torch() -> None:
    code = """
import sys
from vitkit.cli import app
try:
    app(["models"])
except SystemExit:
    pass
print('torch' in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False"


def test_public_names_exist_and_are_documented() -> None:
    for name in vitkit.__all__:
        assert hasattr(vitkit, name)
        if name != "__version__":
            assert getattr(vitkit, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vitkit.nothing  # noqa: B018


# Where Eqs. 2 and 3 are computed: docs/design.md says why there. A function counts if it reads a block's norms or its
# two branches; gathering weights (Fused.__init__) is not computing.
BLOCKS = {
    "model/vit.py": {"Block.attend", "Block.feed_forward", "Block.attention"},
    "model/parts/blocks.py": {"PostNorm.attend", "PostNorm.feed_forward", "Parallel.forward"},
    "paper.py": {"TransformerEncoderBlock.forward"},
    "huggingface.py": {"ViTLayer.forward", "ViTLayer.feed_forward_chunk"},
    "speed/fp8.py": {"Fp8.block"},
    "speed/fused.py": {"Fused.block"},
    "speed/training.py": {"fused_blocks"},
}
READS = {"norm1", "norm2", "layernorm_before", "layernorm_after", "msa_block", "mlp_block"}


def test_eqs_2_and_3_are_computed_in_few_places() -> None:
    found: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            functions = [(f"{node.name}.", f) for f in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
            for owner, function in functions:
                if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                    used = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
                    if used & READS:
                        found.setdefault(path.as_posix(), set()).add(owner + function.name)
    assert found == BLOCKS
    page = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    for path, names in BLOCKS.items():
        assert any(f"`{path}: {name}`" in page or f"`{path}: {name.split('.')[0]}`" in page for name in names), path

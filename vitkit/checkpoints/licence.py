"""The licence of a checkpoint's weights: found where its files state it, and written with the weights again.

In this order: the metadata of a safetensors file, config.json, the front matter of the README next to it, and KNOWN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from vitkit.checkpoints.hub import README
from vitkit.checkpoints.source import Files

_DINOV3 = "DINOv3 License (https://ai.meta.com/resources/models-and-libraries/dinov3-license/)"
# Families whose terms must accompany the weights and everything derived from them: pattern of their names -> licence.
KNOWN: dict[str, str] = {r"dinov3(_|-vit)": _DINOV3}


def licence_of(files: Files, metadata: Mapping[str, str]) -> str:
    """Return what a checkpoint's files state about its licence, in one line; an empty string if they state nothing.

    A README is read only if config.json is next to the weights too: both then come from the same repository.

    Args:
        files: the checkpoint.
        metadata: of the safetensors file.
    """
    config = files.config
    stated = metadata.get("license") or metadata.get("licence") or metadata.get("modelspec.license") or ""
    for values in (config or {}, (config or {}).get("pretrained_cfg"), (config or {}).get("vitkit")):
        if not stated and isinstance(values, Mapping):
            stated = str(values.get("license") or values.get("licence") or "")
    if not stated and config is not None:
        stated = _front_matter(files.weights.parent / README)
    if not stated or stated.startswith("other"):
        names = [
            files.label,
            files.weights.name,
            *(str((config or {}).get(n, "")) for n in ("model_type", "architecture")),
        ]
        stated = next((text for pattern, text in KNOWN.items() for name in names if re.search(pattern, name)), stated)
    return " ".join(stated.split())[:500]


def _front_matter(readme: Path) -> str:
    """Return `name (link)` from the block between `---` lines with which the hub's model cards begin."""
    try:
        text = readme.read_text(encoding="utf-8", errors="replace")[:20_000] if readme.is_file() else ""
    except OSError:
        return ""
    block = re.match(r"---\s*\n(.*?)\n---", text, re.S)
    found = dict(re.findall(r"^(license(?:_name|_link)?):[ \t]*(.+?)[ \t]*$", block[1], re.M)) if block else {}
    values = {key: value.strip("'\"") for key, value in found.items()}
    name = values.get("license_name") or values.get("license", "")
    return f"{name} ({values['license_link']})" if name and values.get("license_link") else name

"""The page of proof lists every class that is compared, and nothing on it is different."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.families import CLASSES
from benchmarks.proof import HEAD, Row, page
from tests.peers import peer

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"


def rows() -> dict[str, list[str]]:
    found = re.findall(r"^\| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {line.split(" | ")[0]: line.split(" | ") for line in found}


def test_every_class_is_on_the_page_and_equal() -> None:
    found = rows()
    for name in CLASSES:
        assert found[name][1] == "equal", name
        assert float(found[name][2]) <= 1e-5
        assert found[name][3] == "yes"


def test_nothing_is_different() -> None:
    assert {row[1] for row in rows().values()} <= {"loads", "---", "equal", "refused", "not built"}
    assert PAGE.read_text(encoding="utf-8").startswith(HEAD)


def test_timm_has_no_other_names() -> None:
    found = rows()
    for module in ("vision_transformer", "deit", "eva", "beit"):
        assert set(peer("timm").list_models(module=module)) <= set(found), module


def test_a_page_says_what_is_wrong() -> None:
    made = page(
        [
            Row("timm", "deit", "a", "different", 0.5, 1e-3, False, True, "differs in what vitkit writes: b"),
            Row("timm", "deit", "c", "refused", words="This checkpoint has x. Use y."),
        ]
    )
    assert "| a | DIFFERENT | 5.0e-01 | off by 1e-03 | no | differs in what vitkit writes: b |" in made
    assert "| c | refused |  |  |  | This checkpoint has x |" in made
    assert "2 names: 1 different, 1 refused." in made

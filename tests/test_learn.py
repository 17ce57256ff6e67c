"""The exercises: answers pass, every mistake gets its own hint, and everything else is described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vitkit
from vitkit.cli import app
from vitkit.errors import InputError, UnknownName
from vitkit.learn import EXERCISES, feedback, passed

MISTAKES = [(name, hint) for name, one in EXERCISES.items() for hint in one.mistakes]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_there_is_enough_to_do() -> None:
    assert len(EXERCISES) >= 12
    assert min(len(one.mistakes) for one in EXERCISES.values()) >= 10


# Answers as a learner would write them, with other means than the exercises' own.
def _patches(x: torch.Tensor, P: int) -> torch.Tensor:
    B, _, H, W = x.shape
    rows = [
        x[:, :, r : r + P, c : c + P].permute(0, 2, 3, 1).reshape(B, -1) for r in range(0, H, P) for c in range(0, W, P)
    ]
    return torch.stack(rows, 1)


def _qkv(z: torch.Tensor, U: torch.Tensor, b: torch.Tensor, h: int) -> list[torch.Tensor]:
    B, N, D = z.shape
    parts = F.linear(z, U.T, b).view(B, N, 3, h, D // h).permute(2, 0, 3, 1, 4)
    return list(parts)


def _eq3(z: Any, norm1: Any, msa: Any, norm2: Any, mlp: Any) -> Any:
    z = z + msa(norm1(z))
    return z + mlp(norm2(z))


ANSWERS: dict[str, Any] = {
    "patches": _patches,
    "embed": lambda x, E, b: F.linear(x, E.T, b),
    "class-token": lambda z, cls: torch.cat((cls.repeat(z.shape[0], 1, 1), z), 1),
    "eq1": lambda z, cls, E: torch.cat((cls.repeat(z.shape[0], 1, 1) + E[:, :1], z + E[:, 1:]), 1),
    "qkv": _qkv,
    "scores": lambda q, k: F.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * q.size(-1) ** -0.5, dim=-1),
    "attend": lambda A, v: torch.einsum("bhij,bhjd->bhid", A, v),
    "msa": lambda sa, U, b: sum(sa[:, i] @ U.view(sa.shape[1], -1, U.shape[1])[i] for i in range(sa.shape[1])) + b,
    "layer-norm": lambda x, g, b, eps: F.layer_norm(x, x.shape[-1:], g, b, eps),
    "eq2": lambda z, norm, msa: z + msa(norm(z)),
    "mlp": lambda z, W1, b1, W2, b2: F.linear(F.gelu(F.linear(z, W1.T, b1)), W2.T, b2),
    "eq3": _eq3,
    "pool": lambda z, norm: norm(z)[:, 0],
    "parameters": lambda *a: _count(*a),
    "accuracy": lambda logits, labels: (
        sum(int((a.argmax(-1) == y).sum()) for a, y in zip(logits, labels, strict=True)) / sum(map(len, labels))
    ),
    "tokens": lambda H, W, P: 1 + H * W // P**2,
    "head-mask": lambda A, v, mask: torch.einsum("bhij,bhjd,h->bhid", A, v, mask),
    "ridge": lambda X, Y, l2: torch.inverse(X.T @ X + l2 * torch.diag(torch.ones(X.shape[1]))) @ (X.T @ Y),
    "rollout": lambda A: torch.linalg.multi_dot([(A.mean(1)[i] + torch.eye(A.shape[-1])) / 2 for i in (3, 2, 1, 0)]),
    "pixels": lambda x, mean, std: (x.movedim(-1, 1).float() / 255 - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1),
}


def _count(L: int, D: int, M: int, P: int, C: int, N: int, K: int) -> int:
    block = 2 * (2 * D) + (3 * D * D + 3 * D) + (D * D + D) + (D * M + M) + (M * D + D)
    return (P * P * C + 1) * D + D + (N + 1) * D + L * block + 2 * D + (D + 1) * K


@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_answer_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vitkit.learn.check(name, ANSWERS[name])
    assert capsys.readouterr().out == f"{name}: right.\n"
    assert passed() == [name]


def test_the_count_is_that_of_the_lesson_and_of_the_model() -> None:
    assert EXERCISES["parameters"].answer(12, 768, 3072, 16, 3, 196, 3) == 85_800_963
    model = vitkit.create(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        num_classes=5,
    )
    assert EXERCISES["parameters"].answer(2, 32, 64, 4, 3, 16, 5) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "hint"), MISTAKES)
def test_every_mistake_gets_its_own_hint(name: str, hint: str) -> None:
    found = feedback(name, EXERCISES[name].mistakes[hint])
    assert not found
    assert found.says == f"not yet. {hint}"


def test_other_answers_are_described() -> None:
    assert "returns nothing" in feedback("pool", lambda z, norm: None).says
    assert feedback("qkv", lambda *a: ...).says == "not yet. Write your code in place of the dots."
    assert "Expected a tensor; got list" in feedback("pool", lambda z, norm: [1]).says
    assert "Expected 3 results" in feedback("qkv", lambda z, U, b, h: z).says
    assert "Expected a number" in feedback("accuracy", lambda a, b: "12%").says
    stopped = feedback("scores", lambda q, k: q @ k).says
    assert "RuntimeError" in stopped
    assert "[2, 3, 6, 4], [2, 3, 6, 4]" in stopped
    turned = feedback("scores", lambda q, k: torch.zeros(6, 6, 3, 2)).says
    assert "Expected the shape [2, 3, 6, 6] = [B, h, N, N]; got [6, 6, 3, 2]. The axes are there" in turned
    other = feedback("scores", lambda q, k: EXERCISES["scores"].answer(q, k) * 0.5).says
    assert "100% of the values are not" in other
    assert "NaN" in feedback("pool", lambda z, norm: norm(z[:, 0]) * float("nan")).says

    def in_place(z: torch.Tensor, cls: torch.Tensor) -> torch.Tensor:
        z += 1
        return z

    assert "in place" in feedback("class-token", in_place).says


def test_bad_calls() -> None:
    with pytest.raises(UnknownName, match="eq1"):
        feedback("eq11", len)
    with pytest.raises(InputError, match="Expected a function"):
        feedback("eq1", 3)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def pool(z, norm):\n    return norm(z[:, 0])\n", encoding="utf-8")
    assert app(["learn", "pool", "--answer", str(file)], standalone_mode=False) == 0
    capsys.readouterr()
    app(["learn"], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"1 of {len(EXERCISES)} solved" in said
    assert "✓" in said
    app(["learn", "pool"], standalone_mode=False)
    assert "def pool(z, norm)" in capsys.readouterr().out
    file.write_text("def pool(z, norm):\n    return z[:, 0]\n", encoding="utf-8")
    assert app(["learn", "pool", "--answer", str(file)], standalone_mode=False) == 1
    assert "The norm is missing." in capsys.readouterr().out
    app(["learn", "--reset"], standalone_mode=False)
    assert "0 of" in capsys.readouterr().out
    for text, said in (("x = 1", "define the function pool"), ("1 / 0", "ZeroDivisionError")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=said):
            app(["learn", "pool", "--answer", str(file)], standalone_mode=False)
    with pytest.raises(InputError, match="does not exist"):
        app(["learn", "pool", "--answer", str(tmp_path / "none.py")], standalone_mode=False)
    with pytest.raises(InputError, match="needs the name"):
        app(["learn", "--answer", str(file)], standalone_mode=False)


def test_progress_survives_a_damaged_file(tmp_path: Path) -> None:
    from vitkit.learn.progress import place, remember

    remember("eq1")
    place().write_text("{", encoding="utf-8")
    assert passed() == []
    remember("eq2")
    assert passed() == ["eq2"]

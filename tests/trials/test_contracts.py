"""The import contracts name every module that they are about: one that is left out would be held to nothing."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("engine", "distill", "eval")


def sources(name: str) -> list[str]:
    """The modules of the contract whose name begins so."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(contract["source_modules"] for contract in contracts if contract["name"].startswith(name))


def distill() -> set[str]:
    files = {f"distill.{path.stem}" for path in (ROOT / "distill").glob("*.py") if path.stem != "__init__"}
    return files | {f"distill.{path.parent.name}" for path in (ROOT / "distill").glob("*/__init__.py")}


def test_all_but_the_importers_of_wandb_and_lightning_are_named() -> None:
    for name, allowed in (
        ("Only distill.track", {"track"}),
        ("Lightning stays", {"module", "fit", "flow", "keeper", "surroundings"}),
    ):
        named = sources(name)
        assert len(set(named)) == len(named)
        assert set(named) == {"engine", "eval", "scripts"} | (distill() - {f"distill.{one}" for one in allowed}), name


def test_what_says_no_torch_is_held_to_it() -> None:
    claimed = {
        f"{floor}.{path.stem}"
        for floor in FLOORS
        for path in (ROOT / floor).glob("*.py")
        if "no torch" in " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").lower().split())
    }
    assert len(claimed) > 30 and claimed <= set(sources("Torch-free"))

"""The import map of ARCHITECTURE.md is true: the table there is read and enforced here."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cometmq"
STARTERS = {"__init__", "__main__"}  # they only re-export or call main


def _rules() -> list[tuple[str, list[str], list[str]]]:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.split("## Who may import whom")[1]
    rules = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0] not in ("package", "---"):
            rules.append((cells[0], cells[1].split(), cells[2].split()))
    return rules


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts)


def _imports(path: Path) -> list[str]:
    """Absolute names of what a file imports: `from a.b import c` is a.b.c if that is a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                as_path = ROOT / "src" / Path(*inner.split("."))
                is_module = as_path.with_suffix(".py").exists() or as_path.is_dir()
                found.append(inner if is_module else node.module)
    return found


def _files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.stem not in STARTERS)


def _rule_for(module: str) -> tuple[str, list[str], list[str]]:
    for rule in RULES:
        if fnmatchcase(module, rule[0]):
            return rule
    raise AssertionError(f"{module} has no row in ARCHITECTURE.md's import table")


RULES = _rules()


@pytest.mark.parametrize("path", _files(), ids=_module)
def test_a_module_imports_only_what_the_map_allows(path: Path) -> None:
    module = _module(path)
    _, allowed, never = _rule_for(module)
    for name in _imports(path):
        if name == "cometmq":
            assert "cometmq" in allowed or "*" in allowed, f"{module} imports the package itself"
        elif name.startswith("cometmq."):
            ours = name.removeprefix("cometmq.")
            assert any(
                fnmatchcase(ours, one) or fnmatchcase(f"{ours}.x", one) for one in allowed
            ), f"{module} imports {ours}; allowed: {allowed}"
        else:
            top = name.split(".")[0]
            assert top not in never, f"{module} imports {top}, which the map forbids"
            if top == "msgspec":
                assert "msgspec" in allowed or "*" in allowed, f"{module} imports msgspec"


def test_the_map_has_a_row_for_everything_and_no_row_for_nothing() -> None:
    modules = [_module(path) for path in _files()]
    modules += [f"_fast.{path.stem}" for path in _compiled()]
    assert len(RULES) >= 10
    for pattern, _, _ in RULES:
        assert any(fnmatchcase(module, pattern) for module in modules), f"no file for {pattern}"


def _compiled() -> list[Path]:
    kinds = (".pyx", ".pxd", ".pxi")
    return sorted(path for path in (SOURCE / "_fast").iterdir() if path.suffix in kinds)


@pytest.mark.parametrize("path", _compiled(), ids=lambda path: path.name)
def test_the_compiled_path_imports_nothing_of_ours(path: Path) -> None:
    _, allowed, _ = _rule_for(f"_fast.{path.stem}")
    assert allowed == ["_fast.*"]
    for name in re.findall(r"^\s*(?:from|cimport|import) +(\S+)", path.read_text(), re.MULTILINE):
        assert name.startswith(("cometmq._fast.", "cpython.", "libc.", "posix.")), (
            f"{path.name}: {name}"
        )


def test_every_file_says_what_it_owns() -> None:
    silent = [
        _module(path)
        for path in SOURCE.rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []

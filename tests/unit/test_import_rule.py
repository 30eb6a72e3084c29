"""DESIGN section 1: which package may import what. Read from the source, so an import inside a function counts too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"kvcache", "scheduler", "worker", "cluster"}
# package -> modules it may import besides the standard library and itself; None: anything
ALLOWED: dict[str, set[str] | None] = {
    "kvcache": {"numpy"},
    "scheduler": {"numpy", "pydantic", "kvcache"},
    "worker": None,
    "cluster": None,
}
# file -> what it may import beyond its package's rule
EXTRA = {"kvcache/pool.py": {"torch"}}
# package -> our modules it may import besides itself, by longest known prefix
OUR_MODULES = {
    "kvcache": set(),
    "scheduler": {"kvcache"},
    "worker": {"kvcache.pool", "scheduler.step"},
    "cluster": {"kvcache", "scheduler", "worker"},
}
FORBIDDEN = {"worker": {"ray"}}


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports; `from a import b` gives `a.b`, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def problems(path: Path, source: str) -> list[str]:
    """What in this file breaks the rule."""
    package = path.parts[0]
    found = []
    for line, name in imports(ast.parse(source)):
        top = name.split(".")[0]
        if top == package or top in sys.stdlib_module_names:
            continue
        if top in OURS:
            allowed = OUR_MODULES[package]
            if not any(name == module or name.startswith(module + ".") for module in allowed):
                found.append(f"{path}:{line} imports {name}; {package} may import {sorted(allowed) or 'none of ours'}")
            continue
        permitted = ALLOWED[package]
        if top in FORBIDDEN.get(package, set()) or (
            permitted is not None and top not in permitted | EXTRA.get(path.as_posix(), set())
        ):
            found.append(f"{path}:{line} imports {name}")
    return found


def test_packages_import_upwards_only():
    found = [problem for path in sources() for problem in problems(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_every_package_is_there():
    assert {path.parts[0] for path in sources()} == OURS


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvcache/radix.py", "import torch"),
        ("kvcache/radix.py", "import scheduler"),
        ("scheduler/scheduler.py", "def f():\n    import ray"),
        ("scheduler/scheduler.py", "from worker.batch import Batch"),
        ("worker/runner.py", "from kvcache import RadixPrefixCache"),
        ("worker/runner.py", "from scheduler.request import Request"),
        ("worker/runner.py", "import ray"),
        ("worker/runner.py", "from cluster.errors import RaydixError"),
    ],
)
def test_the_test_would_notice(path, source):
    assert problems(Path(path), source)


def test_kvcache_pool_may_import_torch():
    assert not problems(Path("kvcache/pool.py"), "import torch\nimport numpy\nimport os")
    assert not problems(
        Path("worker/step_input.py"), "from scheduler.step import StepPlan\nfrom kvcache.pool import MHAKVCache"
    )

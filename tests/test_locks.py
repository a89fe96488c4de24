"""Lock order: violations are reported, every lock has a rank, and the design page has the same table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.lock_order import SEVERAL, TABLE, checked
from trajstore._core.base import locks


def test_a_lock_that_is_taken_out_of_order_is_told_with_both_places() -> None:
    with checked() as breaches:
        outer, inner = locks.rlock("Contents.lock"), locks.lock("WriteQueue._lock")
        with outer, inner:
            assert breaches == []
        with inner, outer:
            pass
    assert len(breaches) == 1
    assert breaches[0].startswith("Contents.lock is taken while WriteQueue._lock is held")
    assert breaches[0].count("test_locks.py") >= 2
    assert "with inner, outer" in breaches[0]


def test_locks_of_two_objects_of_a_class_only_where_the_order_says_so() -> None:
    with checked() as breaches:
        with locks.rlock("Contents.lock"), locks.rlock("Contents.lock"):
            pass
        assert breaches == []
        with locks.rlock("Sink.lock"), locks.rlock("Sink.lock"):
            pass
    assert len(breaches) == 1
    assert breaches[0].startswith("Sink.lock is taken while Sink.lock is held")


def made_in(root: Path) -> list[tuple[str, str]]:
    """Return each lock's module and its name from class and attribute."""
    made = []
    for path in sorted([*(root / "trajstore").rglob("*.py"), *(root / "trainer_hooks").rglob("*.py")]):
        code = path.read_text()
        if "locks." not in code:
            continue
        tree = ast.parse(code)
        module = path.relative_to(root).with_suffix("").as_posix().removeprefix("trajstore/")
        for scope in ast.walk(tree):
            if isinstance(scope, ast.ClassDef):
                for node in ast.walk(scope):
                    if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("locks."):
                        call = node.value
                        assert isinstance(call, ast.Call)
                        name = f"{scope.name}.{ast.unparse(node.targets[0]).removeprefix('self.')}"
                        assert ast.literal_eval(call.args[0]) == name, f"{path}:{node.lineno}"
                        made.append((name, module))
    return made


def test_every_lock_has_a_line_in_the_table_of_the_design_page(project_root: Path) -> None:
    assert sorted(made_in(project_root)) == sorted(TABLE)
    assert {*SEVERAL} <= {name for name, _ in TABLE}


def test_no_lock_is_made_beside_the_order(project_root: Path) -> None:
    # Gates: holding one means waiting, so no other lock is taken while holding it.
    allowed = {"locks.py", "interrupts.py"}
    names = {
        path.name
        for folder in ("trajstore", "trainer_hooks")
        for path in (project_root / folder).rglob("*.py")
        if re.search(r"\b(Lock|RLock|Condition|Semaphore|BoundedSemaphore)\(", path.read_text())
    }
    assert names <= allowed, "make it with trajstore._core.base.locks, and a line in docs/design/store.md"

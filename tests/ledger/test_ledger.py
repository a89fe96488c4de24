"""Ledgers: recorded steps are read back exactly, also after kills and rollbacks; audits name the first fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.stores import Run
from tests.stores import filled, flip, stored, writer_to
from trajstore import AgentTrajectory
from trajstore._core.store.json_arrays import array_to_json
from trajstore._core.store.log_records import encode_line
from trajstore.cli import DAMAGED
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreLockedError, StoreNotFoundError
from trajstore.ledger import ROW, Ledger, TrainedStep, audit, read
from trajstore.ledger.step import digest, mask_digest


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def step(number: int, rows: int = 3, seed: int = 0) -> TrainedStep:
    made = np.zeros(rows, ROW)
    random = np.random.default_rng([number, seed])
    fresh = 1000 * number + np.arange(rows)
    made["trajectory"] = np.where(np.arange(rows) % 8 == 7, random.integers(0, 1 << 45, rows), fresh)
    made["group"] = np.arange(rows) // 8
    made["replayed"] = np.arange(rows) % 8 == 7
    for name in ("advantage", "ratio", "weight"):
        made[name] = random.normal(size=rows)
    made["tokens"] = random.integers(1, 30_000, rows)
    made["version"] = number - random.integers(0, 9, rows)
    tasks = [f"t{group}" for group in range(-(-rows // 8))]
    return TrainedStep(
        number, made, tasks, number, number + 1, {"pg": 0.1, "kl": 1e-300}, {"at": 5}, {"torch": 2**64 - 1}
    )


def same(one: TrainedStep, other: TrainedStep) -> bool:
    return one.rows.tobytes() == other.rows.tobytes() and repr(replace(one, rows=0, tasks=())) == repr(
        replace(other, rows=0, tasks=())
    ) and [*one.tasks] == [*other.tasks]  # fmt: skip


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["record", "continue", "reopen"]), st.integers(0, 6)), max_size=12))
def test_a_ledger_is_the_dict_of_the_steps_that_count(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger")
    small = 900  # bytes: about every second step begins a file
    model: dict[int, TrainedStep] = {}
    pending: dict[int, TrainedStep] = {}
    ledger = Ledger(path, segment_bytes=small)
    for place, (action, number) in enumerate(actions):
        if action == "record":
            made = step(max(pending, default=0) + 1, number, place)
            ledger.record(made)
            pending[made.step] = made
            model = dict(pending)
        elif action == "reopen":
            ledger.close()
            ledger, pending = Ledger(path, segment_bytes=small), dict(model)
        elif number == 0 or number in pending or not pending:
            kept = {at: made for at, made in pending.items() if at <= number}
            if len(kept) < len(pending):
                with pytest.warns(UserWarning, match=f"after step {number} will be replaced"):
                    ledger.continue_from(number)
            pending = kept
        else:
            with pytest.raises(ConfigurationError, match=f"lacks step {number}"):
                ledger.continue_from(number)
    ledger.close()
    if model:
        found = read(path).steps
        assert [*found] == [*model]
        assert all(same(found[number], model[number]) for number in model)
        first, last = max(model) - 2, max(model) - 1
        assert [*read(path, first, last).steps] == [number for number in model if first <= number <= last]


def test_a_record_cut_anywhere_is_dropped_by_name_and_recorded_again(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.record(step(1))
        ledger.record(step(2))
        with pytest.raises(StoreLockedError):
            Ledger(tmp_path)
    file = tmp_path / "steps-000000-after-none.log"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (*range(first, len(whole) - 2, 13), len(whole) - 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        contents = read(tmp_path)
        assert ([*contents.steps], contents.torn) == ([1], end - first)
    with (
        pytest.warns(UserWarning, match="the record after step 1 is incomplete and is dropped"),
        Ledger(tmp_path) as ledger,
    ):
        ledger.record(step(2))
    assert file.read_bytes() == whole
    file.write_bytes(whole.replace(b'"step":1', b'"step":3', 1))
    with pytest.raises(CorruptStoreError, match=r"after-none\.log: .*byte 0 .*strict=False"):
        read(tmp_path)
    intact = read(tmp_path, strict=False)
    assert [*intact.steps] == [2]
    assert [f"byte 0 is damaged; {first:,} bytes are left out" in text for text in intact.damaged] == [True]
    assert audit(intact).problems == intact.damaged
    file.write_bytes(whole)
    for size in (0, first // 2):  # killed in the first record that replaces step 2
        (tmp_path / "steps-000001-after-1.log").write_bytes(whole[:size])
        assert ([*read(tmp_path).steps], read(tmp_path).replaced) == ([1, 2], ())
    with pytest.warns(UserWarning, match="the record after step 1 is incomplete"), Ledger(tmp_path) as ledger:
        assert ledger.last == 2
    file.rename(tmp_path / "steps-000001-after-1.log")
    with pytest.raises(CorruptStoreError, match=r"lacks the file steps-000000-after-\*\.log"):
        read(tmp_path)


def _lines(*order: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [lines[at] for at in order]


def _flipped(at: int, byte: int) -> Callable[[list[bytes]], list[bytes]]:
    def flip(lines: list[bytes]) -> list[bytes]:
        line = bytearray(lines[at])
        line[byte] ^= 1
        return [*lines[:at], bytes(line), *lines[at + 1 :]]

    return flip


@pytest.mark.parametrize(
    ("damage", "left", "fault"),
    [
        (_flipped(3, 20), [1, 2, 3], "is damaged; [0-9,]+ bytes are left out"),
        (_flipped(3, 3), [1, 2, 3], "is damaged; [0-9,]+ bytes are left out"),
        (_flipped(1, 40), [1, 3, 4], "is damaged; [0-9,]+ bytes are left out"),
        (_flipped(3, -1), [1, 2, 3, 4], "the line feed of the record at byte"),
        (_lines(0, 2, 3), [1, 3, 4], "records are missing: step 3 follows step 2, and here 1"),
        (_lines(1, 2, 3), [2, 3, 4], "records are missing: step 2 follows step 1, and here nothing"),
        (_lines(0, 1, 1, 2, 3), [1, 2, 3, 4], "repeats step 2"),
        (_lines(0, 1, 2, 3, 0), [1, 2, 3, 4], "repeats step 1"),
        (_lines(0, 2, 1, 3), [1, 2, 3, 4], "is out of order: step 2 after step 3"),
        (_lines(3, 2, 1, 0), [1, 2, 3, 4], r"is out of order: step 3 after step 4 \(and 2 more faults\)"),
    ],
)
def test_a_damaged_record_is_named_and_all_others_are_read(
    damage: Callable[[list[bytes]], list[bytes]], left: list[int], fault: str, tmp_path: Path
) -> None:
    with Ledger(tmp_path) as ledger:
        for number in (1, 2, 3, 4):
            ledger.record(step(number))
    file = tmp_path / "steps-000000-after-none.log"
    file.write_bytes(b"".join(damage(file.read_bytes().splitlines(keepends=True))))
    with pytest.raises(CorruptStoreError, match=rf"after-none\.log: .*{fault}.*; strict=False reads the others"):
        read(tmp_path)
    with pytest.raises(CorruptStoreError):  # an acknowledged record is not dropped as an incomplete one
        Ledger(tmp_path)
    intact = read(tmp_path, strict=False)
    assert ([*intact.steps], intact.torn) == (left, 0)
    assert all(same(intact.steps[number], step(number)) for number in left)
    problems = audit(intact).problems
    assert set(intact.damaged) < {*problems, ""}
    assert not any("incomplete" in problem for problem in problems)


@pytest.mark.parametrize("files", [1, 2])
def test_an_emptied_ledger_is_a_problem(files: int, tmp_path: Path) -> None:
    with Ledger(tmp_path, segment_bytes=1) as ledger:
        for number in range(1, files + 1):
            ledger.record(step(number))
    sorted(tmp_path.glob("steps-*"))[-1].write_bytes(b"")
    (problem,) = audit(read(tmp_path)).problems
    with pytest.warns(UserWarning, match="is empty and is removed"), Ledger(tmp_path) as ledger:
        assert ledger.last == (files - 1 or None)
    assert problem.startswith("the newest file is empty: " + ("no step is recorded" if files == 1 else "nothing is"))


@pytest.mark.parametrize("size", [0, -1, -100])
def test_an_earlier_file_without_its_end_is_damaged(size: int, tmp_path: Path) -> None:
    with Ledger(tmp_path, segment_bytes=1) as ledger:
        for number in (1, 2, 3):
            ledger.record(step(number))
    file = tmp_path / "steps-000001-after-1.log"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CorruptStoreError, match=r"after-1\.log: .*step 1.*steps-0+2"):
        read(tmp_path)
    intact = read(tmp_path, strict=False)
    assert [*intact.steps] == [1, 3]
    assert set(intact.damaged) < set(audit(intact).problems)


def test_a_line_that_never_reached_the_disk_is_incomplete(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.record(step(1))
        ledger.record(step(2))
    file = tmp_path / "steps-000000-after-none.log"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:50] + bytes(60) + lines[1][110:])
    contents = read(tmp_path)
    assert ([*contents.steps], contents.torn) == ([1], len(lines[1]))
    assert "incomplete record" in audit(contents).problems[0]


def test_a_step_of_1024_rows_takes_at_most_48_bytes_per_row(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    made = replace(step(1, 1024), options={"pad_token_id": 0})
    for name in ("token_digest", "mask_digest"):
        made.rows[name] = random.integers(0, 1 << 32, 1024)
    made.rows["log_prob"] = random.normal(size=1024)
    made = replace(made, unknown=("probability",))
    with Ledger(tmp_path) as ledger:
        ledger.record(made)
    assert same(read(tmp_path).steps[1], made)
    assert (tmp_path / "steps-000000-after-none.log").stat().st_size <= 48 * 1024
    record = made.to_json(None)
    del record["options"]  # of a trainer that does not record them
    assert same(TrainedStep.from_json(record, "ledger"), replace(made, options={}))


def test_further_keys_of_a_step_are_read_over(tmp_path: Path) -> None:
    """Earlier records have the rows of each loss computation."""
    made = replace(step(1), options={"pad_token_id": 0, "entropy_coeff": 0.1})
    record = made.to_json(None) | {"updates": [array_to_json(np.array([2, 0], np.int32))]}
    (tmp_path / "steps-000000-after-none.log").write_bytes(encode_line(record))
    with Ledger(tmp_path) as ledger:
        ledger.record(step(2))
    contents = read(tmp_path)
    assert same(contents.steps[1], made)
    assert same(contents.steps[2], step(2))


def test_steps_that_cannot_be_recorded_exactly_are_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.record(step(1))
        unstored = step(2).rows
        unstored["trajectory"][1:] = -1
        for wrong, message in (
            (step(1), "step 1 is not after step 1; a trainer that resumes calls continue_from first"),
            (replace(step(2), tasks=["a"], rows=step(2, 9).rows), "groups are 0 to 1, but there are 1 tasks"),
            (replace(step(2), rows=np.zeros(2)), "rows must be an array"),
            (replace(step(2), rows=unstored), "row 0 of rollout -1 is there twice"),
            (replace(step(2), data={"at": float("nan")}), "data must be JSON values"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                ledger.record(wrong)
    with pytest.raises(StoreNotFoundError):
        read(tmp_path / "absent")


def test_audit_names_the_first_row_that_is_inconsistent(tmp_path: Path, run: Run) -> None:
    altered = step(3, 20)
    altered.rows["advantage"][11] = np.nan
    altered.rows["version"][12:14] = 9
    with Ledger(tmp_path) as ledger:
        for made in (step(1, 20), step(2, 20), step(3, 20)):
            ledger.record(made)
    assert run("audit", tmp_path)[0] == 0
    with Ledger(tmp_path) as ledger:
        with pytest.warns(UserWarning, match="1 step after step 2 will be replaced"):
            ledger.continue_from(2)
        ledger.record(altered)
    code, out, _ = run("audit", tmp_path)
    assert code == 1
    assert out.splitlines() == [
        "step 3: advantage is not finite in 1 row, first row 11 (trajectory 3011)",
        "step 3: version is after the policy's in 2 rows, first row 12 (trajectory 3012)",
        f"{tmp_path}: 3 steps (1 to 3), 60 rows, 6 of them replayed; 1 step replaced after resuming",
    ]
    assert run("audit", tmp_path, "--json")[0] == 1


def test_a_digest_depends_on_tokens_and_trained_places_alone() -> None:
    assert digest([3, 1]) == digest(torch.tensor([3, 1])) == digest(np.array([3, 1], np.int32))
    assert len({digest(numbers) for numbers in ([], [0], [0, 0], [1, 3], [3, 1])}) == 5
    assert mask_digest([1, 1, 0, 0]) == mask_digest([1, 1, 1]) == mask_digest([]) == 0
    assert mask_digest([1, 0, 1, 0]) == mask_digest(torch.tensor([True, False, True]))
    assert len({mask_digest(mask) for mask in ([0, 1, 1], [1, 0, 1], [1, 1, 1], [0, 1], [0, 0, 1])}) == 5


def test_a_configuration_is_written_when_it_changes(tmp_path: Path) -> None:
    first, later = {"optim": {"lr": 1e-6, "betas": [0.9, 0.95]}, "name": "x"}, {"optim": {"lr": 1e-5}, "name": "x"}
    with Ledger(tmp_path / "one") as ledger:
        for number in (1, 2, 3):
            ledger.record(replace(step(number), config=first if number < 3 else later))
        with pytest.raises(ConfigurationError, match="step 4: config must be JSON values"):
            ledger.record(replace(step(4), config={"nan": float("nan")}))
    with Ledger(tmp_path / "one") as ledger:
        with pytest.warns(UserWarning, match="will be replaced"):
            ledger.continue_from(2)
        ledger.record(replace(step(3), config=first))
        ledger.record(replace(step(4), config=later))
    lines = b"".join(file.read_bytes() for file in sorted((tmp_path / "one").glob("steps-*"))).splitlines()
    assert [b'"config"' in line for line in lines] == [True, False, True, True, True]
    one = read(tmp_path / "one")
    assert [of.config for of in one.steps.values()] == [first, first, first, later]


def test_audit_of_a_store_names_rows_that_contradict_its_trajectories(tmp_path: Path, run: Run) -> None:
    made = [AgentTrajectory(input_ids=torch.arange(3), task_id=task, policy_version=2) for task in "abb"]
    path = stored(tmp_path / "store", made)
    rows = np.zeros(3, ROW)
    rows["trajectory"], rows["group"], rows["version"] = [0, 1, -3], [0, 1, 1], [2, 2, 3]
    with Ledger(path / "ledger") as ledger:
        ledger.record(TrainedStep(3, rows, ["a", "b"], policy_before=3))
    assert run.out("audit", path).splitlines() == [
        f"{path}: 1 step (3), 3 rows, 0 of them replayed; 0 steps replaced after resuming",
        f"{path}: each trajectory trained in at most 1 step; 1 trajectory of the store not trained, 0 trained ones "
        "evicted since",
    ]
    bad = rows.copy()
    bad["trajectory"], bad["version"] = [1, 5, 2], [1, 4, 2]
    with Ledger(path / "ledger") as ledger:
        ledger.record(TrainedStep(5, bad, ["a", "b"], policy_before=5))
    with writer_to(path) as writer:
        writer.evict([2])
    code, out, _ = run("audit", path)
    assert code == 1
    assert out.splitlines() == [
        "step 5: follows step 3; steps between them are missing",
        "1 trajectory fresh in several steps, first 1 in steps 3, 5",
        "step 5: trajectory never committed (the store's next id is 3) in 1 row, first row 1 (trajectory 5)",
        "step 5: trajectory of another task than its group in 1 row, first row 0 (trajectory 1)",
        "step 5: trajectory sampled by another policy version than the store says in 1 row, first row 0 (trajectory 1)",
        f"{path}: 2 steps (3 to 5), 6 rows, 0 of them replayed; 0 steps replaced after resuming",
        f"{path}: each trajectory trained in at most 2 steps; 0 trajectories of the store not trained, 1 trained ones "
        "evicted since",
    ]


def test_inspect_names_the_ledger_of_a_store(run: Run, tmp_path: Path) -> None:
    store = Path(filled(tmp_path / "store", range(2)))
    with Ledger(store / "ledger") as ledger:
        for number in (4, 5):
            ledger.record(step(number))
    nbytes = sum(file.stat().st_size for file in (store / "ledger").iterdir())
    expected = {"steps": 2, "first": 4, "last": 5, "rows": 6, "bytes": nbytes}
    assert run.json("inspect", store)["ledger"] == expected
    flip(next((store / "ledger").iterdir()))
    assert "ledger/steps-000000-after-none.log" in run.out("inspect", store, code=DAMAGED)

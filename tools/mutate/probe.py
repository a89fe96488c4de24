"""Use a directory as users do, and record the results. Runs in a worker process, without knowledge of the damage."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.witness import WitnessError, check_batch, witness
from tools.mutate.pristine import RULES, Kind, agent_witness, files_of
from trainer_hooks.replay import ExperienceManager
from trainer_hooks.replay.store import BufferStore
from trajstore import TrajectoryReplayBuffer, errors
from trajstore._core.columns.facts import SCORE
from trajstore.operations.copying import repair_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verification import Problem, Verification
from trajstore.operations.verify import verify
from trajstore.query import FACTS

NEW = 99
"""Key of the trajectory that is added to a damaged store."""

_READING = (errors.CorruptStoreError, errors.UnsafeContentError)
_OPENING = (*_READING, errors.StoreNotFoundError, errors.UnsupportedVersionError)
ALLOWED: dict[str, tuple[type[Exception], ...]] = {
    "verify": (errors.StoreNotFoundError, errors.UnsupportedVersionError),
    "inspect": _OPENING,
    "repair": _OPENING,
    "load_checkpoint": _OPENING,
    "sample": (*_READING, errors.EmptyBufferError, errors.SchemaMismatchError),
    "get": (*_READING, errors.TrajectoryUnavailableError),
    "open for writing": (*_READING, errors.UnsupportedVersionError, errors.StoreWriteError),
    "add": (errors.StoreWriteError,),
    "load pool": (*_READING, errors.StoreNotFoundError, errors.ConfigurationError),
    "recover pool": (*_READING, errors.ConfigurationError),
}
"""The documented errors of each call on a directory; any other error is a problem."""

REFUSED = "!"
"""Prefix of an error's name in place of an unreadable value."""


@dataclass
class Look:
    """Result of one way of reading: facts by name, each a value's digest or an error's name."""

    error: str | None = None
    facts: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """Results of probing one directory.

    Attributes:
        reported: whether ``verify`` found damage, or refused the directory.
        notes: number of other notes of ``verify``.
        message: its first problem or note.
        lost: number of trajectories that it reports as lost; None if the number is unknown.
        strict: a load of the directory.
        lenient: a load with ``strict=False``.
        pins: loads of the pins.
        opened: whether a writer could continue; None if none tried.
        repaired: a load of the store that ``repair_store`` made.
        repaired_whole: whether it reported a complete store; None if it made none.
        rewritten: a load after the writer.
        reported_after: as ``reported``, after the writer.
        ended: False if the process hung or died.
        problems: results that are wrong for any damage.
    """

    reported: bool = False
    notes: int = 0
    message: str = ""
    lost: int | None = None
    strict: Look = field(default_factory=Look)
    lenient: Look = field(default_factory=Look)
    pins: dict[str, Look] = field(default_factory=dict)
    opened: bool | None = None
    repaired: Look = field(default_factory=Look)
    repaired_whole: bool | None = None
    rewritten: Look = field(default_factory=Look)
    reported_after: bool = False
    ended: bool = True
    problems: list[str] = field(default_factory=list)


def probe(path: Path, kind: Kind) -> Report:
    """Verify, inspect, load, sample, read and continue the directory at ``path``."""
    report = Report()
    if kind.content == "pool":
        report.strict = report.lenient = _look_at_pool(path, report)
        report.reported = report.strict.error is not None
        return report
    found, error = _call("verify", lambda: verify(path), report)
    report.reported, report.notes, report.message = _verdict(found, error)
    report.lost = _lost(found)
    _call("inspect", lambda: inspect(path), report)
    report.strict = _look(path, kind, report, strict=True)
    report.lenient = _look(path, kind, report, strict=False)
    _repair(path, kind, report)
    report.pins = {name: _look(path, kind, report, strict=True, pin=name) for name in kind.pins}
    if kind.writable:
        _write(path, kind, report)
    return report


def _call(what: str, function: Callable[[], Any], report: Report) -> tuple[Any, str | None]:
    """Return a call's result, or the name of its error; an undocumented error is a problem."""
    try:
        return function(), None
    except ALLOWED[what] as error:
        return None, type(error).__name__
    except WitnessError:
        return None, "WitnessError"
    except Exception as error:  # the errors that a campaign searches
        report.problems.append(f"{what} raised {type(error).__name__}: {str(error)[:300]}")
        return None, type(error).__name__


def _verdict(found: Verification | None, error: str | None) -> tuple[bool, int, str]:
    if found is None:
        return True, 0, str(error)
    parts = [found, *found.parts]
    problems = [problem for part in parts for problem in part.problems]
    notes = [note for part in parts for note in part.notes]
    first = [f"{problem.file}: {problem.message}" for problem in problems] + notes
    return not found.sound, len(notes), first[0][:200] if first else ""


def _lost(found: Verification | None) -> int | None:
    if found is None or any(problem.uncounted for problem in found.problems):
        return None
    ids = {(problem.file.rpartition("rank_")[2][:2], number) for problem in found.problems for number in _ids(problem)}
    return len(ids)


def _ids(problem: Problem) -> Iterator[int]:
    for low, high in problem.lost:
        yield from range(low, min(high, low + 1000) + 1)


def _repair(path: Path, kind: Kind, report: Report) -> None:
    """Make a new store of the intact trajectories, and read it."""
    new = path.with_name(path.name + ".repaired")
    shutil.rmtree(new, ignore_errors=True)
    try:
        made, error = _call("repair", lambda: repair_store(path, new), report)
        if error is None:
            report.repaired_whole = made.is_whole
            report.repaired = _look(new, kind, report, strict=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _look(path: Path, kind: Kind, report: Report, *, strict: bool, pin: str | None = None) -> Look:
    look = Look()
    buffer = TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False)
    try:
        _, look.error = _call("load_checkpoint", lambda: buffer.load_checkpoint(path, strict=strict, pin=pin), report)
        if look.error is None:
            state = (buffer.seed, buffer.state_dict(), buffer._trajectory_counter, buffer._trajectory_format)
            look.facts["state"] = digest(state)
            if pin is None:
                look.facts["batch"] = _sample(buffer, kind, report)
            look.facts |= _trajectories(buffer, report)
    finally:
        buffer.close()
    return look


def _trajectories(buffer: TrajectoryReplayBuffer, report: Report) -> dict[str, str]:
    facts = {}
    for number in buffer.trajectory_ids.tolist():
        get = partial(buffer.get, number)
        with mock.patch(
            "trajstore._core.reading.contents.Contents._late_rows_of", return_value={}
        ):  # values by row are separate facts
            found, error = _call("get", get, report)
        facts[f"trajectory {number}"] = digest(found) if error is None else REFUSED + error
        if error is None:
            found, error = _call("get", get, report)
            if error is not None or found.notes:
                facts[f"rows of {number}"] = digest(found.notes) if error is None else REFUSED + error
    for row in buffer.query().rows():
        given = {name: row[name] for name in row if name not in FACTS and not name.startswith(SCORE)}
        if any(value is not None for value in given.values()):
            facts[f"values of {row['trajectory_id']}"] = digest(given)
    return facts


def _sample(buffer: TrajectoryReplayBuffer, kind: Kind, report: Report) -> str:
    if not len(buffer):
        return "empty"
    if kind.content == "step":
        _, error = _call("sample", lambda: check_batch(buffer.sample(16)), report)
    else:
        _, error = _call("sample", lambda: buffer.sample_trajectories(3), report)
    return "right" if error is None else REFUSED + error


def _look_at_pool(path: Path, report: Report) -> Look:
    pool = ExperienceManager(RULES)
    _, error = _call("load pool", lambda: pool.load_experience_pool_from_disk(path), report)
    return Look(error, {} if error else _pool_facts(pool))


def _pool_facts(pool: ExperienceManager) -> dict[str, str]:
    facts = {"buckets": digest(dict(pool.difficulty2task_dict)), "skip": digest(sorted(pool.skip_uid_set))}
    for task, held in pool.task2trajectories.items():
        facts |= {f"{task} {number}": digest(history) for number, history in enumerate(held)}
    return facts


# -- writing -----------------------------------------------------------------------------------------


def _write(path: Path, kind: Kind, report: Report) -> None:
    """Continue the store: add one trajectory, and read it again."""
    before = files_of(path)
    buffer, error = _call("open for writing", lambda: _writer(path), report)
    report.opened = error is None
    if error is not None:
        after = files_of(path)
        changed = sorted(name for name in before if after.get(name) != before[name])
        if [name for name in changed if name != "writer.lock" and not name.startswith("readers/")]:
            report.problems.append(f"a store that could not be opened for writing was changed: {', '.join(changed)}")
        return
    taken = set(buffer.trajectory_ids.tolist())
    new = agent_witness(NEW) if kind.content == "agent" else witness(NEW)
    try:
        added, failed = _call("add", lambda: _add(buffer, new), report)
        if failed is None and added in taken:
            report.problems.append(f"id {added} was assigned twice")
    finally:
        _call("add", buffer.close, report)
    report.rewritten = _look(path, kind, report, strict=False)
    if failed is None and digest(new) not in set(report.rewritten.facts.values()):
        report.problems.append("the added and flushed trajectory is missing")
    found, error = _call("verify", lambda: verify(path), report)
    report.reported_after, *_ = _verdict(found, error)
    if kind.content == "agent":
        report.rewritten.facts |= _recovered(path, report)


def _writer(path: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, sample_window_size=0, enable_cache=False, trajectory_format="pt"
    )


def _add(buffer: TrajectoryReplayBuffer, new: Any) -> int:
    (number,) = buffer.add_trajectories([new])
    buffer.flush()
    return number


def _recovered(path: Path, report: Report) -> dict[str, str]:
    store, error = _call("open for writing", lambda: BufferStore.open(path), report)
    if error is not None:
        return {"pool": REFUSED + error}
    try:
        pool, error = _call("recover pool", lambda: ExperienceManager(RULES, store=store), report)
        if error is not None:
            return {"pool": REFUSED + error}
        facts, error = _call("get", lambda: _pool_facts(pool), report)
        return {"pool": digest(facts) if error is None else REFUSED + error}
    finally:
        _call("add", store.close, report)


# -- digests -----------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return a digest of a value, bit by bit, without ``model_weights_id``, which ``add`` assigns."""
    summary = hashlib.sha256()
    _feed(value, summary.update, 0)
    return summary.hexdigest()[:24]


def _feed(value: Any, update: Callable[[bytes], None], depth: int) -> None:
    if depth > 100:
        update(b"deep")
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype}{list(value.shape)}".encode())
        if value.numel():
            update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif dataclasses.is_dataclass(value):
        fields = {name: item for name, item in vars(value).items() if name != "model_weights_id"}
        _feed(fields, update, depth + 1)
    elif isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            update(repr(key).encode("utf-8", "surrogatepass") + b":")
            _feed(item, update, depth + 1)
    elif isinstance(value, list | tuple):
        update(b"[%d" % len(value))
        for item in value:
            _feed(item, update, depth + 1)
    else:
        update(repr(value).encode("utf-8", "surrogatepass") + b";")

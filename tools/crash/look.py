"""What is there after a crash, compared with what was promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tests.support.witness import WitnessError, check_trajectory
from tools.crash.journal import Promises
from trajstore import TrajectoryReplayBuffer
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.writing.inbox import late_values_in, waiting
from trajstore.errors import StoreNotFoundError, TrajstoreError
from trajstore.operations.verify import verify

Tell = Callable[[str], None]


def look(folder: Path, promises: Promises, problem: Tell) -> dict[int, int] | None:
    """Check store, pins and checkpoint; return id and key of every trajectory of the store, None if there is no store.

    What was uncertain when the process died is put into ``promises`` as it was found.

    Args:
        folder: of ``store`` and ``checkpoint``.
        promises: what was promised.
        problem: told of everything that is wrong.
    """
    _look_at_checkpoint(folder / "checkpoint", promises, problem)
    store = folder / "store"
    present = read(store, None, problem)
    if present is None:
        if promises.flushed or any(promises.pins.values()):
            problem("the store is gone")
        return None
    for trajectory_id, key in promises.flushed.items():
        if trajectory_id in present:
            if present[trajectory_id] != key:
                problem(f"trajectory {trajectory_id} has the key {present[trajectory_id]}, {key} was flushed")
        elif not promises.gone_rightly(trajectory_id, present):
            problem(f"trajectory {trajectory_id} was flushed and is lost")
    for trajectory_id in sorted(promises.surely_evicted & present.keys()):
        problem(f"trajectory {trajectory_id} was evicted and is there again")
    for name, kept in list(promises.pins.items()):
        if kept is None:
            del promises.pins[name]  # both are right
        elif (pinned := read(store, name, problem)) != kept:
            problem(f"pin {name} holds {pinned}, not {kept}")
    for name in sorted(promises.unpinned):
        if (store / "pins" / f"{name}.json").exists():
            problem(f"pin {name} was let go of and is there again")
    _look_at_values(store, present, promises, problem)
    verify_at(store, problem)
    return present


def _look_at_values(store: Path, present: Iterable[int], promises: Promises, problem: Tell) -> None:
    """Compare the values that came late: those that wait in the inbox count; none is there twice."""
    directory = open_directory(store)
    try:
        catalog = Catalog.open(directory)
        files = [name for name in waiting(directory) if name not in catalog.notes.sources]
        inbox = [late_values_in(directory, name, catalog.store_id) for name in files]
        with TrajectoryReplayBuffer.open(store) as reader:
            given = {number: reader.get(number).notes for number in present}
        rows = {number: set(notes["rows"].reshape(-1).tolist()) for number, notes in given.items() if notes}
    except (TrajstoreError, OSError) as error:
        problem(f"the values that came late cannot be read: {type(error).__name__}: {error}")
        return
    for number in sorted(set(present) & promises.annotating.keys()):
        history = catalog.notes.history(number)
        values = [note.value for note in history if note.name == "v"]
        values += [said.values["v"][said.ids.index(number)] for said in inbox if number in said.ids]
        found = [int(value) for value in values if isinstance(value, int | float)]
        if found != sorted(set(found)):
            problem(f"trajectory {number} was given {found}: one value twice, or in another order")
        of_rows = [note.value for note in history if note.name == "of_rows"]
        told = {float(value) for value in of_rows[-1:] if isinstance(value, float)}
        if rows.get(number, set()) != told:
            problem(f"trajectory {number} has the rows {rows.get(number)}, but {told} came with them")
        least, most = promises.annotated.get(number, 0), promises.annotating[number]
        if not least <= max(found, default=0) <= most:
            problem(f"trajectory {number} has the value {max(found, default=None)}, not one from {least} to {most}")


def _look_at_checkpoint(path: Path, promises: Promises, problem: Tell) -> None:
    expected = [keys for keys in (promises.checkpoint, *promises.saving) if keys is not None]
    if not expected:
        return
    found = read(path, None, problem)
    if found is None:
        if promises.checkpoint is not None:
            problem("the checkpoint is gone")
        promises.saving = []
        return
    if found not in expected:
        problem(f"the checkpoint holds {found}, not {' or '.join(map(str, expected))}")
    verify_at(path, problem)
    promises.checkpoint, promises.saving = found, []


def verify_at(path: Path, problem: Tell) -> None:
    """Tell what ``verify`` finds."""
    try:
        troubles = verify(path).problems
    except TrajstoreError as error:
        problem(f"verify refuses {path.name}: {type(error).__name__}: {error}")
        return
    for trouble in troubles[:3]:
        problem(f"{path.name}/{trouble.file}: {trouble.message} (one of {len(troubles)})")


def read(path: Path, pin: str | None, problem: Tell) -> dict[int, int] | None:
    """Return id and key of every trajectory, each compared with what its key says; None if nothing is there."""
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    try:
        buffer.load_checkpoint(path, pin=pin)
        return {number: check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist()}
    except StoreNotFoundError:
        return None
    except (TrajstoreError, WitnessError, OSError) as error:
        problem(f"{path.name}{f' (pin {pin})' if pin else ''} cannot be read: {type(error).__name__}: {error}")
        return {}
    finally:
        buffer.close()

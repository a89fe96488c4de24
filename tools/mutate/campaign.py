"""Copy, damage, probe: the parent process."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import orjson

from tools.campaigns import Result
from tools.mutate.damage import disturb
from tools.mutate.forgery import forge
from tools.mutate.pristine import Kind, build, files_of
from tools.mutate.probe import Report
from tools.mutate.rules import Files, Pristine, judge, next_id, outcome, pins_beyond, weigh
from tools.mutate.worker import Worker
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.sealed import METADATA_NAME, metadata_json

_FORGED = 0.35
"""Share of the mutations that are forged with knowledge of the layout."""
_PRECIOUS = b"precious"

Probe = Callable[[Path, Kind], Report]


def run_campaign(
    folder: Path,
    kinds: Sequence[Kind],
    mutations: int,
    seed: int,
    *,
    only: int | None = None,
    probe: Probe | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Result:
    """Damage directories of several kinds in turn; return the results.

    Args:
        folder: an empty folder to work in.
        kinds: kinds of directories.
        mutations: number of mutations of all kinds.
        seed: of the damage.
        only: number of a single mutation of the first kind.
        probe: reads a directory; None uses a separate process.
        progress: called after each mutation.
    """
    result = Result()
    with ExitStack() as ending:
        look = probe or ending.enter_context(closing(Worker())).probe
        pristine = {kind.name: _pristine(folder / kind.name, kind, look) for kind in kinds}
        plan = (
            [(kinds[n % len(kinds)], n // len(kinds)) for n in range(mutations)] if only is None else [(kinds[0], only)]
        )
        for kind, number in plan:
            begun = time.monotonic()
            _mutate(folder, kind, pristine[kind.name], seed, number, look, result)
            result.counts["mutations"] += 1
            result.slowest = max(result.slowest, time.monotonic() - begun)
            if progress is not None:
                progress(result)
    return result


def _pristine(folder: Path, kind: Kind, look: Probe) -> Pristine:
    """Make the undamaged directory and check it."""
    build(kind, folder / "pristine")
    files = files_of(folder / "pristine")
    logs = sorted(name for name in files if name.startswith("log/"))
    lines = files[logs[0]].splitlines(keepends=True) if logs else []

    @cache
    def state(count: int) -> Report:
        path = folder / "place"
        shutil.copytree(folder / "pristine", path)
        if logs:
            (path / logs[0]).write_bytes(b"".join(lines[:count]))
            for name in pins_beyond(files, count):  # a remaining pin would reveal the cut
                (path / name).unlink()
            metadata = orjson.loads(files[METADATA_NAME])
            metadata |= {"trajectory_counter": min(metadata["trajectory_counter"], next_id(files, count))}
            del metadata["crc32"]
            (path / METADATA_NAME).write_bytes(metadata_json(metadata))  # as an interrupted writer leaves it
        report = look(path, kind)
        shutil.rmtree(path)
        if report.problems or report.reported or report.strict.error:
            raise RuntimeError(f"{kind.name}, undamaged, {count} records: {report}")
        return report

    pristine = Pristine(files, state, len(lines), _homes(folder / "pristine", kind, files))
    state(0), state(len(lines))  # needed for every cut of the log
    return pristine


def _homes(path: Path, kind: Kind, files: Files) -> dict[str, frozenset[str]]:
    """Return the files of each trajectory."""
    if "trajectory_index.json" not in files:
        return {}  # united ranks renumber their trajectories
    if not kind.checksums:
        found = {name: re.fullmatch(r"trajectory_(\d+)_.*", name) for name in files}
        return {f"trajectory {match[1]}": frozenset({name}) for name, match in found.items() if match}
    catalog = Catalog.open(open_directory(path))
    ids, shards = catalog.index["trajectory_id"].tolist(), catalog.index["shard"].tolist()
    return {
        f"trajectory {number}": frozenset(file.name for file in catalog.shards.manifest(row).files)
        for number, row in zip(ids, shards, strict=True)
    }


def _mutate(folder: Path, kind: Kind, pristine: Pristine, seed: int, number: int, look: Probe, result: Result) -> None:
    chance = random.Random(f"{seed}/{kind.name}/{number}")
    case = folder / "above" / "case"
    shutil.rmtree(folder / "above", ignore_errors=True)
    case.mkdir(parents=True)
    path, canary = case / "place", folder / "canary"
    # A name with ../ would reach it.
    outside = [case / "x", folder / "above" / "x"]
    for file in outside:
        file.write_bytes(_PRECIOUS)
    shutil.copytree(folder / kind.name / "pristine", path)
    forged = chance.random() < _FORGED
    done = _damage(path, kind, pristine.files, canary, chance, forged=forged)
    stakes = weigh(kind, pristine.files, files_of(path), forged=forged)
    report = look(path, kind)
    problems = judge(kind, stakes, report, pristine)
    if canary.exists():
        problems.append("code of a pickle was run")
        canary.unlink()
    if any(not file.exists() or file.read_bytes() != _PRECIOUS for file in outside) or len(list(case.iterdir())) != 2:
        problems.append("a file outside the directory was changed")
    result.counts[f"{stakes.level.value}: {outcome(report, pristine)}"] += 1
    if problems:
        which = f"--kind {kind.name} --seed {seed} --only {number}: {done} ({stakes.level.value})"
        result.problems.append("\n    ".join([which, *problems]))


def _damage(path: Path, kind: Kind, files: Files, canary: Path, chance: random.Random, *, forged: bool) -> str:
    if not forged:
        return disturb(path, files, chance)
    folders = sorted({name.removesuffix("metadata.json") for name in files if name.endswith("metadata.json")}) or [""]
    folder = chance.choice(folders)
    below = {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}
    return forge(path / folder, below, canary, chance)

"""Freeze a writer at a request, let others take the store over, wake it, and look: the parent's side."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.witness import WitnessError
from tools.campaigns import PATIENCE, Result, at_work, s3_server, wait_for
from tools.crash.frozen.sleeper import Freeze, Writer, sleep_and_go_on
from tools.crash.journal import Promises, entries
from tools.crash.range_reader import RangeReader, read_all
from tools.proc import stat
from trajstore import TrajectoryReplayBuffer
from trajstore._core.files.holder import LOCK_NAME
from trajstore._core.files.leases import READERS_FOLDER
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog
from trajstore.errors import StoreLockedError, TrajstoreError
from trajstore.operations.verify import verify
from trajstore.points import points_at

_LAST_REQUEST = 120

_OF_POINTS = ("saving_point", "saved_point", "going_back", "went_back")

_RENEWED = (LOCK_NAME, "metadata.json")
"""What a living writer writes again by itself."""


def run_campaign(folder: Path, freezes: int, seed: int, progress: Callable[[Result], None] | None = None) -> Result:
    """Freeze a writer ``freezes`` times, each on a store of its own; return what was found.

    Args:
        folder: an empty folder for journals.
        freezes: how many writers lose their store.
        seed: of moments and actions.
        progress: told after each.
    """
    result, number = Result(), 0
    with (
        s3_server() as options,
        mock.patch.dict(os.environ, _environment(options)),
        closing(RangeReader(options, result)) as ranges,
    ):
        while result.counts["writers frozen"] < freezes:
            one = _Round(folder, options, f"{seed}/{number}", result, ranges)
            if number % 2 == 0:  # else nobody reads meanwhile, for whom evicted shards would stay
                ranges.follow(one.url)
            one.run()
            number += 1
            if progress is not None:
                progress(result)
    return result


def _environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return how commands are told of the server, which take no options."""
    keys = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    return {"AWS_ENDPOINT_URL": options["endpoint_url"], **keys}


class _Round:
    """One store, the writer that is frozen, and those that take over."""

    def __init__(self, folder: Path, options: dict[str, Any], seed: str, result: Result, ranges: RangeReader) -> None:
        import s3fs

        self.chance = random.Random(seed)
        self.seed, self.options, self.result, self.ranges = seed, options, result, ranges
        self.journal = folder / f"journal_{seed.replace('/', '_')}"
        self.filesystem = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
        self.bucket = f"bucket-{uuid.uuid4()}"
        self.filesystem.mkdir(self.bucket)
        self.url = f"s3://{self.bucket}/run"
        self.said: list[dict[str, Any]] = []
        """What those that take over noted."""
        self.where = ""
        self.points_judged = False

    def run(self) -> None:
        if self.chance.random() < 0.5:  # else the one that is frozen makes the store
            self.write(closing=True)
        freeze = Freeze(
            int(_LAST_REQUEST * self.chance.random() ** 2),
            self.chance.choice(("before", "after")),
            self.chance.choice(("stands", "runs")),
        )
        arguments = (self.url, self.options, str(self.journal), self.seed, freeze, 40)
        with at_work(sleep_and_go_on, *arguments) as child:
            if self.wait_frozen(child):
                self.take_over(child, freeze)

    def wait_frozen(self, child: BaseProcess) -> bool:
        """Return whether a writer was frozen; it may also have come to its end before."""
        if not wait_for(child, lambda: bool(self.notes("ended")) or self.is_frozen(child)) and child.is_alive():
            self.problem("the writer neither froze nor ended")
        return not self.notes("ended") and self.is_frozen(child)

    def is_frozen(self, child: BaseProcess) -> bool:
        return bool(self.notes("freezing")) and child.is_alive() and stat(child.pid or 0)[:1] == ["T"]

    def take_over(self, child: BaseProcess, freeze: Freeze) -> None:
        (point,) = self.notes("freezing")
        self.where = f"{freeze}, at {point['request']} of {point['name']}"
        kind = point["name"].partition("/")[0]
        name = f"{freeze.side} {point['request']} {kind}"
        self.result.counts[f"frozen {name}"] += 1
        for _ in range(self.chance.randrange(2)):
            self.write(closing=True)
        heir = self.write(closing=self.chance.random() < 0.5)
        before, points = self.picture(heir is not None), self.points()
        os.kill(child.pid or 0, signal.SIGCONT)
        child.join(PATIENCE)
        if child.is_alive():
            self.problem("the writer did not come to its end when it was awake")
        after = self.picture(heir is not None)
        self.compare(before, after, living=heir is not None)
        if lost := points - self.points():
            self.problem(f"the saved points {sorted(lost)} are void or gone since the writer woke")
        self.judge_error()
        if heir is not None:
            self.go_on(heir, closing=True)
        self.look()
        self.result.counts["writers frozen"] += 1

    def note(self, event: str, **values: Any) -> None:
        """Take what a writer that takes over was promised."""
        self.said.append({"event": event, **values})

    def write(self, *, closing: bool) -> Writer | None:
        """Open the store as soon as it is free, use it, and return its writer unless it was closed."""
        end = time.monotonic() + PATIENCE
        writer = Writer(self.chance, self, self.chance.randrange(1 << 30, 1 << 39))
        while True:
            try:
                writer.open(self.url, self.options)
                break
            except StoreLockedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        if not self.points_judged and self.notes("freezing"):
            self.points_judged = True
            self.judge_points(writer)
        return self.go_on(writer, closing=closing)

    def judge_points(self, writer: Writer) -> None:
        """Saved points that were acknowledged must be there, and be void only if the rollback has happened."""
        steps = set(writer.steps)
        last = next((one for one in reversed(self.notes()) if one["event"] in _OF_POINTS), None)
        if last is None or last["event"] == "saving_point":
            return
        if last["event"] != "going_back":
            if absent := set(last["steps"]) - steps:
                self.problem(f"the saved points {sorted(absent)} are lost")
            return
        live = set(last["ids"]) & set(writer.ids)
        if live and live != set(last["ids"]):
            self.problem(f"half a rollback: {sorted(live)} of {last['ids']} are live")
        if live and (void := set(last["later"]) - steps):
            self.problem(f"the saved points {sorted(void)} are void, and the rollback has not happened")

    def go_on(self, writer: Writer, *, closing: bool) -> Writer | None:
        for _ in range(self.chance.randint(1, 5)):
            writer.commit()
            if what := self.chance.choice(("", "evict", "pin", "point", "annotate")):
                getattr(writer, what)()
        if not closing:
            return writer
        writer.buffer.close()
        return None

    # -- looking ----------------------------------------------------------------------------------

    def notes(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return what the frozen writer noted, of one kind or all."""
        return [line for line in entries(self.journal) if event in (None, line["event"])]

    def points(self) -> set[int]:
        return {point.step for point in points_at(self.url, **self.options).saved}

    def picture(self, living: bool) -> dict[str, str]:
        """Return the version of every object, without those that a living writer renews, and those of readers."""
        found = self.filesystem.find(f"{self.bucket}/run", detail=True)
        names = {path.partition("/run/")[2]: item["ETag"] for path, item in found.items()}
        of_others = (*_RENEWED * living, READERS_FOLDER)
        return {name: version for name, version in names.items() if name.partition("/")[0] not in of_others}

    def compare(self, before: dict[str, str], after: dict[str, str], *, living: bool) -> None:
        for name, version in before.items():
            if name not in after:
                if living and name.startswith("shards/"):
                    continue  # it may have been evicted; verify names those that are needed
                self.problem(f"{name} was removed")
            elif after[name] != version:
                self.problem(f"{name} was overwritten")
        for name in after.keys() - before.keys():
            if not name.startswith(("shards/", "log/", "pins/")):  # one that it was sending, under a new name
                self.problem(f"{name} appeared")

    def judge_error(self) -> None:
        errors = self.notes("error")
        if len(errors) != 1:
            closed = "closed" if self.notes("closed") else "not closed"
            self.problem(f"{len(errors)} errors in place of one ({closed})")
            return
        (error,) = errors
        if error["kind"] == "StoreLockedError" and not self.notes("opened"):
            return  # it had not got the store yet
        self.result.counts["told that they lost the store"] += error["kind"] == "WriterFencedError"
        if error["kind"] != "WriterFencedError" or "was taken over" not in error["text"]:
            self.problem(f"{error['kind']}: {error['text']}")

    def look(self) -> None:
        """Everything that any writer was promised must be there, and nothing be damaged."""
        promises = Promises()
        for entry in (*self.notes(), *self.said):
            promises.take(entry["event"], entry)
        promised, evicted = promises.flushed, promises.evicted
        try:
            report = verify(self.url)
            for problem in report.problems:
                self.problem(f"verify: {problem}")
            with TrajectoryReplayBuffer(sample_window_size=0, storage_options=self.options) as reader:
                reader.load_checkpoint(self.url)
                seen = read_all(reader)
            by_ranges, troubles = self.ranges.look(self.url)
            catalog = Catalog.open(open_directory(self.url, **self.options))
        except (TrajstoreError, WitnessError, OSError) as error:
            self.problem(f"{type(error).__name__}: {error}")
            return
        for trouble in troubles:
            self.problem(trouble)
        if differing := [number for number in seen if by_ranges.get(number) != seen[number]]:
            self.problem(f"the trajectories {differing} are others by ranges, or absent")
        if len(by_ranges) > len(seen):
            self.problem(f"by ranges there are {len(by_ranges)} trajectories, else {len(seen)}")
        present = {number: one.key for number, one in seen.items()}
        for number, key in promised.items():
            if number in present and present[number] != key:
                self.problem(f"trajectory {number} is another one")
            elif number not in present and number not in evicted:
                self.problem(f"trajectory {number} was acknowledged and is lost")
        self.result.counts["trajectories compared"] += len(promised)
        given = self.values_given()
        for number in present:
            history = [note for note in catalog.notes.history(number) if note.name == "v"]
            values = [note.value for note in history]
            acknowledged = {float(entry["value"]) for entry in given if number in entry["ids"]}
            if len(set(values)) < len(values) or not acknowledged <= set(values):
                self.problem(f"trajectory {number} was given {acknowledged}, and {values} are told")
            latest = [note.value for note in history][-1:]
            found = list(seen[number].late.values())
            if found != [[value] for value in latest]:
                self.problem(f"trajectory {number} has the rows {found}, but {latest} came with them")
        self.result.counts["calls that gave values"] += len(given)

    def values_given(self) -> list[dict[str, Any]]:
        """Return the calls whose values must be there; going back to a point takes later ones away."""
        given: list[dict[str, Any]] = []
        at_point: dict[int, int] = {}
        for entry in (*self.notes(), *self.said):
            if entry["event"] == "annotated":
                given.append(entry)
            elif entry["event"] == "saved_point":
                at_point[max(entry["steps"])] = len(given)
            elif entry["event"] == "going_back":  # it may have happened, also where it was interrupted
                given = given[: at_point[entry["step"]]]
        return given

    def problem(self, text: str) -> None:
        self.result.problems.append(f"round {self.seed} ({self.where}): {text}")

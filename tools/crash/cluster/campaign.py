"""Faults of nodes of a run on Ray, while clients add, judge and draw, and the run is saved and rolled back."""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.witness import WitnessError, check_trajectory
from tools.campaigns import Result
from tools.crash.cluster.clients import CLIENTS, DEADLINE, NAME, PATIENCE, STOP, Notes, acknowledged, notes_of, value_of
from tools.crash.cluster.network import ADDRESS, ENVIRONMENT, HEAD, Node, machines
from tools.crash.cluster.timeline import Rollback, Span, presence
from trajstore import TrajectoryReplayBuffer
from trajstore.distributed import DistributedReplayBuffer
from trajstore.distributed.server import MOST_STORES
from trajstore.errors import StoreUnreachableError, TrajstoreError
from trajstore.operations.verify import verify

_NODES = 3
_SLACK = 5.0
"""Seconds that a call may take beyond the deadline."""
_RESOURCES = {"num_cpus": 0.1, "resources": {"disk": 1}}
_ROLLBACKS = 5
_LONGEST_START = 300.0  # seconds


def run(
    folder: Path, seconds: float, producers: int, judges: int, seed: int, progress: Callable[[Result], None]
) -> Result:
    """Run a campaign in an empty folder.

    Raises:
        OSError: see :func:`machines`.
        StoreUnreachableError: the stores do not start, or do not come back at the end.
    """
    os.environ |= ENVIRONMENT  # Ray reads it when it is imported
    import ray

    result = Result()
    with machines(folder, _NODES) as nodes:
        try:
            _connect(nodes)
            _work(
                folder, nodes, seconds, {"producer": producers, "judge": judges, "learner": 1}, seed, result, progress
            )
        finally:
            ray.shutdown()
    _judge(folder, result)
    return result


def _connect(nodes: Sequence[Node]) -> None:
    """Wait until all nodes have joined; start those again that a busy machine kept from it."""
    import ray

    end = time.monotonic() + _LONGEST_START
    while time.monotonic() < end:
        with suppress(ConnectionError, RuntimeError, ValueError):
            ray.init(ADDRESS, _node_ip_address=HEAD, log_to_driver=False, logging_level=logging.ERROR)
            while time.monotonic() < end:
                for node in nodes:
                    if not node.runs:
                        node.kill()
                        node.start()
                known = ray.nodes()  # type: ignore[no-untyped-call]
                if sum("disk" in node["Resources"] for node in known if node["Alive"]) == len(nodes):
                    return
                time.sleep(1)
        time.sleep(1)
    raise StoreUnreachableError(f"the nodes have not joined within {_LONGEST_START:.0f} s")


def _create(folder: Path) -> DistributedReplayBuffer:
    options: dict[str, Any] = {"patience": PATIENCE, "deadline": DEADLINE}
    return DistributedReplayBuffer.create(NAME, folder / "run", stores="per_node", actor_options=_RESOURCES, **options)


def _work(
    folder: Path,
    nodes: Sequence[Node],
    seconds: float,
    clients: dict[str, int],
    seed: int,
    result: Result,
    progress: Callable[[Result], None],
) -> None:
    import ray

    chance, notes = random.Random(seed), Notes(folder / "owner-0.notes")
    handle, mend = _create(folder), partial(_mend, nodes, folder)
    works = [
        ray.remote(max_retries=0, num_cpus=0, resources={"client": 1})(CLIENTS[kind]).remote(number, folder)
        for kind, count in clients.items()
        for number in range(count)
    ]
    end, turn = time.monotonic() + seconds, seconds / _ROLLBACKS
    back, saved = time.monotonic() + 0.8 * turn, list[tuple[int, Span]]()
    save = time.monotonic() + 0.3 * turn
    while time.monotonic() < end:
        _fault(chance, nodes, result, folder)
        if time.monotonic() > save:
            step = len(saved) + 1
            span = _until_done(notes, "points.save", partial(handle.points.save, step), mend)
            saved.append((step, span))
            result.counts["points saved"] += 1
            save += turn / 3
        if saved and time.monotonic() > back:
            step, span = saved[-1]
            went = _until_done(notes, "points.rollback", partial(handle.points.rollback, step), mend)
            notes.write(rollback=went, saved=span)
            result.counts["rollbacks"] += 1
            saved = [one for one in saved if one[0] <= step]
            back += turn
        result.counts["trajectories acknowledged"] = sum(
            len(note.get("ids", ())) for note in notes_of(folder, "producer-*")
        )
        progress(result)
    _mend(nodes, folder)
    (folder / STOP).touch()
    for work in works:
        try:
            ray.get(work, timeout=10 * DEADLINE)
        except ray.exceptions.RayError as error:
            result.problems.append(f"a client ended: {error}")
    handle.stop()


def _until_done(notes: Notes, kind: str, call: Callable[[], object], mend: Callable[[], None]) -> Span:
    """Repeat a call of all stores until it succeeds; return the time from its first beginning."""
    begin = time.monotonic()
    while True:
        span, _ = notes.timed(kind, call)
        if span.end < math.inf:
            return Span(begin, span.end)
        time.sleep(1)
        mend()


def _fault(chance: random.Random, nodes: Sequence[Node], result: Result, folder: Path) -> None:
    """Do something to a node, or to a store's actor, and end it; each lasts up to five times the patience."""
    import ray

    time.sleep(chance.uniform(2.0, 10.0))
    node, lasting = chance.choice(nodes), chance.uniform(0.5, 5 * PATIENCE)
    match chance.choices(["actor", "frozen", "cut", "node"], [4, 3, 3, 1])[0]:
        case "actor":
            with suppress(ValueError):  # it has none just now
                actor = ray.get_actor(f"{NAME}/rank_{chance.randrange(len(nodes))}", namespace="trajstore")
                ray.kill(actor, no_restart=False)
                result.counts["actors killed"] += 1
        case "frozen":
            node.signal(signal.SIGSTOP)
            time.sleep(lasting)
            node.signal(signal.SIGCONT)
            result.counts["nodes frozen"] += 1
        case "cut":
            node.link("down")
            time.sleep(lasting)
            node.link("up")
            result.counts["nodes cut"] += 1
        case _:
            node.kill()
            time.sleep(lasting)
            result.counts["nodes killed"] += 1
    _mend(nodes, folder)


def _mend(nodes: Sequence[Node], folder: Path) -> None:
    """Start nodes again that have ended, and stores that are lost."""
    import ray

    for node in nodes:
        if not node.runs:
            node.kill()  # what is left of it
            node.start()
    end = time.monotonic() + 2 * DEADLINE
    while time.monotonic() < end:
        try:
            for rank in range(len(nodes)):
                ray.get_actor(f"{NAME}/rank_{rank}", namespace="trajstore")
            return
        except ValueError:  # it has none, as after the end of its node, of which Ray may not know yet
            time.sleep(2)
            with suppress(TrajstoreError):
                _create(folder).close()


def _judge(folder: Path, result: Result) -> None:
    """Compare what is on the disks with what the clients were told."""
    whole = folder / "whole"
    whole.mkdir()
    for part in sorted(folder.glob("disk_*/rank_*")):
        result.problems += [f"{part.name}: {problem}" for problem in verify(part).problems]
        shutil.move(part, whole / part.name)
    backs = [
        Rollback(Span(*note["rollback"]), Span(*note["saved"]))
        for note in notes_of(folder, "owner-0")
        if "rollback" in note
    ]
    end = Span(time.monotonic(), time.monotonic())
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.load_checkpoint(whole)
        shown: dict[int, dict[str, Any]] = {}
        for row in buffer.query().rows():
            number = row["trajectory_id"]
            try:
                key = check_trajectory(buffer.get(number))
            except WitnessError as error:
                result.problems.append(f"trajectory {number}: {error}")
                continue
            if key in shown:
                result.problems.append(f"key {key} is stored twice, as {shown[key]['trajectory_id']} and {number}")
            shown[key] = row
    result.counts["stored"] = len(shown)
    added = {
        key: Span(note["begin"], note["end"])
        for note in notes_of(folder, "producer-*")
        if "ids" in note
        for key in note["keys"]
    }
    begun = {
        key: Span(note["begin"], math.inf) for note in notes_of(folder, "producer-*") for key in note.get("begun", ())
    }
    _compare("key", shown, begun | added, end, backs, result)
    for judge in range(sum(1 for _ in folder.glob("judge-*.notes"))):
        name, client = f"score_{judge}", f"judge-{judge}"
        given = {key: row[name] for key, row in shown.items() if row.get(name) is not None}
        result.problems += [
            f"{name} of {one} is {value}" for one, value in given.items() if value != value_of(one, judge)
        ]
        tried = {
            one: Span(note["begin"], math.inf) for note in notes_of(folder, client) for one in note.get("begun", ())
        }
        told = {
            one: Span(note["begin"], note["end"]) for note in notes_of(folder, client) for one in note.get("told", ())
        }
        _compare(
            f"{name} of", given, {one: span for one, span in (tried | told).items() if one in shown}, end, backs, result
        )
        result.counts["late values acknowledged"] += len(told)
    _clients(folder, added, backs, result)


def _compare(
    what: str, there: dict[int, Any], changes: dict[int, Span], end: Span, backs: Sequence[Rollback], result: Result
) -> None:
    for one in there.keys() - changes.keys():
        result.problems.append(f"{what} {one} is there, but was never added")
    for one, change in changes.items():
        wanted = presence(change, end, backs)
        if wanted == "must" and one not in there:
            result.problems.append(f"{what} {one} was acknowledged, and is lost")
        if wanted == "not" and one in there:
            result.problems.append(f"{what} {one} is there, although the run was rolled back to a point before it")
    result.counts[f"{what.split()[0]}s compared".replace("score_", "values of judge ")] += len(changes)


def _clients(folder: Path, added: dict[int, Span], backs: Sequence[Rollback], result: Result) -> None:
    """Look at what the clients saw, and how long they waited."""
    known = acknowledged(folder)
    longest: dict[str, float] = defaultdict(float)
    for note in notes_of(folder, "*"):
        if "problem" in note:
            result.problems.append(note["problem"])
        if "call" in note:
            longest[note["call"]] = max(longest[note["call"]], note["seconds"])
            result.counts[f"errors of {note['call']}"] += "error" in note
        if "looked" in note:
            look = Span(note["begin"], note["end"])
            overlapped = any(back.call.begin <= look.end and look.begin <= back.call.end for back in backs)
            for key in [] if overlapped else note["lacking"]:
                if known[key][0] % MOST_STORES not in note["absent"] and presence(added[key], look, backs) == "must":
                    result.problems.append(f"key {key} was acknowledged, and not shown after a refresh")
            result.counts["looks for acknowledged trajectories"] += 1
        result.counts["batches drawn"] += "drawn" in note
    for call, taken in sorted(longest.items()):
        result.counts[f"ms took the longest {call}"] = round(1e3 * taken)
        if taken > DEADLINE + _SLACK:
            result.problems.append(f"{call} took {taken:.0f} s, and the deadline is {DEADLINE:.0f}")

"""Kills processes that record sessions at random moments, and compares what is there with what was acknowledged."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import orjson

from tools.campaigns import Result, start, wait_for
from tools.crash.calls.child import checksum, work
from trajstore import Retention, Sessions, TrajectoryReplayBuffer
from trajstore._core.sessions.tree import Call

PROCESSES = 4


def run_campaign(folder: Path, kills: int, seed: int, progress: Callable[[Result], None] | None = None) -> Result:
    """Kill one of the processes after the other.

    Args:
        folder: for the store and the notes.
        kills: how often.
        seed: of calls and moments.
        progress: called after each kill.
    """
    result, chance = Result(), random.Random(seed)
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "store").close()
    begun = [0] * PROCESSES
    children = [start(work, str(folder), slot, 0, seed) for slot in range(PROCESSES)]
    try:
        while result.counts["kills"] < kills and not result.problems:
            slot = chance.randrange(PROCESSES)
            notes = folder / f"notes_{slot}_{begun[slot]:06d}"
            if not wait_for(children[slot], notes.exists):
                result.problems.append(f"process {slot}, attempt {begun[slot]}: ended with {children[slot].exitcode}")
                break
            time.sleep(chance.random() * 0.3)
            victims = range(PROCESSES) if chance.random() < 0.1 else [slot]
            for victim in victims:
                children[victim].kill()
            for victim in victims:
                children[victim].join()
                begun[victim] += 1
                children[victim] = start(work, str(folder), victim, begun[victim], seed)
            result.counts["kills"] += len(victims)
            if progress is not None:
                progress(result)
    finally:
        for child in children:
            child.kill()
            child.join()
    _compare(folder, result)
    return result


def _compare(folder: Path, result: Result) -> None:
    """Compare the sessions in store and journals with the acknowledged calls."""
    calls: dict[str, dict[str, int]] = defaultdict(dict)
    finished: set[str] = set()
    finishing: set[str] = set()
    for file in sorted(folder.glob("notes_*")):
        for line in file.read_bytes().split(b"\n")[:-1]:
            note = orjson.loads(line)
            name = note.get("session")
            if note["event"] == "opened" and (lost := calls[name].items() - note["calls"].items()):
                result.problems.append(f"{file.name}: session {name} was opened without the calls {sorted(lost)}")
            elif note["event"] == "call":
                calls[name][note["id"]] = note["checksum"]
            elif note["event"] in ("finishing", "finished"):
                (finishing if note["event"] == "finishing" else finished).add(name)
    problems, rows, left = compare(folder / "store", calls, finished, finishing)
    result.problems += problems
    result.counts["acknowledged calls"] = sum(map(len, calls.values()))
    result.counts["finished sessions"] = len(finished)
    result.counts["rows"] = rows
    result.counts["open sessions at the end"] = left
    limit = Retention(abandoned_after=0.0)
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "store", retention=limit).close()
    if journals := [*(folder / "store" / "calls").glob("*.calls")]:
        result.problems.append(f"{len(journals)} journals are left, but no session is")


def compare(
    store: Path, calls: Mapping[str, Mapping[str, int]], finished: Collection[str], finishing: Collection[str]
) -> tuple[list[str], int, int]:
    """Compare the sessions of a store that nobody uses with what was acknowledged.

    Args:
        store: its directory.
        calls: checksums of acknowledged calls, by id, by the rollout id of their session.
        finished: sessions that were finished.
        finishing: these, and those whose end had begun.

    Returns:
        What is wrong, the number of rollouts, and that of open sessions.
    """
    problems: list[str] = []
    rows: dict[str, list[dict[str, object]]] = defaultdict(list)
    trained: dict[str, Counter[str]] = defaultdict(Counter)
    there: dict[str, dict[str, int]] = defaultdict(dict)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, sample_window_size=0) as buffer:
        for number in buffer.trajectory_ids.tolist():
            row = buffer.get(number)
            about, mask = row.metadata["session"], row.loss_mask
            rows[row.rollout_id].append(about)
            for call in about["calls"]:
                start_at, stop = call["start"], call["stop"]
                trained[row.rollout_id][call["id"]] += int(stop > start_at and mask[start_at])
                probs = row.rollout_log_probs[start_at - row.response_start : stop - row.response_start]
                whole = Call(
                    number=0, id="", start=start_at, added=row.input_ids[:stop].int().numpy(), log_probs=probs.numpy()
                )
                there[row.rollout_id][call["id"]] = checksum(whole)
    left = 0
    with Sessions(store) as sessions:
        for info in sessions.listed():
            left += 1
            there[info.rollout_id] |= {call.id: checksum(call) for call in sessions.read("task", info.rollout_id)}
            if info.state == "finished" or info.rollout_id in rows:
                problems.append(f"session {info.rollout_id}: is {info.state} and has {len(rows[info.rollout_id])} rows")
    for name, acknowledged in calls.items():
        if lost := acknowledged.items() - there[name].items():
            problems.append(f"session {name}: {len(lost)} acknowledged calls are lost or differ: {sorted(lost)[:3]}")
        for call_id, count in trained[name].items():
            if count > 1:
                problems.append(f"session {name}: call {call_id} is trained {count} times")
        paths = sorted((str(about["id"]), int(str(about["path"]))) for about in rows[name])
        if paths and paths != [(paths[0][0], path) for path in range(int(str(rows[name][0]["paths"])))]:
            problems.append(f"session {name}: has the rows {paths}")
        if name in finished and not paths:
            problems.append(f"session {name}: was finished and has no rows")
        if paths and name not in finishing:
            problems.append(f"session {name}: has rows and was not finished")
    return problems, sum(map(len, rows.values())), left

"""T32: a model call of an agent until it is durable, and calls a second, against the stores of two gateways.

64 sessions at once, 30 calls each: 1,200 tokens of system and task, 150 sampled and 350 observed a call. Each session
adds its calls one after another: here in a thread, in the gateways' stores as a task of their event loops. Tokens are
lists, as engines answer, and arrays where this is said. With ``rllm_model_gateway`` and ``nemo_gym`` on the path these
are their own stores, else code that does the same to the disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.timing import Times, percentile, seconds
from tools.bench.workloads import opened

_FIRST, _SAMPLED, _OBSERVED, _CALLS = 1_200, 150, 350, 30

Call = tuple[str, str, list[int], list[int], list[float]]
"""Ids of session and call, prompt, sampled tokens, log-probs."""


def figures(options: Options) -> Iterator[Figure]:
    """Yield the times of a call with 64 sessions at once, rates over those of the gateways' stores, and one alone."""
    sessions = [list(_calls(f"{number}", options.count(_CALLS, 2))) for number in range(options.count(64, 2))]
    count = sum(map(len, sessions))
    names = {"rLLM's SQLite store": _sqlite, "NeMo Gym's file store": _files}
    rates: dict[str, list[float]] = {"": []} | {name: [] for name in names}
    times: list[float] = []
    for turn in range(max(1, options.repeats // 2)):
        folder = options.folder / f"{turn}"
        folder.mkdir()
        times, took = _ours(folder / "store", sessions)
        rates[""].append(count / took)
        for name, store in names.items():
            put, about = store(folder)
            rates[name].append(count / seconds(lambda put=put: asyncio.run(_at_once(put, sessions))))  # type: ignore[misc]
            names[name] = store
            rates.setdefault(f"{name}: what", [])[:] = [about]  # type: ignore[list-item]
    rate = sorted(rates[""])[len(rates[""]) // 2]
    yield Figure("T32", "a call until durable, 64 sessions at once, p50", 1e3 * percentile(times, 0.5), 20, "ms")
    yield Figure(
        "T32",
        "the same, p99",
        1e3 * percentile(times, 0.99),
        100,
        "ms",
        details={"calls": count, "calls_per_s": rate},
    )
    for name in names:
        theirs = sorted(rates[name])[len(rates[name]) // 2]
        details = {"theirs_per_s": theirs, "what": rates[f"{name}: what"][0]}
        yield Figure("T32", f"calls a second over {name}", rate / theirs, 5, at_least=True, details=details)
    yield from _alone(options)


def _calls(session: str, count: int) -> Iterator[Call]:
    chance = Random(session)

    def tokens(number: int) -> list[int]:
        return [chance.randrange(151_000) for _ in range(number)]

    history = tokens(_FIRST)
    for call in range(count):
        sampled = tokens(_SAMPLED)
        yield session, f"{session}-{call}", history, sampled, [-chance.randrange(1, 1 << 20) / 65536 for _ in sampled]
        history = [*history, *sampled, *tokens(_OBSERVED)]


def _ours(path: Path, sessions: list[list[Call]]) -> tuple[list[float], float]:
    """Return the seconds of each call, and of all."""
    times: list[float] = []
    with opened(path) as buffer, ThreadPoolExecutor(len(sessions)) as pool:
        opening = [buffer.session("task", f"{number}") for number in range(len(sessions))]
        begin = threading.Barrier(len(sessions) + 1)

        def run(number: int) -> None:
            begin.wait()
            for _, call_id, prompt, sampled, log_probs in sessions[number]:
                start = time.perf_counter()
                opening[number].add_call(prompt, sampled, log_probs, call_id=call_id)
                times.append(time.perf_counter() - start)

        running = [pool.submit(run, number) for number in range(len(sessions))]
        begin.wait()
        took = seconds(lambda: [job.result() for job in running])
    return times, took


async def _at_once(put: Callable[[Call], Awaitable[None]], sessions: list[list[Call]]) -> None:
    async def run(calls: list[Call]) -> None:
        for call in calls:
            await put(call)

    await asyncio.gather(*map(run, sessions))


def _sqlite(folder: Path) -> tuple[Callable[[Call], Awaitable[None]], str]:
    """Return how rLLM's gateway stores a trace, and what does it: a row without ``fsync``."""

    def document(call: Call) -> dict[str, Any]:
        session, trace, prompt, sampled, log_probs = call
        return {
            **{"trace_id": trace, "session_id": session, "prompt_token_ids": prompt},
            **{"completion_token_ids": sampled, "logprobs": log_probs},
        }

    try:
        from rllm_model_gateway.store.sqlite_store import SqliteTraceStore
    except ImportError:
        database = sqlite3.connect(folder / "traces.db", check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("CREATE TABLE traces (id TEXT PRIMARY KEY, session TEXT, data TEXT)")

        async def insert(call: Call) -> None:
            def work() -> None:
                database.execute("INSERT INTO traces VALUES (?, ?, ?)", (call[1], call[0], text))
                database.commit()

            text = json.dumps(document(call))
            await asyncio.get_running_loop().run_in_executor(worker, work)

        worker = ThreadPoolExecutor(1)
        return insert, "stand-in"
    store = SqliteTraceStore(str(folder / "traces.db"))
    return lambda call: store.store_trace(call[1], call[0], document(call)), "rllm_model_gateway"


def _files(folder: Path) -> tuple[Callable[[Call], Awaitable[None]], str]:
    """Return how NeMo Gym stores an entry, and what does it: a line of a rollout's file, with ``fsync``."""
    names = ("rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    try:
        from nemo_gym.token_id_capture import TokenCaptureStore, TokenEntry
    except ImportError:

        def append(call: Call) -> None:
            with (folder / f"{call[0]}.jsonl").open("ab") as file:
                file.write(json.dumps(dict(zip(names, call, strict=True))).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

        return lambda call: asyncio.to_thread(append, call), "stand-in"
    store = TokenCaptureStore(folder / "tokens")
    return lambda call: store.put(TokenEntry(**dict(zip(names, call, strict=True)))), "nemo_gym"


def _alone(options: Options) -> Iterator[Figure]:
    """Yield the time of a call of one session over that of an append of as many bytes with ``fsync``, in turn."""
    times = {"arrays": Times(3), "lists": Times(3), "append": Times(3)}
    path = options.folder / "alone"
    nbytes = 2_200
    with opened(path) as buffer, (options.folder / "appended").open("ab", buffering=0) as file:

        def add(kind: str, call: Call) -> None:
            values = [np.array(value) for value in call[2:]] if kind == "arrays" else call[2:]
            opening = buffer.session("task", f"{call[0]} {kind}")
            times[kind].take(lambda: opening.add_call(*values, call_id=call[1]))

        def append(content: bytes) -> None:
            times["append"].take(lambda: (file.write(content), os.fsync(file.fileno())))

        chance = Random(0)
        for call in (call for turn in range(5) for call in _calls(f"{turn}", options.count(_CALLS, 4))):
            for kind in chance.sample(list(times), len(times)):
                size = _size(path)
                add(kind, call) if kind != "append" else append(os.urandom(nbytes))
                nbytes = _size(path) - size or nbytes
    for kind in ("arrays", "lists"):
        mine = times[kind]
        details = {"ms": mine.ms, "append_ms": times["append"].ms, "bytes": nbytes, "processor_ms": mine.processor_ms}
        name = f"a call of one session alone, tokens as {kind}, over an append of as many bytes with fsync"
        yield Figure("T32", name, mine.seconds / times["append"].seconds, 1.5, details=details)


def _size(path: Path) -> int:
    return sum(journal.stat().st_size for journal in (path / "calls").glob("*.calls"))

"""T32: a model call of an agent until it is durable, and calls a second, against the stores of two gateways.

64 sessions at once, 30 calls each: 1,200 tokens of system and task, 150 sampled and 350 observed a call. Each session
adds its calls one after another: as a task of an event loop, as in the gateways, and in a thread. Tokens are lists, as
engines answer, and arrays where this is said. The gateways are those of ``rllm_model_gateway`` and ``nemo_gym`` that
are on the path; calls come through their interfaces, too. What a gateway makes of a call before it is stored is made
beforehand.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tools.bench.report import Figure, Options
from tools.bench.timing import Times, percentile, seconds
from tools.bench.workloads import opened
from trainer_hooks.integrations.nemo_gym import TokenStore
from trainer_hooks.integrations.rllm import SessionTraceStore
from trajstore._core.sessions.records import scan

_FIRST, _SAMPLED, _OBSERVED, _CALLS = 1_200, 150, 350, 30

Call = tuple[str, str, list[int], list[int], list[float]]
"""Ids of session and call, prompt, sampled tokens, log-probs."""

Put = Callable[[Any], Awaitable[None]]
"""Stores what a gateway makes of a call."""


def figures(options: Options) -> Iterator[Figure]:
    """Yield the times of a call with 64 sessions at once, rates over those of the gateways' stores, and one alone."""
    sessions = [list(_calls(f"{number}", options.count(_CALLS, 2))) for number in range(options.count(64, 2))]
    count = sum(map(len, sessions))
    gateways = [
        make() for make, package in ((_rllm, "rllm_model_gateway"), (_nemo_gym, "nemo_gym")) if find_spec(package)
    ]
    rates: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for turn in range(max(1, options.repeats // 2)):
        folder = options.folder / f"{turn}"
        folder.mkdir()
        for name, run in {"tasks": _tasks, "threads": _threads}.items():
            times[name], took = run(folder / name, sessions)
            rates.setdefault(name, []).append(count / took)
        for gateway in gateways:
            made = [[gateway.made(call) for call in calls] for calls in sessions]
            rates.setdefault(gateway.name, []).append(count / _stored(gateway.theirs(folder), made))
            with opened(folder / f"for {gateway.name}") as buffer:
                rates.setdefault(f"{gateway.name}, ours", []).append(count / _stored(gateway.ours(buffer), made))
    rate = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    for name, what in {"tasks": "", "threads": " from 64 threads"}.items():
        about = f"a call until durable, 64 sessions at once{what}"
        p50, p99 = 1e3 * percentile(times[name], 0.5), 1e3 * percentile(times[name], 0.99)
        yield Figure("T32", f"{about}, p50", p50, 20, "ms", details={"calls_per_s": rate[name]})
        yield Figure("T32", f"{about}, p99", p99, 100, "ms", details={"calls": count})
        for gateway in gateways:
            details = {"theirs_per_s": rate[gateway.name]}
            ratio = rate[name] / rate[gateway.name]
            target = 5 if name == "tasks" else None
            yield Figure(
                "T32", f"calls a second{what} over {gateway.name}", ratio, target, at_least=True, details=details
            )
    for gateway in gateways:
        ratio = rate[f"{gateway.name}, ours"] / rate[gateway.name]
        name = f"calls a second through its interface, over {gateway.name}"
        yield Figure("T32", name, ratio, None, at_least=True, details={"per_s": rate[f"{gateway.name}, ours"]})
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


def _threads(path: Path, sessions: list[list[Call]]) -> tuple[list[float], float]:
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


def _tasks(path: Path, sessions: list[list[Call]]) -> tuple[list[float], float]:
    """Return the seconds of each call, and of all."""
    times: list[float] = []
    with opened(path) as buffer:
        opening = {f"{number}": buffer.session("task", f"{number}") for number in range(len(sessions))}

        async def put(call: Call) -> None:
            session, call_id, prompt, sampled, log_probs = call
            start = time.perf_counter()
            await opening[session].add_call_async(prompt, sampled, log_probs, call_id=call_id)
            times.append(time.perf_counter() - start)

        took = _stored(put, sessions)
    return times, took


def _stored(put: Put, sessions: Sequence[Sequence[Any]]) -> float:
    """Return the seconds for the calls of all sessions, each session in a task."""

    async def run(calls: Sequence[Any]) -> None:
        for call in calls:
            await put(call)

    async def all_of_them() -> None:
        await asyncio.gather(*map(run, sessions))

    return seconds(lambda: asyncio.run(all_of_them()))


@dataclass(frozen=True)
class _Gateway:
    """A gateway's store.

    Attributes:
        name: of the store.
        made: returns what the gateway makes of a call.
        theirs: returns what stores that in a folder.
        ours: returns what stores that in a buffer, through the gateway's interface.
    """

    name: str
    made: Callable[[Call], Any]
    theirs: Callable[[Path], Put]
    ours: Callable[[Any], Put]


def _rllm() -> _Gateway:
    """Return rLLM's: a row of SQLite without ``fsync``."""
    from rllm_model_gateway.store.sqlite_store import SqliteTraceStore

    def made(call: Call) -> dict[str, Any]:
        session, trace, prompt, sampled, log_probs = call
        return {
            **{"trace_id": trace, "session_id": session, "prompt_token_ids": prompt},
            **{"completion_token_ids": sampled, "logprobs": log_probs},
        }

    def put_in(store: Any) -> Put:
        return lambda trace: store.store_trace(trace["trace_id"], trace["session_id"], trace)

    return _Gateway(
        "rLLM's SQLite store",
        made,
        lambda folder: put_in(SqliteTraceStore(str(folder / "traces.db"))),
        lambda buffer: put_in(SessionTraceStore(buffer)),
    )


def _nemo_gym() -> _Gateway:
    """Return NeMo Gym's: a line of a rollout's file, with ``fsync``."""
    from nemo_gym.token_id_capture import TokenCaptureStore, TokenEntry

    fields = ("rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return _Gateway(
        "NeMo Gym's file store",
        lambda call: TokenEntry(**dict(zip(fields, call, strict=True))),
        lambda folder: TokenCaptureStore(folder / "tokens").put,
        lambda buffer: TokenStore(buffer).put,
    )


def _alone(options: Options) -> Iterator[Figure]:
    """Yield the time of a call of one session over that of an append of as many bytes with ``fsync``, in turn."""
    times = {"arrays": Times(3), "lists": Times(3), "append": Times(3)}
    path = options.folder / "alone"
    nbytes = 2_200
    with opened(path) as buffer, (options.folder / "appended").open("ab", buffering=0) as file:

        def add(kind: str, call: Call) -> None:
            values = [(np.array if kind == "arrays" else list)(value) for value in call[2:]]  # as just received
            opening = buffer.session("task", f"{call[0]} {kind}")
            times[kind].take(lambda: opening.add_call(*values, call_id=call[1]))

        def write(content: bytes) -> None:
            file.write(content)
            os.fsync(file.fileno())

        def append(content: bytes) -> None:
            times["append"].take(partial(write, content))

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
    return sum(scan(journal.read_bytes())[1] for journal in (path / "calls").glob("*.calls"))

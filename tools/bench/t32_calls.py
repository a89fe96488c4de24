"""T32: a model call of an agent until it is durable, and calls a second, against the stores of two gateways.

64 sessions at once, 30 calls each: 1,200 tokens of system and task, 150 sampled and 350 observed a call. Each session
adds its calls one after another, as a task of an event loop, as in the gateways. Tokens are lists, as engines answer.
The gateways are those of ``rllm_model_gateway`` and ``nemo_gym`` that are on the path. What a gateway makes of a call
before it is stored is made beforehand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tools.bench.report import Figure, Options
from tools.bench.timing import percentile, seconds
from tools.bench.workloads import opened

_FIRST, _SAMPLED, _OBSERVED, _CALLS = 1_200, 150, 350, 30

Call = tuple[str, str, list[int], list[int], list[float]]
"""Ids of session and call, prompt, sampled tokens, log-probs."""

Put = Callable[[Any], Awaitable[None]]
"""Stores what a gateway makes of a call."""


def figures(options: Options) -> Iterator[Figure]:
    """Yield the times of a call with 64 sessions at once, and rates over those of the gateways' stores."""
    sessions = [list(_calls(f"{number}", options.count(_CALLS, 2))) for number in range(options.count(64, 2))]
    count = sum(map(len, sessions))
    gateways = [
        make() for make, package in ((_rllm, "rllm_model_gateway"), (_nemo_gym, "nemo_gym")) if find_spec(package)
    ]
    rates: dict[str, list[float]] = {}
    for turn in range(max(1, options.repeats // 2)):
        folder = options.folder / f"{turn}"
        folder.mkdir()
        times, took = _ours(folder / "ours", sessions)
        rates.setdefault("ours", []).append(count / took)
        for gateway in gateways:
            made = [[gateway.made(call) for call in calls] for calls in sessions]
            rates.setdefault(gateway.name, []).append(count / _stored(gateway.put_in(folder), made))
    rate = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    p50, p99 = 1e3 * percentile(times, 0.5), 1e3 * percentile(times, 0.99)
    name = "a call until durable, 64 sessions at once"
    yield Figure("T32", f"{name}, p50", p50, 20, "ms", details={"calls_per_s": rate["ours"]})
    yield Figure("T32", f"{name}, p99", p99, 100, "ms", details={"calls": count})
    for gateway in gateways:
        details = {"theirs_per_s": rate[gateway.name]}
        ratio = rate["ours"] / rate[gateway.name]
        yield Figure("T32", f"calls a second over {gateway.name}", ratio, 5, at_least=True, details=details)


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
        put_in: returns what stores that in a folder.
    """

    name: str
    made: Callable[[Call], Any]
    put_in: Callable[[Path], Put]


def _rllm() -> _Gateway:
    """Return rLLM's: a row of SQLite without ``fsync``."""
    from rllm_model_gateway.store.sqlite_store import SqliteTraceStore

    def made(call: Call) -> dict[str, Any]:
        session, trace, prompt, sampled, log_probs = call
        return {
            **{"trace_id": trace, "session_id": session, "prompt_token_ids": prompt},
            **{"completion_token_ids": sampled, "logprobs": log_probs},
        }

    def put_in(folder: Path) -> Put:
        store = SqliteTraceStore(str(folder / "traces.db"))
        return lambda trace: store.store_trace(trace["trace_id"], trace["session_id"], trace)

    return _Gateway("rLLM's SQLite store", made, put_in)


def _nemo_gym() -> _Gateway:
    """Return NeMo Gym's: a line of a rollout's file, with ``fsync``."""
    from nemo_gym.token_id_capture import TokenCaptureStore, TokenEntry

    fields = ("rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return _Gateway(
        "NeMo Gym's file store",
        lambda call: TokenEntry(**dict(zip(fields, call, strict=True))),
        lambda folder: TokenCaptureStore(folder / "tokens").put,
    )

"""Stores of gateways on sessions. The records of NeMo Gym are small fakes, as its package needs Ray and MLflow."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.pages import blocks, section
from tests.support.engine import engine, tokens_of
from trainer_hooks.integrations import nemo_gym
from trainer_hooks.integrations.gateway import task_of
from trainer_hooks.integrations.nemo_gym import TokenStore
from trainer_hooks.integrations.rllm import SessionTraceStore
from trajstore import Reward, TrajectoryReplayBuffer
from trajstore.errors import CallConflictError, InvalidCallError, StoreClosedError, StoreLockedError


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[TrajectoryReplayBuffer]:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as made:
        yield made


def test_a_task_is_found_in_the_ids_of_gateways() -> None:
    ids = {"7-3-a2": "7", "gsm8k-17-0": "gsm8k-17", "alone": "alone", "-3": "-3", "a\n-1": "a\n"}
    assert {rollout_id: task_of(rollout_id) for rollout_id in ids} == ids


# -- rLLM ---------------------------------------------------------------------------------------------


def made_trace(number: int, history: list[int], messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a trace as rLLM's gateway dumps it, with its raw request and response."""
    sampled, log_probs = [100 + number, 200 + number], [-0.5, -0.125]
    answer = {"role": "assistant", "content": f"a{number}"}
    return {
        "trace_id": f"t{number}",
        "session_id": "s",
        "model": "m",
        "messages": messages,
        "prompt_token_ids": history,
        "response_message": answer,
        "completion_token_ids": sampled,
        "logprobs": log_probs,
        "routing_matrices": None,
        "finish_reason": "stop",
        "weight_version": number,
        "raw_request": {"messages": messages, "temperature": 1.0},
        "raw_response": {"prompt_token_ids": history, "choices": [{"token_ids": sampled, "message": answer}]},
        **more,
    }


def made_session(calls: int) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    history, messages = list(range(300)), [{"role": "user", "content": "?" * 900}]
    for number in range(calls):
        traces.append(made_trace(number, list(history), list(messages)))
        history += [*traces[-1]["completion_token_ids"], 7]
        messages += [traces[-1]["response_message"], {"role": "tool", "content": f"{number}"}]
    return traces


def test_traces_come_back_and_only_what_they_add_is_stored(buffer: TrajectoryReplayBuffer, tmp_path: Path) -> None:
    traces = made_session(12)

    async def run() -> None:
        store = SessionTraceStore(tmp_path / "store")
        for trace in traces:
            for _ in range(2):
                await store.store_trace(trace["trace_id"], "u:1", trace)
        assert await store.get_session_traces("u:1") == traces
        assert await store.get_session_traces("u:1", limit=3) == traces[:3]
        assert await store.get_session_traces("u:1", since=4e9) == []
        assert (await store.get_trace("t3"), await store.get_trace("absent")) == (traces[3], None)
        with pytest.raises(CallConflictError):
            await store.store_trace("t3", "u:1", traces[3] | {"completion_token_ids": [1, 2]})
        (about,) = await store.list_sessions()
        assert (about["session_id"], about["trace_count"]) == ("u:1", 12)
        assert about["first_trace_at"] <= about["last_trace_at"]
        assert (await store.list_sessions(since=4e9), await store.list_sessions(limit=0)) == ([], [])
        leaving = asyncio.ensure_future(store.store_trace("left", "u:2", made_trace(1, [1, 2], [])))
        await asyncio.sleep(0)
        leaving.cancel()  # as when the gateway's client goes away
        await store.flush()
        assert await store.get_trace("left") is not None
        assert await store.delete_session("u:2") == 1
        await store.close()
        again = SessionTraceStore(tmp_path / "store")  # after a restart
        assert await again.get_trace("t11") == traces[11]
        again.finish("u:1", 0.5, is_terminated=True)
        await again.close()

    asyncio.run(run())
    (journal,) = (tmp_path / "store" / "calls").glob("*.calls")
    assert journal.stat().st_size < 20_000  # the traces as JSON have 60,000 bytes of tokens alone
    while not len(buffer.trajectory_ids):
        buffer.flush()
    row = buffer.get(int(buffer.trajectory_ids[0]))
    assert (row.task_id, row.rollout_id, row.reward) == ("u", "u:1", Reward(outcome=0.5))
    assert row.messages == [*traces[-1]["messages"], traces[-1]["response_message"]]
    assert int(row.loss_mask.sum()) == 24
    assert row.input_ids.tolist() == [*traces[-1]["prompt_token_ids"], *traces[-1]["completion_token_ids"]]


def test_odd_traces_are_kept_or_refused_by_name(
    buffer: TrajectoryReplayBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    store = SessionTraceStore(buffer)
    odd = [
        {},
        {"msg": "a", "n": None},
        {"prompt_token_ids": [], "completion_token_ids": [1], "logprobs": None},
        {"logprobs": [-0.1, None]},
        made_trace(0, [1], [], raw_request={"$": "prompt"}, more=[{"$": {"$": [1]}}, {"$": None, "value": [1]}]),
        made_trace(1, [1], [], logprobs=[-0.1, -0.3]),  # no float32
        made_trace(2, [1], [], response_message={}),
        made_trace(3, [1, 2], "no list"),  # type: ignore[arg-type]
    ]

    async def run() -> None:
        for number, trace in enumerate(odd):
            await store.store_trace(f"t{number}", "s", trace)
        assert await store.get_session_traces("s") == odd
        assert not caplog.messages
        for number, log_probs in enumerate([[0.5, -1.0], [-1.0]]):
            trace = made_trace(7, [5, number], [], logprobs=log_probs)
            await store.store_trace(f"w{number}", "s", trace)
            assert await store.get_trace(f"w{number}") == trace
            (said,) = caplog.messages
            assert "trace t7: logprobs: not a number of at most 0 for each of 2 tokens" in said
            caplog.clear()
        await store.store_trace("t1", "s", {"msg": "b"})
        assert await store.get_trace("t1") == {"msg": "b"}
        assert len(await store.get_session_traces("s")) == len(odd) + 2
        with pytest.raises(CallConflictError, match="is now without"):
            await store.store_trace("t4", "s", {})
        with pytest.raises(InvalidCallError, match=r"prompt_ids\[0\]: -1"):
            await store.store_trace("bad", "s", made_trace(8, [-1], []))
        assert await store.get_trace("bad") is None
        assert (await store.delete_session("s"), await store.delete_session("s")) == (len(odd) + 2, 0)
        assert await store.get_session_traces("s") == []
        storing = asyncio.create_task(store.store_trace("now", "s", {}))
        await asyncio.sleep(0)  # the task begins
        assert await store.get_session_traces("s") == [{}]  # the gateway does not wait for it either
        await storing
        assert await store.delete_session("s") == 1
        for _ in range(2):
            await store.close()
        with pytest.raises(StoreClosedError):
            await store.store_trace("t", "s", {})

    asyncio.run(run())
    assert buffer._sink.sessions.listed() == []


# -- NeMo Gym -----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Entry:
    """Fields of ``TokenEntry``."""

    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    schema_version: int = 1
    routed_experts: Any = None
    output_items: list[dict[str, Any]] = field(default_factory=list)

    def model_dump(self, mode: str, exclude: Collection[str] = ()) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in exclude}


@dataclass(frozen=True)
class Snapshot:
    """Fields of ``TokenCaptureSnapshot``."""

    rollout_id: str
    entries: tuple[Entry, ...]
    incomplete: bool
    snapshot_id: str
    version: int


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("nemo_gym.token_id_capture")
    module.TokenEntry, module.TokenCaptureSnapshot = Entry, Snapshot
    monkeypatch.setitem(sys.modules, "nemo_gym", ModuleType("nemo_gym"))
    monkeypatch.setitem(sys.modules, "nemo_gym.token_id_capture", module)


ENTRY = Entry(
    rollout_id="7-0",
    model_call_id="c",
    prompt_token_ids=[1, 2],
    generation_token_ids=[3, 4],
    generation_log_probs=[-0.1, -0.5],
    output_items=[{"type": "message", "content": "é"}],
)


@pytest.mark.usefixtures("gym")
def test_entries_of_a_rollout_are_frozen_dropped_and_finished(buffer: TrajectoryReplayBuffer) -> None:
    store = TokenStore(buffer)

    async def run() -> None:
        await store.put(ENTRY)
        await store.put(ENTRY)
        first = await store.freeze("7-0")
        assert (first.entries, first.incomplete) == ((ENTRY,), False)
        assert await store.freeze("7-0") == first
        await store.put(ENTRY)  # the same again is no late one
        with pytest.raises(RuntimeError, match="already frozen"):
            await store.put(replace(ENTRY, model_call_id="late"))
        await store.mark_incomplete("7-0", "late")
        assert not await store.drop("7-0", snapshot_id=first.snapshot_id, version=first.version)
        second = await store.freeze("7-0")
        assert second.incomplete
        for _ in range(2):
            assert await store.drop("7-0", snapshot_id=second.snapshot_id, version=second.version)
        assert store.read_entries("7-0") == []
        for late in (store.freeze("7-0"), store.put(ENTRY), store.mark_incomplete("7-0")):
            with pytest.raises(RuntimeError, match="is retired"):
                await late
        store.delete("7-0")
        await store.put(ENTRY)
        third = await store.freeze("7-0")
        (number,) = store.finish("7-0", 1.0)
        assert await store.drop("7-0", snapshot_id=third.snapshot_id, version=third.version)
        assert not await store.drop("7-0", snapshot_id=second.snapshot_id, version=second.version)
        row = buffer.get(number)
        assert (row.task_id, row.input_ids.tolist(), row.loss_mask.tolist()) == ("7", [1, 2, 3, 4], [0, 0, 1, 1])
        await store.close()

    asyncio.run(run())
    buffer.flush()
    assert buffer._sink.sessions.listed() == []


@pytest.mark.usefixtures("gym")
def test_lost_and_reused_calls_make_a_rollout_incomplete(buffer: TrajectoryReplayBuffer) -> None:
    store = TokenStore(buffer)

    async def run() -> None:
        await store.begin_call("7-0", "c")
        assert store.is_incomplete("7-0")
        await store.put(ENTRY)
        assert not store.is_incomplete("7-0")
        with pytest.raises(ValueError, match="reused with a different payload"):
            await store.put(replace(ENTRY, generation_token_ids=[8, 9]))
        assert store.is_incomplete("7-0")
        assert store.read_entries("7-0") == [ENTRY]
        for wrong in (replace(ENTRY, rollout_id=""), replace(ENTRY, model_call_id="w", generation_log_probs=[0.5, 0])):
            with pytest.raises(ValueError, match=r"rollout id: empty|log_probs\[0\]: 0.5"):
                await store.put(wrong)

    asyncio.run(run())


@pytest.mark.usefixtures("gym")
def test_a_rollout_has_one_sink_and_the_next_one_after_that_lets_go(buffer: TrajectoryReplayBuffer) -> None:
    buffer.flush()
    one, other = (TokenStore(buffer._sink.writer.directory.path) for _ in range(2))

    async def run() -> None:
        await one.put(ENTRY)
        second = replace(ENTRY, model_call_id="d", prompt_token_ids=[1, 2, 3, 4, 5])
        for late in (
            other.begin_call("7-0", "d"),
            other.put(second),
            other.freeze("7-0"),
            other.mark_incomplete("7-0"),
        ):
            with pytest.raises(StoreLockedError, match="session 7/7-0 is open in process"):
                await late
        assert other.read_entries("7-0") == [ENTRY]
        await other.put(replace(ENTRY, rollout_id="7-1"))  # others are not affected
        await one.put(ENTRY)
        await one.close()
        await other.put(second)
        found = await other.freeze("7-0")
        assert (found.entries, found.incomplete) == ((ENTRY, second), False)
        with pytest.raises(StoreClosedError):
            await one.put(second)
        await other.close()

    asyncio.run(run())


@pytest.mark.usefixtures("gym")
def test_gateways_forget_rollouts_that_are_over(
    buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo_gym, "_MOST_RETIRED", 2)
    tokens, traces = TokenStore(buffer), SessionTraceStore(buffer)

    async def run() -> None:
        for number in range(4):
            await tokens.put(replace(ENTRY, rollout_id=f"7-{number}"))
            tokens.finish(f"7-{number}", 1.0)
            await traces.store_trace(f"t{number}", f"8-{number}", made_trace(number, [1], []))
            assert (await traces.get_trace(f"t{number}"))["trace_id"] == f"t{number}"  # type: ignore[index]
            traces.finish(f"8-{number}", 1.0)
        assert list(tokens._retired) == ["7-2", "7-3"]
        tokens.delete("7-2")  # its rollouts stay, and its id can be used again
        await tokens.put(replace(ENTRY, rollout_id="7-2"))
        with pytest.raises(RuntimeError, match="is retired"):
            await tokens.put(replace(ENTRY, rollout_id="7-3"))

    asyncio.run(run())
    assert len(buffer) == 8


# -- without a gateway --------------------------------------------------------------------------------


def test_the_agent_of_the_page_runs_and_goes_on_after_it_died(
    project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    page = section((project_root / "docs" / "howto" / "sessions.md").read_text(), "Gateways and agent loops")
    (code,) = blocks(page, "python")
    program = {"__name__": "__main__"}
    asked: list[int] = []

    def answer(messages: list[dict[str, Any]]) -> str:
        asked.append(len(messages))
        if len(asked) == 6:  # the last call of the second session
            raise ValueError("out of memory")
        return "banana"[: 4 + len(messages) // 2]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with engine(answer) as address:
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        with pytest.raises(openai.BadRequestError, match="out of memory"):
            exec(compile(code, "sessions.md", "exec"), program)
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path="runs/agents") as buffer:
            session = buffer.session("count letters", "1")
            before = [call.id for call in session.calls()]
            session.finish(Reward(outcome=program["run"](session, "unused")))  # type: ignore[operator]
            assert [call.id for call in session.calls()[:2]] == before
            rows = [buffer.get(number) for number in buffer.trajectory_ids.tolist()]
    assert asked == [1, 3, 5, 1, 3, 5, 5]
    assert [row.rollout_id for row in rows] == ["0", "1"]
    for row in rows:
        assert row.reward == Reward(outcome=1.0)
        said = [message["content"] for message in row.messages if message["role"] == "assistant"]
        assert said == ["bana", "banan", "banana"]
        assert row.input_ids.tolist() == [*tokens_of(row.messages[:-1]), *b"banana", 257]
        assert bytes(row.input_ids[row.loss_mask.bool() & (row.input_ids < 256)].tolist()) == b"banabananbanana"
        sampled = row.input_ids[row.response_start :][row.response_mask.bool()]
        assert row.rollout_log_probs[row.response_mask.bool()].tolist() == (-sampled / 1024).tolist()

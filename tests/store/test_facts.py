"""Facts of rollouts agree between rollout, stored document, log, index and snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajstore import AgentTrajectory, Reward
from trajstore._core.columns.conversion import flatten, parse_document
from trajstore._core.columns.facts import facts_of, facts_to_json
from trajstore._core.columns.fields import Axis
from trajstore._core.store.facts import fact_columns, is_fact
from trajstore._core.store.index import COLUMNS, TrajectoryIndex
from trajstore._core.store.index_file import index_from_json, index_to_json
from trajstore._core.store.json_arrays import StringTable
from trajstore.errors import CorruptStoreError

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53) | st.booleans()
rollouts = st.builds(
    lambda texts, outcome, scores, messages, start, terminated, session: AgentTrajectory(
        input_ids=torch.arange(4),
        task_id=texts[0],
        data_id=texts[1],
        rollout_id=texts[2],
        reward=None if outcome is None else Reward(outcome=outcome, metadata=scores),
        messages=[{"role": role, "content": "x"} for role in messages],
        response_start=start,
        is_terminated=terminated,
        metadata={} if session is None else {"session": session},
    ),
    st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=5)] * 3),
    st.none() | st.floats(allow_nan=False, allow_infinity=False).map(np.float64) | st.integers(-3, 3),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), numbers | st.text(), max_size=3),
    st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=3),
    st.none() | st.integers(0, 4),
    st.none() | st.booleans(),
    st.sampled_from([None, "s", {"id": 3}, {"id": "a", "path": 1, "paths": 2, "calls": [{}, {}]}]),
)


@given(rollouts)
def test_a_rollout_and_its_document_tell_the_same(rollout: AgentTrajectory) -> None:
    flat = flatten(rollout)
    (document,) = (
        tensor for column, tensor in zip(flat.schema.columns, flat.tensors, strict=True) if column.axis is Axis.DOCUMENT
    )
    assert flat.facts == facts_of(parse_document(document))


def index_of(facts: list[dict[str, Any] | None]) -> TrajectoryIndex:
    """Return an index of trajectories with these facts; None stands for a step trajectory."""
    index = TrajectoryIndex()
    for at, rollout_facts in enumerate(facts):
        added_columns = fact_columns(
            [(None if rollout_facts is None else facts_to_json([rollout_facts]), 1)], index.texts
        )
        columns = {name: np.zeros(1, dtype) for name, dtype in COLUMNS.items()}
        columns["weights"][:] = index.texts.add("")
        columns["uuid"] = np.frombuffer(np.random.default_rng(at).bytes(16), "V16")
        index.append({**columns, "trajectory_id": np.array([at]), "num_samples": np.ones(1, np.int64), **added_columns})
    return index


def facts_in(index: TrajectoryIndex) -> list[dict[str, Any] | None]:
    """Return the facts in an index, one dict per rollout and None for a step trajectory."""
    rows: list[dict[str, Any] | None] = []
    for at in range(len(index)):
        values = {name: index.fact(name)[at].item() for name in index.facts}
        is_agent = values.pop("agent", 0)
        known = {name: value for name, value in values.items() if value == value and (value != -1 or "reward_" in name)}
        known |= {
            name: index.texts[known[name]] for name in ("task", "data_id", "rollout_id", "session") if name in known
        }
        rows.append(known if is_agent else None)
    return rows


@given(st.lists(st.none() | rollouts.map(lambda one: flatten(one).facts), max_size=8), st.data())
def test_an_index_keeps_them(facts: list[Any], data: st.DataObject) -> None:
    facts = [row and {**row, "outcome": abs(row.get("outcome", 0.0))} for row in facts]  # -1 means absent
    index = index_of(facts)
    assert facts_in(index) == facts
    assert facts_in(index_from_json(orjson.loads(orjson.dumps(index_to_json(index))), 1)) == facts
    gone = data.draw(st.sets(st.integers(0, max(len(facts) - 1, 0)))) if facts else set()
    index.drop(index.first + np.array(sorted(gone), np.intp))
    left = [one for at, one in enumerate(facts) if at not in gone]
    assert facts_in(index) == left
    other = index_of([{"task": "other", "reward_x": 1.0}])
    other.append(other.translated(index.take(slice(index.first, index.end)), index.texts))
    assert facts_in(other) == [{"task": "other", "reward_x": 1.0}, *left]


def test_texts_that_nobody_names_leave_and_those_of_slices_stay() -> None:
    index = TrajectoryIndex()
    for first in range(0, 60_000, 1_000):
        facts = {"rollout_id": [f"r{n}" for n in range(first, first + 1_000)]}
        columns = {name: np.zeros(1_000, dtype) for name, dtype in COLUMNS.items()}
        columns["weights"][:] = index.texts.add("w")
        columns |= {"trajectory_id": np.arange(first, first + 1_000), **fact_columns([(facts, 1_000)], index.texts)}
        index.append(columns)
        part = index.slice(0, len(index))
        index.drop_oldest(max(len(index) - 2_000, 0))
        names = part.fact("rollout_id").tolist()
        assert [part.texts[number] for number in names[:2]] == [f"r{max(first - 2_000, 0) + n}" for n in range(2)]
    assert [index.texts[number] for number in index["rollout_id"].tolist()] == [f"r{n}" for n in range(58_000, 60_000)]
    assert {index.texts[number] for number in index["weights"].tolist()} == {"w"}
    assert len(index.texts) < 15_000


@pytest.mark.parametrize(
    "facts",
    [
        {"task": ["a"]},
        {"task": ["a", 3]},
        {"task": "ab"},
        {"outcome": ["1.0", None]},
        {"outcome": [True, None]},
        {"turns": [1.5, None]},
        {"turns": [1 << 40, None]},
        {"terminated": [1, None]},
        {"reward_x": {"0": 1.0}},
    ],
)
def test_facts_of_the_wrong_kind_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        fact_columns([(facts, 2)], StringTable())


def test_facts_of_a_later_version_are_passed_over() -> None:
    columns = fact_columns([({"mood": ["good"], "agent": [0], "turns": [2]}, 1)], StringTable())
    assert {name: column.tolist() for name, column in columns.items()} == {"agent": [1], "turns": [2]}
    assert not is_fact("mood")


@pytest.mark.parametrize(("name", "value"), [("task", 7), ("terminated", 2), ("agent", -1)])
def test_damaged_facts_of_an_index_are_refused(name: str, value: int) -> None:
    index = index_of([{"task": "a", "terminated": True}])
    index._arrays[name][0] = value
    with pytest.raises(CorruptStoreError, match=name):
        index_from_json(index_to_json(index), 1)

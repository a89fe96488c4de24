"""Rollouts added as tensors, compared with the same ones added as objects."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equality import same
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer, attach, attached
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.schema import dtypes
from trajstore._core.formats import FORMATS
from trajstore.attachments import filled_rows
from trajstore.errors import CorruptStoreError, InvalidTrajectoryError
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS

_DTYPES = {
    **{"input_ids": torch.int64, "attention_mask": torch.int64, "loss_mask": torch.bool, "response_mask": torch.int64},
    **{"old_log_probs": torch.bfloat16, "rollout_log_probs": torch.float32, "entropys": torch.float32},
}
_DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "task_id": st.sampled_from(["", "a", "b"]),
        "rollout_id": st.sampled_from(["1", "2"]),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3)}), max_size=2
        ),
        "reward": st.none() | st.builds(Reward, outcome=st.floats(0, 1), metadata=st.just({"format": 0.5})),
        "policy_version": st.none() | st.integers(0, 3),
        "is_terminated": st.none() | st.booleans(),
        "metadata": st.sampled_from([{}, {"model_weights_id": "w"}]),
    },
)


def joined(rows: list[torch.Tensor], starts: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    """Return rows packed, or padded with -1 from these columns on."""
    if starts is None:
        return torch.cat([torch.empty(0, dtype=dtype), *rows])
    width = max([start + len(row) for start, row in zip(starts, rows, strict=True)], default=0)
    padded = torch.full((len(rows), width + 1), -1).to(dtype)
    for at, (start, row) in enumerate(zip(starts, rows, strict=True)):
        padded[at, start : start + len(row)] = row
    return padded


def shards_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.glob("shards/**/*") if file.is_file()}


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from(sorted(FORMATS)))
def test_tensors_of_many_rollouts_store_what_objects_do(data: st.DataObject, kind: str) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5))
    names = data.draw(st.sets(st.sampled_from([*TOKEN_COLUMNS, *RESPONSE_COLUMNS])))
    documents = data.draw(st.lists(_DOCUMENTS, min_size=len(sizes), max_size=len(sizes)))
    starts = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    generator = torch.Generator().manual_seed(0)
    columns, of_each = {}, [dict[str, torch.Tensor]() for _ in sizes]
    for name in sorted(names):
        counts = [prompt + response if name in TOKEN_COLUMNS else response for prompt, response in sizes]
        rows = [torch.randint(0, 2, (count,), generator=generator).to(_DTYPES[name]) for count in counts]
        begins = starts if name in TOKEN_COLUMNS else [0] * len(sizes)
        columns[name] = joined(rows, data.draw(st.sampled_from([None, begins])), _DTYPES[name])
        for fields, row in zip(of_each, rows, strict=True):
            fields[name] = row
    prompts = [prompt for prompt, _ in sizes] if names & {*RESPONSE_COLUMNS} or data.draw(st.booleans()) else None
    objects = [
        AgentTrajectory(**document, **fields, response_start=None if prompts is None else prompt)
        for document, fields, (prompt, _) in zip(documents, of_each, sizes, strict=True)
    ]
    given_documents = [
        {**document, **({"reward": asdict(document["reward"])} if document.get("reward") else {})}
        for document in documents
    ]
    same_labels = (
        mock.patch("trajstore._core.writing.publishing.microseconds", return_value=1_700_000_000_000_000),
        mock.patch("trajstore._core.writing.queue.random_uuids", lambda count: bytes(16 * count)),
    )
    with TemporaryDirectory() as folder, same_labels[0], same_labels[1]:
        stored = []
        for name in ("objects", "tensors"):
            path = Path(folder, name)
            with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=kind) as buffer:
                if name == "objects":
                    buffer.add_trajectories(objects)
                else:
                    lengths = torch.tensor([sum(size) for size in sizes], dtype=torch.int32)
                    ids = buffer.add_rollouts(columns, lengths, given_documents, prompts=prompts, starts=starts)
                    assert ids == [*range(len(sizes))]
            with TrajectoryReplayBuffer.open(path) as reader:
                entries = [
                    {name: column[at] for name, column in facts.items()}
                    for facts in [reader.query().facts().to_dict()]
                    for at in range(len(reader))
                ]
                stored.append((shards_of(path), [{k: v for k, v in e.items() if k != "committed"} for e in entries]))
        assert stored[0] == stored[1]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_attached_values_of_any_dtype_come_back(data: st.DataObject) -> None:
    def values(leading: list[int]) -> st.SearchStrategy[torch.Tensor]:
        return st.builds(
            lambda name, shape, content: (
                torch.tensor((content * 99)[:99], dtype=torch.uint8)
                .repeat(99)[: dtypes()[name].itemsize * torch.Size([*leading, *shape]).numel()]
                .view(dtypes()[name])
                .reshape([*leading, *shape])
            ),
            st.sampled_from(sorted({*dtypes()} - {"bool", "complex32"})),  # bytes that are no bool; torch warns
            st.lists(st.integers(0, 2), max_size=2),
            st.lists(st.integers(0, 255), min_size=1, max_size=9),
        )

    blobs = data.draw(st.dictionaries(st.text("ab.", min_size=1), st.binary(max_size=5) | values([]), max_size=3))
    columns = data.draw(st.dictionaries(st.sampled_from(["experts", "versions"]), values([3]), max_size=2))
    short = data.draw(st.booleans())
    expected = {**blobs, **columns}
    shorter = {name: column[: 3 - short] for name, column in columns.items()}
    metadata = attach(attach({"own": 1}, blobs), shorter, tokens=3)
    with TrajectoryReplayBuffer() as buffer:
        ids = buffer.add_trajectories([AgentTrajectory(input_ids=torch.arange(3), metadata=metadata)])
        ids += buffer.add_rollouts({"input_ids": torch.arange(3)}, [3], [{"metadata": metadata}])
        read = [buffer.get(number).metadata for number in ids]
    for each in read:
        assert each["own"] == 1
        assert filled_rows(each) == (dict.fromkeys(columns, 1) if short else {})
        found = attached(each)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            wanted = expected[name]
            if name in columns and short:
                assert same(value[2:], torch.zeros_like(wanted[2:]))
                value, wanted = value[:2], wanted[:2]
            assert same(value, wanted)


@pytest.mark.parametrize(
    ("value", "tokens", "message"),
    [
        (torch.zeros(5, 2), 3, r"attached\.experts: shape \[5, 2\], must begin with 3, a row for each token"),
        (torch.zeros(1), 3, r"attached\.experts: shape \[1\]"),
        (torch.tensor(1), 3, r"attached\.experts: shape \[\]"),
        (b"bytes", 3, r"attached\.experts: must be a tensor, is a bytes"),
        ("text", None, r"attached\.experts: must be a tensor, is a str"),
    ],
)
def test_values_that_cannot_be_attached_are_refused(value: Any, tokens: int | None, message: str) -> None:
    with pytest.raises(InvalidTrajectoryError, match=message):
        attach({}, {"experts": value}, tokens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (([], {}), "metadata: .* is a list"),
        (({}, None), "values: .* is a NoneType"),
        (({}, {1: b""}), "1 is a int, must be a text"),
        (({}, {}, 1.5), "field tokens: 1.5"),
    ],
)
def test_wrong_arguments_of_attach_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidTrajectoryError, match=message):
        attach(*wrong)


@pytest.mark.parametrize("damaged", [3, {"tensors": {"experts": ["int16", [4], "?"]}}, {"leaves": {"experts": 3}}])
def test_attached_values_of_another_form_are_reported(damaged: Any) -> None:
    with pytest.raises(CorruptStoreError, match=r"attached|experts"):
        attached({"trajstore.attached": damaged})


@pytest.mark.parametrize("own", [{"files": ["a.txt"]}, {"filled": {"x": 1}}, ["a"], "text", 3, None, {"tensors": 3}])
def test_a_rollouts_own_attached_and_filled_stay_its_own(own: Any) -> None:
    metadata = attach({"attached": own, "filled": own}, {"image": b"...", "scores": torch.zeros(2)}, None)
    assert (metadata["attached"], metadata["filled"]) == (own, own)
    assert attached(metadata).keys() == {"image", "scores"}
    assert filled_rows(metadata) == {}
    assert attached({"attached": own}) == {}
    with pytest.raises(CorruptStoreError, match="not made by attach"):
        attach({"trajstore.attached": "x"}, {"image": b"..."})


_FINE: dict[str, Any] = {
    "columns": {"input_ids": torch.arange(6).reshape(2, 3), "old_log_probs": torch.zeros(3)},
    "lengths": [2, 3],
    "documents": [{"task_id": "t"}, {"messages": [{"role": "user"}]}],
    "prompts": torch.tensor([1, 1]),
}


@pytest.mark.parametrize(
    ("change", "message", "position"),
    [
        ({"columns": [torch.arange(5)]}, "columns: must be a dict of tensors, is a list", None),
        ({"columns": {"advantages": torch.arange(5)}}, "columns 'advantages': must be among input_ids, ", None),
        ({"columns": {"input_ids": torch.arange(6)}}, "field input_ids: has 6 entries, must have 5", None),
        ({"columns": {"input_ids": torch.zeros(3, 3)}}, "field input_ids: float32, must be whole numbers", None),
        (
            {"columns": {"input_ids": torch.arange(3)[:, None]}},
            "field input_ids: shape [3, 1], must begin with 2",
            None,
        ),
        ({"columns": {"input_ids": torch.zeros(2, 2, 2, dtype=torch.int64)}}, "two (padded)", None),
        (
            {"columns": {"input_ids": torch.zeros(2, 2, dtype=torch.int64)}},
            "field input_ids: has 2 entries, must have 3",
            1,
        ),
        ({"starts": [0, 1]}, "field input_ids: has 3 entries, must have 3 from 1 on", 1),
        ({"starts": [0]}, "starts: has 1 entries, must have one for each of 2 rollouts", None),
        ({"prompts": None}, "field old_log_probs: has a value per token of the response: give prompts", None),
        ({"prompts": [1, 4]}, "prompts: 4, must be in [0, L] with L = 3", 1),
        ({"lengths": [2.0, 3.0]}, "lengths: must be a list of whole numbers", None),
        ({"lengths": [2, -1]}, "lengths: -1, must be in [0, ", 1),
        ({"documents": [{}]}, "documents: must be a list with a dict for each of 2 rollouts", None),
        ({"documents": [{}, "text"]}, "document: must be a dict, is a str", 1),
        ({"documents": [{}, {"response_start": 1}]}, "'response_start': must be among", 1),
        ({"documents": [{}, {"reward": {"score": 1}}]}, "field reward: ", 1),
        ({"documents": [{}, {"reward": {"outcome": "1"}}]}, "field reward.outcome: '1' is a str", 1),
        ({"documents": [{}, {"metadata": {"x": float("nan")}}]}, "field metadata.x: nan has no equal in JSON", 1),
        ({"documents": [{}, {"metadata": {"model_weights_id": "\n"}}]}, "metadata.model_weights_id", 1),
        ({"documents": [{}, {"metadata": {"trajstore.notes": {}}}]}, "set again by add_trajectories", 1),
    ],
)
def test_wrong_rollouts_are_refused_with_field_and_position(
    change: dict[str, Any], message: str, position: int | None
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(InvalidTrajectoryError) as refusal:
            buffer.add_rollouts(**{**_FINE, **change})
        assert len(buffer) == 0
        assert buffer.add_rollouts(**_FINE) == [0, 1]
    assert message in str(refusal.value)
    assert refusal.value.position == position


@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs", "entropys", "response_mask"])
@pytest.mark.parametrize(("values", "start"), [(9, None), (6, None), (4, 2), (2, 2)])
def test_more_response_values_than_tokens_are_refused(name: str, values: int, start: int | None) -> None:
    whole: dict[str, Any] = {"input_ids": torch.arange(5), "response_start": start}
    dtype = torch.int64 if name == "response_mask" else torch.float32
    flatten(AgentTrajectory(**whole, **{name: torch.ones(5 if start is None else 3, dtype=dtype)}))
    most = "at most L = 5" if start is None else "L - response_start = 3"
    with pytest.raises(InvalidTrajectoryError, match=f"field {name}: has {values} entries, must have {most}"):
        flatten(AgentTrajectory(**whole, **{name: torch.ones(values, dtype=dtype)}))

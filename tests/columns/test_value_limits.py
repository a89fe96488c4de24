"""Anything that can be added can be read: numbers, text and types beyond the store's limits are refused."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import logging
import re
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forging import forged_index, forged_log
from tests.stores import keys_of, reader_of, refused_to_all, stored, writer_to
from tests.support.copies import copy_live
from tests.support.witness import check_trajectory, witness
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, errors
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.fields import TENSOR_FIELDS
from trajstore._core.store.json_arrays import array_from_json, array_to_json
from trajstore.operations.verify import verify
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, get_model_weights_id

Z = torch.zeros(1, 1, 1)


def step(**fields: Any) -> Trajectory:
    return Trajectory(**{"actions": Z, "rewards": Z, **fields})


Refuse = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refuse]:
    """Adding raises and has no effect; trajectories added before and after it survive a reopening."""
    path = tmp_path_factory.mktemp("refused")
    keys: list[int] = []
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0) as buffer:

        def refuse(trajectory: Any, match: str) -> None:
            before = buffer.total_samples
            with pytest.raises(errors.InvalidTrajectoryError, match=r"^trajectory 1 of the list: ") as raised:
                buffer.add_trajectories([witness(2), trajectory])
            assert raised.value.position == 1
            assert re.search(match, str(raised.value.__cause__))
            assert buffer.total_samples == before
            assert buffer.add_trajectories([witness(len(keys) % 7)]) == [len(keys)]
            keys.append(len(keys) % 7)

        yield refuse
        buffer.flush()
    again = TrajectoryReplayBuffer()
    assert again.load_checkpoint(path) == 0
    assert [check_trajectory(again.get(number)) for number in range(len(again))] == keys
    assert verify(path).sound


# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2**63, 2**70, 10**5000, 2.5, float("nan"), "7", torch.zeros(2)], ids=type)
def test_max_episode_length_out_of_range(refused: Refuse, value: Any) -> None:
    refused(step(max_episode_length=value), "field max_episode_length: ")


@pytest.mark.parametrize("versions", [1e30, -1e30, float(2**63), float("-inf")])
def test_versions_beyond_64_bits(refused: Refuse, versions: float) -> None:
    refused(step(versions=torch.full((1, 1, 1), versions, dtype=torch.float64)), "field versions: ")


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_numbers_where_real_ones_belong(refused: Refuse, dtype: torch.dtype) -> None:
    for name in sorted({*TENSOR_FIELDS} - {"actions", "valid"}):
        refused(step(**{name: torch.zeros(1, 1, 1, dtype=dtype)}), f"field {name}: {str(dtype)[6:]}, must be real")
    for name in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS):
        refused(AgentTrajectory(**{name: torch.zeros(3, dtype=dtype)}), f"field {name}: {str(dtype)[6:]}, must be ")
        columns = {"input_ids": torch.zeros(3, dtype=torch.int64), name: torch.zeros(3, dtype=dtype)}
        with pytest.raises(errors.InvalidTrajectoryError, match=f"field {name}: {str(dtype)[6:]}, must be "):
            TrajectoryReplayBuffer().add_rollouts(columns, [3], [{}], starts=[0])


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2**31, 1, 0), "T = 2147483648"),
        ((1, 2**31, 0), "B = 2147483648"),
        ((2**33, 1, 0), "T = 8589934592"),
        ((2**21, 2**20, 0), "T·B = 2199023255552"),
    ],
)
def test_extents_that_the_index_cannot_hold(refused: Refuse, shape: tuple[int, ...], match: str) -> None:
    refused(Trajectory(rewards=torch.zeros(shape)), match)


def test_the_longest_extent_comes_back(tmp_path: Path) -> None:
    longest = Trajectory(rewards=torch.zeros(2**31 - 1, 1, 0), max_episode_length=2**63 - 1)
    stored(tmp_path, [longest, longest])
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(tmp_path)
    assert again.total_samples == 2 * (2**31 - 1)
    got = again.get(1)
    assert isinstance(got, Trajectory)
    assert got.rewards is not None
    assert got.rewards.shape == (2**31 - 1, 1, 0)
    assert got.max_episode_length == 2**63 - 1


# -- text and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "a\nb", "\x1b[2J", "x\x85"])
@pytest.mark.parametrize("field", ["curr_obs", "forward_inputs"])
@pytest.mark.parametrize("leaf", [Z, "text"], ids=["tensor", "text"])
def test_names_that_cannot_be_stored(refused: Refuse, name: str, field: str, leaf: Any) -> None:
    refused(step(**{field: {"inner": {name: leaf}}}), rf"field '{field}\.inner\..*U\+")


@pytest.mark.parametrize("value", ["\ud800", "a\0", 7, uuid.uuid4(), b"x", 0, False])
def test_weights_ids_that_cannot_be_stored(refused: Refuse, value: Any) -> None:
    refused(step(model_weights_id=value), "field model_weights_id: ")
    refused(AgentTrajectory(metadata={"model_weights_id": value}), "model_weights_id")


@pytest.mark.parametrize("field", ["task_id", "data_id", "rollout_id", "query", "tokenizer_fingerprint"])
@pytest.mark.parametrize("value", ["\udfff", 5, b"x", ["a"]])
def test_texts_of_agent_trajectories(refused: Refuse, field: str, value: Any) -> None:
    refused(AgentTrajectory(**{field: value}), f"field {field}: ")


def test_none_is_unknown_and_numpys_scalars_are_numbers(tmp_path: Path) -> None:
    unknown = dict.fromkeys(field.name for field in dataclasses.fields(AgentTrajectory))
    later = AgentTrajectory(input_ids=torch.arange(3))
    later.task_id = later.messages = later.metadata = later.query = None  # type: ignore[assignment]
    true = Reward(outcome=np.True_, success_rate=True, description=None, metadata=None)  # type: ignore[arg-type]
    numbers = {"entropy": np.float32(0.5), "policy_version": np.int8(3), "is_terminated": np.False_}
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories(
            [
                AgentTrajectory(**{**unknown, "input_ids": torch.arange(3)}),
                later,
                AgentTrajectory(input_ids=torch.arange(3), reward=true, **numbers),  # type: ignore[arg-type]
                Trajectory(rewards=Z, max_episode_length=None, model_weights_id=None),  # type: ignore[arg-type]
            ]
        )
        for number in (0, 1):
            assert {**vars(buffer.get(number)), "input_ids": None} == vars(AgentTrajectory())
        rollout, block = buffer.get(2), buffer.get(3)
    assert isinstance(rollout, AgentTrajectory)
    assert rollout.reward == Reward(outcome=1.0, success_rate=1.0)
    assert type(rollout.reward.outcome) is float
    assert (rollout.entropy, rollout.policy_version, rollout.is_terminated) == (0.5, 3, False)
    assert isinstance(block, Trajectory)
    assert block.max_episode_length == 0


# -- types -------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int = 0


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("-inf"), np.float32("nan"), np.array([1.0, np.inf])),
        *(2**64, -(2**63) - 1, 1j, b"x", {1, 2}, {3: 4}, object(), Z, Path("x"), Point()),
        *(uuid.uuid4(), Colour.RED, datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1), np.datetime64("2026")),
        *("\ud800", {"\udc00": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_metadata_that_json_has_no_equal_of_is_refused_by_its_path(refused: Refuse, value: Any) -> None:
    refused(AgentTrajectory(metadata={"fine": 1, "deep": [{"bad": value}]}), r"^field metadata.deep\[0\].bad")
    with pytest.raises(errors.InvalidTrajectoryError, match=r"^field messages\[1\]\.content"):
        flatten(AgentTrajectory(messages=[{"role": "user"}, {"content": value}]))
    with pytest.raises(errors.InvalidTrajectoryError, match=r"^field reward\.metadata\.judge"):
        flatten(AgentTrajectory(reward=Reward(metadata={"judge": value})))


def test_metadata_nested_too_deeply(refused: Refuse) -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    refused(AgentTrajectory(metadata=circle), r"^field metadata\.again\.again.*nested")


def test_observations_nested_too_deeply(refused: Refuse) -> None:
    seen: dict[str, Any] = {"last": Z}
    for _ in range(2000):
        seen = {"again": seen}
    refused(step(curr_obs=seen), r"^field curr_obs\.again\.again\.\.\.: nested in more than 200 dicts")


class _Message:
    """A message as the clients of OpenAI and Anthropic return it."""

    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"reward": 1.0}, r"^field reward: 1\.0 is a float, must be a Reward.*write Reward\(outcome=1\.0\)"),
        ({"reward": {"outcome": 1.0}}, "^field reward: .* is a dict, must be a Reward"),
        ({"reward": Reward(outcome="1")}, r"^field reward\.outcome: '1' is a str"),
        ({"reward": Reward(outcome=float("nan"))}, r"^field reward\.outcome: nan"),
        ({"reward": Reward(success_rate=Z)}, r"^field reward\.success_rate: "),
        ({"reward": Reward(description=3)}, r"^field reward\.description: "),
        ({"reward": Reward(metadata=[])}, r"^field reward\.metadata: "),
        ({"messages": "hello"}, "^field messages: 'hello' is a str"),
        ({"messages": {"role": "user"}}, "^field messages: "),
        ({"messages": ({},)}, "^field messages: "),
        ({"messages": [{}, "hello"]}, r"^field messages\[1\]: 'hello' is a str, must be a dict"),
        ({"messages": [_Message()]}, r"^field messages\[0\]: .*must be a dict, as its model_dump\(exclude_none=True\)"),
        ({"messages": [{"content": [_Message()]}]}, r"messages\[0\]\.content\[0\]: .*store its model_dump\(exclude"),
        ({"metadata": [1]}, "^field metadata: "),
        ({"is_terminated": 1}, "^field is_terminated: "),
        ({"is_terminated": "yes"}, "^field is_terminated: "),
        ({"entropy": "low"}, "^field entropy: "),
        ({"entropy": float("inf")}, "^field entropy: "),
        ({"response_start": -1}, "^field response_start: "),
        ({"response_start": 1.5}, "^field response_start: "),
        ({"input_ids": [1, 2]}, "^field input_ids: must be a tensor, is a list"),
        ({"input_ids": np.array(["a"])}, "^field input_ids: numpy's dtype <U1"),
    ],
)
def test_fields_of_agent_trajectories_of_another_type(refused: Refuse, fields: dict[str, Any], match: str) -> None:
    refused(AgentTrajectory(**fields), match)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"curr_obs": Z}, "^field curr_obs: must be a dict of tensors, is a Tensor"),
        ({"curr_obs": [Z]}, "^field curr_obs: must be a dict of tensors, is a list"),
        ({"forward_inputs": {"note": float("nan")}}, r"forward_inputs\.note.*nan"),
        ({"curr_obs": {3: Z}}, r"field curr_obs: key 3 is a int"),
        ({"actions": [1.0]}, "^field actions: must be a tensor, is a list"),
        ({"rewards": 1.0}, "^field rewards: must be a tensor, is a float"),
        ({"actions": Z.to_sparse()}, "^field actions: sparse"),
        ({"actions": torch.zeros(1, 1, 1, device="meta")}, "^field actions: .*meta"),
        ({"actions": np.zeros((1, 1, 1), ">f4")}, "^field actions: numpy's dtype >f4"),
        ({"actions": np.array([[["x"]]], object)}, "^field actions: numpy's dtype object"),
    ],
)
def test_fields_of_step_trajectories_of_another_type(refused: Refuse, fields: dict[str, Any], match: str) -> None:
    refused(step(**fields), match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"actions": torch.zeros(7, 2, 3)}, r"actions: has 7 rows, must have T = 4"),
        ({"actions": torch.zeros(4, 3, 3)}, r"actions: shape \[4, 3, 3\].* B = 2"),
        ({"dones": torch.zeros(7, 2, 1)}, r"dones: has 7 rows.*T = 4 or T \+ E with T divisible by E"),
        ({"curr_obs": {"dones": torch.zeros(5, 2, 1)}}, r"curr_obs\.dones: has 5 rows, must have T = 4$"),
        ({"dones": torch.zeros(3, 2, 1)}, r"dones: has 3 rows.*T = 4"),
        ({"dones": torch.zeros(5, 2, 1), "truncations": torch.zeros(6, 2, 1)}, r"has 5 rows|has 6 rows"),
        ({"rewards": None, "actions": torch.zeros(4, 2, 3)}, "prev_logprobs or rewards"),
        ({"rewards": torch.zeros(4)}, r"rewards: shape \[4\]"),
        ({"curr_obs": {"a": {"b": torch.zeros(4, 1)}}}, r"curr_obs\.a\.b: shape \[4, 1\]"),
        ({"curr_obs": {"a": object()}}, r"field curr_obs\.a: a object"),
        ({"versions": torch.full((4, 2, 1), float("nan"))}, "versions"),
    ],
)
def test_shapes_that_do_not_fit(refused: Refuse, changes: dict[str, Any], match: str) -> None:
    refused(Trajectory(**{"rewards": torch.zeros(4, 2, 1), **changes}), match)


@pytest.mark.parametrize("value", [None, 3, "x", {"rewards": Z}, Z])
def test_what_is_no_trajectory(refused: Refuse, value: Any) -> None:
    refused(value, "must be a Trajectory|must be a tensor")


@pytest.mark.parametrize("value", [Trajectory(rewards=Z), AgentTrajectory(), Z, "x", {"rewards": Z}, 3])
def test_one_trajectory_instead_of_a_list(value: Any) -> None:
    with pytest.raises(errors.InvalidTrajectoryError, match=r"a list of trajectories, not a .*\(\[trajectory\]\)"):
        TrajectoryReplayBuffer().add_trajectories(value)


def test_numpy_arrays_that_cannot_be_written_to_are_taken_without_a_warning() -> None:
    array = np.ones((1, 1, 1), np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flatten(Trajectory(rewards=array))  # type: ignore[arg-type]


# -- entries out of range in a store -----------------------------------------------------------------


def damaged(path: Path, clean: bool, name: str, value: int) -> Path:
    """Make a store of five trajectories and forge a number of the middle one, in the index or the log."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories([witness(5)] * 5)
        buffer.flush()
        crashed = copy_live(path, path.with_name("crashed"))
    if not clean:
        with forged_log(crashed) as (record,):
            record["shards"][0]["entries"][name][2] = value
        return crashed
    with forged_index(path) as body:
        columns = body["live"]["columns"]
        array = array_from_json(columns[name], columns[name]["dtype"])
        array[2] = value
        columns[name] = array_to_json(array)
    return path


@pytest.mark.parametrize(
    ("clean", "name", "value"),
    [
        (True, "max_episode_length", -1),
        (True, "steps", -(2**31)),
        (True, "steps", 0),
        (True, "num_samples", 2**33),
        (True, "version_low", 10**9),
        (False, "max_episode_length", -1),
    ],
)
def test_an_entry_out_of_range_does_not_hide_its_neighbours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clean: bool, name: str, value: int
) -> None:
    path = damaged(tmp_path / "store", clean, name, value)
    message = r"trajectory 2; load_checkpoint\(strict=False\)"
    if clean and name in ("max_episode_length", "version_low"):  # which readers check when they need them
        with reader_of(path) as reader, pytest.raises(errors.CorruptStoreError, match=message):
            str(reader.get(2)) + str(reader.query().rows())
        with pytest.raises(errors.CorruptStoreError, match=message):
            writer_to(path)
    else:
        refused_to_all(path, errors.CorruptStoreError, message)
    assert "trajectory 2" in str(verify(path).problems[0])
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    with caplog.at_level(logging.WARNING):
        assert buffer.load_checkpoint(path, strict=False) == 1
    assert "are left out: trajectory 2 (" in caplog.text
    assert keys_of(buffer) == {0: 5, 1: 5, 3: 5, 4: 5}
    buffer.save_checkpoint(tmp_path / "mended")
    assert verify(tmp_path / "mended").sound
    assert TrajectoryReplayBuffer().load_checkpoint(tmp_path / "mended") == 0


# -- Trajectories to columns: accepted tensor types, and handling of versions --


def test_numpy_arrays_are_taken_as_tensors() -> None:
    versions = np.array([[[3.0]], [[5.0]]], np.float32)
    rollout = Trajectory(rewards=np.ones((2, 1, 1), np.float32), versions=versions)  # type: ignore[arg-type]
    buffer = TrajectoryReplayBuffer()
    (number,) = buffer.add_trajectories([rollout])
    trajectory = buffer.get(number)
    assert isinstance(trajectory, Trajectory)
    assert trajectory.versions is not None
    assert trajectory.versions.tolist() == versions.tolist()
    assert trajectory.model_weights_id == get_model_weights_id(torch.from_numpy(versions))


@pytest.mark.parametrize("view", ["transposed", "grad", "conjugated", "negated", "parameter"])
def test_tensors_that_are_not_plain_memory(view: str) -> None:
    plain = torch.arange(6.0).reshape(2, 3, 1)
    made = {
        "transposed": lambda: plain.transpose(0, 1).contiguous().transpose(0, 1),
        "grad": lambda: plain.clone().requires_grad_(),
        "conjugated": lambda: torch.complex(plain, plain).conj(),
        "negated": lambda: torch.complex(plain, -plain).conj().imag,
        "parameter": lambda: torch.nn.Parameter(plain.clone()),
    }[view]()
    _, stored = flatten(Trajectory(rewards=torch.zeros(2, 3, 1), curr_obs={"s": made})).tensors
    assert stored.is_contiguous()
    assert not stored.requires_grad
    assert not stored.is_conj()
    assert not stored.is_neg()
    assert torch.equal(stored, made.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8])
def test_versions_of_any_real_dtype(dtype: torch.dtype) -> None:
    rollout = Trajectory(rewards=torch.ones(3, 1, 1), versions=torch.tensor([4, 2, 3]).reshape(3, 1, 1).to(dtype))
    assert flatten(rollout).versions == (2, 4)


def test_nested_tensors_are_refused_by_name() -> None:
    parts = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for fields in ({"rewards": parts}, {"rewards": torch.zeros(2, 1, 1), "actions": parts}):
        with pytest.raises(errors.InvalidTrajectoryError, match=rf"field {list(fields)[-1]}: sparse, nested"):
            TrajectoryReplayBuffer().add_trajectories([Trajectory(**fields)])

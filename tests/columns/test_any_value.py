"""Any value a user can pass is refused by field name without effect, or written, read back and verified.

One strange value is added between sound neighbours. Whether it is accepted or refused, the store reopens, the
neighbours are there, and accepted values come back equal.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.witness import check_trajectory, difference, witness
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, errors
from trajstore._core.columns.schema import dtypes
from trajstore._core.formats import FORMATS
from trajstore.operations.verify import verify
from trajstore.trajectory import AnyTrajectory


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


TEXT = st.one_of(
    st.text(st.characters(), max_size=6),  # including lone surrogates and control characters
    st.sampled_from(["", "\ud800", "a\0b", "\x1b[2J", "a.b", "\\", "../x", "k" * 300, "\U0010ffff", "_document"]),
)
INTEGERS = st.one_of(
    st.integers(),
    st.sampled_from(
        [sign * 2**power + more for sign in (1, -1) for power in (31, 32, 53, 62, 63, 64) for more in (-1, 0, 1)]
    ),
    st.sampled_from([10**400, True, np.int8(-1), np.uint64(2**64 - 1), torch.tensor(3), torch.zeros(2), Level.HIGH]),
)
FLOATS = st.one_of(
    st.floats(), st.sampled_from([1e308, 5e-324, -0.0, 2.0**63, np.float32(0.1), np.float16("nan"), np.float64("-inf")])
)
ODD = st.sampled_from(
    [
        *(None, (), (1, "x"), [1], {}, {"a": 1}, {1: 2}, {(1,): 2}, set(), b"x", object(), 1j, Colour.RED, Reward()),
        *(
            uuid.UUID(int=7),
            datetime.datetime(2026, 1, 2),
            datetime.date(2026, 1, 2),
            decimal.Decimal("1.5"),
            Path("x"),
        ),
        *(torch.zeros(1, 1, 1), np.zeros((1, 1, 1)), np.array(["a"]), np.datetime64("2026"), np.str_("x"), int, len),
    ]
)


class _Hidden:
    """Wraps a strategy to give it a short repr."""

    def __init__(self, strategy: st.SearchStrategy[Any]) -> None:
        self.strategy = strategy

    def __repr__(self) -> str:
        return "..."


def brief(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return an equivalent strategy with a short repr, which hypothesis prints often."""
    return st.just(_Hidden(strategy)).flatmap(lambda hidden: hidden.strategy)


def nested(leaves: st.SearchStrategy[Any], names: st.SearchStrategy[str], most: int) -> st.SearchStrategy[Any]:
    """Return a strategy of JSON values with at most ``most`` leaves."""

    def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner))
        return st.one_of(lists, st.dictionaries(names, inner, max_size=3))

    return brief(st.recursive(brief(leaves), within, max_leaves=most))


SCALARS = st.one_of(INTEGERS, FLOATS, TEXT, st.booleans(), ODD)
JSON = nested(SCALARS, TEXT, 6)


@st.composite
def tensors(draw: st.DrawFn, leading: tuple[int, ...] = ()) -> torch.Tensor:
    """Draw small tensors of any dtype, shape and layout, filled with arbitrary bytes."""
    dtype = draw(st.sampled_from([*dtypes().values()]))
    shape = draw(st.one_of(st.just(leading), st.lists(st.integers(0, 3), max_size=4).map(tuple)))
    shape += draw(st.lists(st.integers(0, 3), max_size=2).map(tuple)) if shape == leading else ()
    count = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.zeros(shape, dtype=dtype)
    raw = torch.randint(
        256, (count,), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))), dtype=torch.uint8
    )
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) and shape[0] == shape[-1] else tensor


ANYTHING = st.one_of(JSON, tensors((2, 3)), INTEGERS)

# Plausible values, so that many additions succeed; only their place is unusual.
FITTING_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.sampled_from(["a.b", "\\", ""])
)
FITTING_NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False))
FITTING_ODD = st.sampled_from([np.float32(0.1), np.int8(3), np.array([[1.5]]), Level.HIGH, np.str_("x")])
FITTING_LEAVES = st.one_of(st.none(), st.booleans(), FITTING_NUMBERS, FITTING_TEXT, FITTING_ODD)
FITTING_JSON = nested(FITTING_LEAVES, FITTING_TEXT, 8)
OBJECTS = st.dictionaries(FITTING_TEXT, FITTING_JSON, max_size=3)
NAMES = st.one_of(TEXT, st.text("abc.\\/", max_size=3))
OBSERVATIONS = brief(
    st.recursive(
        st.one_of(tensors((2, 3)), tensors((2, 3)), FITTING_JSON, st.none()),
        lambda inner: st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=4,
    )
)
STEP_FIELDS: dict[str, Any] = dict.fromkeys(vars(Trajectory()), tensors((2, 3))) | {
    "max_episode_length": st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([np.int16(9), 2.0, torch.tensor(4)])),
    "model_weights_id": NAMES,
    **dict.fromkeys(("curr_obs", "next_obs", "forward_inputs"), st.dictionaries(NAMES, OBSERVATIONS, max_size=3)),
}
AGENT_FIELDS: dict[str, Any] = dict.fromkeys(vars(AgentTrajectory()), FITTING_TEXT) | {
    "messages": st.lists(OBJECTS, max_size=2),
    "metadata": OBJECTS,
    **dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), tensors((5,))),
    **dict.fromkeys(("old_log_probs", "entropys", "response_mask", "rollout_log_probs"), tensors((3,))),
    "response_start": st.sampled_from([None, 2, np.int64(2)]),
    "is_terminated": st.sampled_from([None, True, np.bool_(False)]),
    "policy_version": st.integers(-(2**63) + 1, 2**63 - 1),
    "entropy": st.floats(allow_nan=False, allow_infinity=False),
}
REWARD_FIELDS: dict[str, Any] = {
    "outcome": st.one_of(st.none(), st.floats(), st.booleans()),
    "success_rate": st.one_of(st.none(), FLOATS),
    "description": FITTING_TEXT,
    "metadata": OBJECTS,
}
EXTENTS = [(2**31 - 1, 1), (2**31, 1), (1, 2**31), (2**33, 2), (2**21, 2**21), (0, 3), (2, 0)]


def _fields(draw: st.DrawFn, fitting: dict[str, Any], most: int) -> dict[str, Any]:
    """Draw up to ``most`` fields with fitting values, sometimes one with an arbitrary value."""
    names = draw(st.lists(st.sampled_from(sorted(fitting)), max_size=most, unique=True))
    fields = {name: draw(fitting[name]) for name in names}
    if names and draw(st.integers(0, 2)) == 0:
        fields[names[0]] = draw(ANYTHING)
    return fields


@st.composite
def step_trajectories(draw: st.DrawFn) -> Trajectory:
    """Draw trajectories of T = 2, B = 3 with a few strange fields, sometimes of another shape."""
    if draw(st.integers(0, 5)) == 0:
        return Trajectory(rewards=torch.zeros(*draw(st.sampled_from(EXTENTS)), 0))
    return Trajectory(**{"rewards": torch.ones(2, 3, 1), **_fields(draw, STEP_FIELDS, 3)})


@st.composite
def agent_trajectories(draw: st.DrawFn) -> AgentTrajectory:
    """Draw rollouts of five tokens with a few strange fields, also in their reward."""
    sound = {"input_ids": torch.arange(5), "old_log_probs": torch.zeros(3), "response_start": 2}
    reward = Reward(**_fields(draw, REWARD_FIELDS, 2))
    return AgentTrajectory(**{**sound, "reward": reward, **_fields(draw, AGENT_FIELDS, 3)})


TRAJECTORIES = st.one_of(step_trajectories(), agent_trajectories())


def as_told(value: Any) -> Any:
    """Return the value's documented form after reading."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_told(item) for item in value]
    if isinstance(value, dict):
        return {key: as_told(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return value


def check_equal(given: AnyTrajectory, found: AnyTrajectory) -> None:
    """Allow only the documented differences."""
    assert type(given) is type(found)
    if isinstance(given, AgentTrajectory):
        assert isinstance(found, AgentTrajectory)
        for name, value in vars(given).items():
            other = getattr(found, name)
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
                same = AgentTrajectory(input_ids=value), AgentTrajectory(input_ids=other)
                assert difference(*same) is None, name
            elif isinstance(value, Reward):
                assert {key: as_told(item) for key, item in vars(value).items()} == vars(other)
            else:
                assert as_told(value) == other, name
                assert name == "policy_version" or type(as_told(value)) in (type(other), bool, float, Level, np.str_), (
                    name
                )
        return
    assert isinstance(given, Trajectory)
    assert isinstance(found, Trajectory)
    assert found.max_episode_length == int(given.max_episode_length)
    assert found.model_weights_id == given.model_weights_id or not given.model_weights_id
    plain = {name: columns_of(value) for name, value in vars(given).items()}
    plain["max_episode_length"] = found.max_episode_length
    for name in ("curr_obs", "next_obs", "forward_inputs"):
        plain[name] = plain[name] or {}
    assert difference(Trajectory(**plain), found) is None


def columns_of(value: Any) -> Any:
    """Return a field as read back: numpy arrays as tensors, other values in their JSON form."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: columns_of(item) for key, item in value.items()}
    return value if isinstance(value, torch.Tensor) else as_told(value)


def check(trajectory: Any, form: str) -> bool:
    """Add the trajectory between its neighbours, flush and reopen; return whether it was accepted."""
    with tempfile.TemporaryDirectory() as path:
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form) as buffer:
            buffer.add_trajectories([witness(1)])
            message = "field"
            try:
                ids = buffer.add_trajectories([trajectory])
            except errors.InvalidTrajectoryError as error:
                ids, message = [], str(error)
            assert message.isprintable()
            assert any(word in message for word in ("field", "trajectory", "Trajectory"))
            assert buffer._trajectory_counter == 1 + len(ids)
            buffer.add_trajectories([witness(2)])
            buffer.flush(timeout=600)
        again = TrajectoryReplayBuffer(sample_window_size=0)
        assert again.load_checkpoint(path) == 0
        assert again.trajectory_ids.tolist() == list(range(2 + len(ids)))
        assert check_trajectory(again.get(0)) == 1
        assert check_trajectory(again.get(1 + len(ids))) == 2
        if ids:
            check_equal(trajectory, again.get(ids[0]))
        report = verify(path)
        assert report.sound, report.problems
        return bool(ids)


def test_any_value_is_refused_or_comes_back() -> None:
    """Both outcomes must occur, since either alone proves nothing."""
    taken = {False: 0, True: 0}

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(trajectory=TRAJECTORIES)
    def search(trajectory: Any) -> None:
        taken[check(trajectory, "pt")] += 1

    search()
    assert min(taken.values()) > 10


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", list(FORMATS))
@settings(max_examples=1500, derandomize=False, deadline=None, suppress_health_check=list(HealthCheck))
@given(trajectory=TRAJECTORIES)
def test_any_value_is_refused_or_comes_back_in_a_long_search(form: str, trajectory: Any) -> None:
    check(trajectory, form)

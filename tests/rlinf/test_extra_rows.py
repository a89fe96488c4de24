"""Extra rows of RLinf's real-world RLT and non-column fields are kept and returned, but never drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import reader_of, stored
from tests.support.equality import same
from trajstore import Trajectory, TrajectoryReplayBuffer
from trajstore._core.columns.fields import join_name, walk
from trajstore._core.formats import FORMATS
from trajstore.errors import InvalidTrajectoryError
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify

from .test_layout import digest, read_plainly, small

FOLDERS = ("rlt_pt", "rlt_pkl")
STEPS, BATCH = 6, 2


def rollout(seed: int, epochs: int = 1) -> Trajectory:
    """Return a rollout whose rows hold their step; extra rows hold -1."""
    rows = torch.arange(STEPS * BATCH, dtype=torch.float32).reshape(STEPS, BATCH, 1) + 1000 * seed

    def ending(width: int) -> torch.Tensor:
        parts = [torch.cat([part, -torch.ones(1, BATCH, 1)]) for part in rows.chunk(epochs)]
        return torch.cat(parts).expand(-1, -1, width).contiguous()

    beginning = torch.cat([torch.cat([-torch.ones(1, BATCH, 1), part]) for part in rows.chunk(epochs)])
    return Trajectory(
        max_episode_length=50,
        actions=ending(4),
        intervene_flags=ending(4) > 3,
        rewards=rows,
        dones=beginning,
        forward_inputs={"action": ending(4), "deep": {"record": ending(1)}},
        curr_obs={"states": rows.expand(-1, -1, 3).contiguous()},
    )


def leaves(value: Any) -> dict[str, Any]:
    return {join_name(path): leaf for path, leaf in walk(value if isinstance(value, dict) else vars(value))}


def assert_same(got: Any, wanted: Any) -> None:
    left, right = leaves(got), leaves(wanted)
    assert left.keys() == right.keys()
    assert not [name for name, value in right.items() if not same(left[name], value)]


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("saved", [None, *FORMATS])
def test_extra_rows_are_kept_and_never_drawn(tmp_path: Path, epochs: int, saved: str | None) -> None:
    options: dict[str, Any] = {"sample_window_size": 0}
    if saved:
        options |= {"auto_save": True, "auto_save_path": tmp_path / "store", "trajectory_format": saved}
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.add_trajectories([rollout(seed, epochs) for seed in range(3)])
        buffer.flush()
        buffer.clear_cache()
        batch = buffer.sample(36)
        for name, value in leaves(batch).items():
            if name != "intervene_flags":
                assert torch.equal(value.float(), batch["rewards"].expand_as(value)), name
        for seed in range(3):
            wanted = vars(rollout(seed, epochs)) | {"model_weights_id": buffer.get(seed).model_weights_id}  # type: ignore[union-attr]
            assert_same(buffer.get(seed), wanted)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
    for place in ("checkpoint", "rlinf"):
        again = reader_of(tmp_path / place)
        for name in ("actions", "intervene_flags", "dones"):
            assert same(getattr(again.get(1), name), getattr(rollout(1, epochs), name))
        assert -1 not in again.sample(36)["actions"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_draws_equal_rlinfs_but_where_it_pairs_rows_wrongly(shared_fixtures: Path, folder: str) -> None:
    """The reference draws have RLinf's cache off, where it reads extra rows as ordinary ones.

    RLinf concatenates the columns of a batch's trajectories and counts T * B rows for each, so that actions
    of every trajectory but the first come from earlier rows than their rewards. Ours come from the same step.
    """
    expected = json.loads((shared_fixtures / "rlinf" / "expected_rlt_samples.json").read_text())[folder]
    buffer = TrajectoryReplayBuffer(seed=5, enable_cache=False, sample_window_size=0)
    buffer.load_checkpoint(shared_fixtures / "rlinf" / folder)
    stored = [leaves({k: v for k, v in vars(buffer.get(i)).items() if v is not None}) for i in range(4)]
    ending = {n for n, v in stored[0].items() if isinstance(v, torch.Tensor) and v.shape[0] == STEPS + 1} - {
        "dones",
        "terminations",
        "truncations",
    }
    assert ending == {
        "actions", "intervene_flags", "forward_inputs.action", "forward_inputs.model_action",
        "forward_inputs.record_transition",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    for draw in expected:
        got = leaves(buffer.sample(16))
        assert {n: [str(t.dtype)[6:], list(t.shape)] for n, t in got.items()} == {
            n: [item["dtype"], item["shape"]] for n, item in draw.items()
        }
        drawn = torch.randint(0, 48, (16,), generator=generator)
        which = drawn // (STEPS * BATCH)
        joined = torch.unique(which).tolist()
        for name, tensor in got.items():
            if name not in ending:
                assert digest(tensor) == draw[name]["sha256"], name
                continue
            flat = {i: stored[i][name].flatten(0, 1) for i in joined}
            assert torch.equal(
                tensor, torch.stack([flat[int(i)][int(s) % 12] for i, s in zip(which, drawn, strict=True)])
            )
            theirs = torch.cat([flat[i] for i in joined])
            rows = [joined.index(int(i)) * 12 + int(s) % 12 for i, s in zip(which, drawn, strict=True)]
            assert digest(theirs[rows]) == draw[name]["sha256"], name


@pytest.mark.parametrize("epochs", [1, 2])
def test_versions_of_extra_rows_are_nobodys_policy(tmp_path: Path, epochs: int) -> None:
    """With ``collect_final_values: False``, RLinf ends each epoch with versions of zero."""
    given = rollout(1, epochs)
    acting = torch.full((STEPS // epochs, BATCH, 4), 7.0)
    given.versions = torch.cat([torch.cat([acting, torch.zeros(1, BATCH, 4)])] * epochs)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", sample_window_size=0) as buffer:
        buffer.add_trajectories([given])
        assert bool(buffer.sample(50)["versions"].eq(7).all())
        buffer.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
    assert inspect(tmp_path / "store")["policy"]["versions"]["min"] == 7
    for place in ("store", "rlinf"):
        again = reader_of(tmp_path / place)
        assert same(vars(again.get(0))["versions"], given.versions)


def test_rows_that_fit_no_epoch_are_refused_with_both_lengths() -> None:
    wrong = rollout(0)
    wrong.forward_inputs["action"] = torch.zeros(STEPS + 4, BATCH, 4)
    with pytest.raises(InvalidTrajectoryError, match=r"forward_inputs\.action: has 10 rows, must have T = 6 or T \+ E"):
        TrajectoryReplayBuffer().add_trajectories([wrong])
    wrong.forward_inputs["action"] = torch.zeros(STEPS + 2, BATCH, 4)
    with pytest.raises(InvalidTrajectoryError, match=r"forward_inputs\.action: has 8 rows = T \+ 2, but .* = T \+ 1"):
        TrajectoryReplayBuffer().add_trajectories([wrong])


OTHERS: dict[str, Any] = {
    "text": "pick the cup",
    "number": 7,
    "share": 0.25,
    "nothing": None,
    "flags": [True, False],
    "empty": {},
    "scalar": torch.tensor(3.5),
    "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "line": torch.arange(6),
    "none": torch.zeros(0),
}


@pytest.mark.parametrize("form", list(FORMATS))
def test_leaves_without_a_row_for_each_step_are_given_back(tmp_path: Path, form: str) -> None:
    given = rollout(1)
    given.curr_obs |= OTHERS
    path = stored(tmp_path / "store", [given], trajectory_format=form)
    reader = reader_of(path)
    assert set(reader.sample(3)["curr_obs"]) == {"states"}
    assert_same(vars(reader.get(0))["curr_obs"], given.curr_obs)
    assert verify(path).sound
    reader.save_checkpoint(tmp_path / "rlinf", layout="rlinf")
    file = next((tmp_path / "rlinf").glob("trajectory_0_*"))
    assert_same(read_plainly(file)["curr_obs"], given.curr_obs)


def rlinf_directory(path: Path, suffix: str, **fields: Any) -> Path:
    """Write a directory of RLinf with one trajectory that has these additional fields."""
    return small(
        path, suffix, {"rewards": torch.arange(12.0).reshape(6, 2, 1), **fields}, num_samples=12, shape=[6, 2, 1]
    )


@pytest.mark.parametrize("suffix", ["pt", "pkl"])
@pytest.mark.parametrize("first", ["get", "sample", "save"])
def test_what_rlinf_keeps_and_never_samples_goes_round(tmp_path: Path, suffix: str, first: str) -> None:
    obs = {"states": torch.ones(6, 2, 3), **OTHERS, "wide": torch.zeros(4, 2)}
    path = rlinf_directory(tmp_path / "theirs", suffix, curr_obs=obs, intervene_flags=torch.zeros(6, dtype=torch.bool))
    buffer = TrajectoryReplayBuffer(enable_cache=suffix == "pt")
    buffer.load_checkpoint(path)
    if first == "sample":
        assert set(buffer.sample(5)["curr_obs"]) == {"states"}
    if first != "save":
        assert_same(vars(buffer.get(0))["curr_obs"], obs)
    for place, layout in ((tmp_path / "copy", "rlinf"), (tmp_path / "own", "trajstore")):
        buffer.save_checkpoint(place, layout=layout)  # type: ignore[arg-type]
        again = reader_of(place)
        assert_same(vars(again.get(0))["curr_obs"], obs)
        assert same(vars(again.get(0))["intervene_flags"], torch.zeros(6, dtype=torch.bool))


@pytest.mark.parametrize("suffix", ["pt", "pkl"])
def test_what_cannot_be_kept_is_named_with_its_file(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = rlinf_directory(
        tmp_path / "theirs",
        suffix,
        curr_obs={"views": [torch.zeros(2)], "by_number": {3: torch.zeros(6, 2)}, "wide": torch.zeros(4, 2)},
        surprise=torch.zeros(6, 2, 1),
    )
    buffer = TrajectoryReplayBuffer(enable_cache=False)
    buffer.load_checkpoint(path)
    for _ in range(3):
        buffer.sample(4)
    for name in ("curr_obs.views", "curr_obs.by_number.3", "curr_obs.wide", "surprise"):
        warnings = [r.message for r in caplog.records if f"field {name} " in r.message]
        assert len(warnings) == 1, name
        assert f"trajectory_0_w.{suffix}" in warnings[0]
    notes = "\n".join(verify(path).notes)
    assert "field curr_obs.views is left out" in notes
    assert "field curr_obs.wide is kept, but never sampled: shape [4, 2]" in notes
    assert "field surprise is left out" in notes

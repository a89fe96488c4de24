"""Wrong values of every argument of buffers, loaders and samplers: an error of trajstore's that names the argument."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.feeding.test_loader import block
from tests.stores import writer_to
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions, saved_points, saved_state
from trajstore.buffer.internals import internals_of
from trajstore.buffer.sequences import sample_hindsight, sample_n_step, sample_sequences
from trajstore.errors import TrajstoreError
from trajstore.feeding import ReplayBufferDataset, ReplayLoader, TokenLoader
from trajstore.sampling import (
    Drawn,
    EpochSampler,
    FreshestSampler,
    GroupSampler,
    LeastUsedSampler,
    Priorities,
    Recency,
    Staleness,
    UseLimit,
    WeightedSampler,
    sampler_of,
)

WRONG: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "True": True,
    "x": "x",
    "3": "3",
    "[]": [],
    "[x]": ["x"],
    "{}": {},
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**30,
    "object": object(),
    "tensor": torch.ones(2, requires_grad=True),
}

Call = Callable[[TrajectoryReplayBuffer, Any], Any]


def drawn(buffer: TrajectoryReplayBuffer) -> Any:
    return buffer.draw(3)


def weighted(buffer: TrajectoryReplayBuffer) -> WeightedSampler:
    sampler = WeightedSampler(priorities=Priorities())
    buffer.follow(sampler)
    return sampler


CALLS: list[tuple[str, str, Call, str]] = [
    # method, argument as the message must name it, the call, values that are fine
    ("sample", "num_chunks", lambda b, v: b.sample(v), ""),
    ("sample", "columns", lambda b, v: b.sample(3, columns=v), "None"),
    ("sample", "out", lambda b, v: b.sample(3, out=v), "None {}"),
    ("sample", "sampler", lambda b, v: b.sample(3, sampler=v), "None"),
    ("sample_trajectories", "count", lambda b, v: b.sample_trajectories(v), ""),
    ("sample_trajectories", "sampler", lambda b, v: b.sample_trajectories(2, sampler=v), "None"),
    ("draw", "num_chunks", lambda b, v: b.draw(v), ""),
    ("draw", "sampler", lambda b, v: b.draw(2, sampler=v), "None"),
    ("read", "drawn", lambda b, v: b.read(v), ""),
    ("read", "columns", lambda b, v: b.read(drawn(b), columns=v), "None"),
    ("read", "out", lambda b, v: b.read(drawn(b), out=v), "None {}"),
    ("readable", "trajectory_ids", lambda b, v: internals_of(b).readable(v), "[]"),
    ("names_of", "trajectory_ids", lambda b, v: internals_of(b).names_of(v), "[]"),
    ("extents", "trajectory_ids", lambda b, v: internals_of(b).extents(v), "[]"),
    ("token_rows", "trajectory_ids", lambda b, v: internals_of(b).token_rows(v), "[]"),
    ("token_rows", "columns", lambda b, v: internals_of(b).token_rows([], v), "None [x]"),
    ("follow", "sampler", lambda b, v: b.follow(v), ""),
    ("update_priorities", "sampler", lambda b, v: b.update_priorities(v, drawn(b), [1, 1, 1]), ""),
    ("update_priorities", "drawn", lambda b, v: b.update_priorities(weighted(b), v, [1, 1, 1]), ""),
    ("update_priorities", "priorities", lambda b, v: b.update_priorities(weighted(b), drawn(b), v), ""),
    ("get", "trajectory_id", lambda b, v: b.get(v), "0 -1 3"),
    ("is_ready", "min_size", lambda b, v: b.is_ready(v), "0"),
    ("load_state_dict", "state", lambda b, v: b.load_state_dict(v), ""),
    ("add_trajectories", "add_trajectories|rajectory", lambda b, v: b.add_trajectories(v), "[]"),
    ("add_trajectories of one", "rajectory", lambda b, v: b.add_trajectories([v]), ""),
    ("add_flattened", "flats", lambda b, v: internals_of(b).add_flattened(v, b""), "[]"),
    ("add_flattened", "uuids", lambda b, v: internals_of(b).add_flattened([], v), ""),
    ("share_ids", "rank", lambda b, v: internals_of(b).share_ids(v, 1), "0"),
    ("share_ids", "ranks", lambda b, v: internals_of(b).share_ids(0, v), ""),
    ("flush", "timeout", lambda b, v: b.flush(v), "None 0 2.5"),
    ("wait", "ids", lambda b, v: b.wait(v, 0), "[]"),
    ("wait", "timeout", lambda b, v: b.wait([0], v), "None 0 2.5"),
    ("mirror.wait", "ids", lambda b, v: b.mirror.wait(v, 0), "None []"),
    ("evict", "ids", lambda b, v: b.evict(v), "[]"),
    ("points.pin", "name", lambda b, v: b.points.pin(v), "x 3"),
    ("points.unpin", "name", lambda b, v: b.points.unpin(v), "x 3"),
    ("points.save", "step", lambda b, v: b.points.save(v), "0"),
    ("points.save", "state", lambda b, v: b.points.save(1, v), "None {}"),
    ("points.save", "keep", lambda b, v: b.points.save(1, keep=v), "None"),
    ("points.rollback", "step", lambda b, v: b.points.rollback(v), "0"),
    ("points.rollback", "aside", lambda b, v: b.points.rollback(1, aside=v), "0 True"),
    ("points.take_back", "name", lambda b, v: b.points.take_back(v), "x 3"),
    ("save_checkpoint", "save_path", lambda b, v: b.save_checkpoint(v), "x 3"),
    ("save_checkpoint", "layout", lambda b, v: b.save_checkpoint("new", layout=v), ""),
    ("load_checkpoint", "load_path", lambda b, v: b.load_checkpoint(v), "x 3"),
    ("load_checkpoint", "pin", lambda b, v: b.load_checkpoint(b.auto_save_path, pin=v), "None x 3"),
    ("load_checkpoint", "strict", lambda b, v: b.load_checkpoint(b.auto_save_path, strict=v), "None True 0"),
    ("load_checkpoint", "is_distributed", lambda b, v: b.load_checkpoint(b.auto_save_path, v, 0, 1), "0 True"),
    ("load_checkpoint", "local_rank", lambda b, v: b.load_checkpoint(b.auto_save_path, True, v, 1), "0"),
    ("load_checkpoint", "world_size", lambda b, v: b.load_checkpoint(b.auto_save_path, True, 0, v), ""),
    ("open", "path", lambda b, v: TrajectoryReplayBuffer.open(v), "x 3"),
    ("open", "share", lambda b, v: TrajectoryReplayBuffer.open(b.auto_save_path, share=v), "None"),
    ("open", "pin", lambda b, v: TrajectoryReplayBuffer.open(b.auto_save_path, pin=v), "None x 3"),
    ("open", "strict", lambda b, v: TrajectoryReplayBuffer.open(b.auto_save_path, strict=v), "None True 0"),
    ("open", "seed", lambda b, v: TrajectoryReplayBuffer.open(b.auto_save_path, seed=v), "None 0 -1"),
    ("saved_points", "path", lambda b, v: saved_points(v), "x 3"),
    ("saved_state", "path", lambda b, v: saved_state(v, 0), "x 3"),
    ("saved_state", "step", lambda b, v: saved_state(b.auto_save_path, v), "0"),
    ("sample_sequences", "buffer", lambda b, v: sample_sequences(v, 1, 2), ""),
    ("sample_sequences", "count", lambda b, v: sample_sequences(b, v, 2, ends=[]), ""),
    ("sample_sequences", "length", lambda b, v: sample_sequences(b, 2, v, ends=[]), ""),
    ("sample_sequences", "pad", lambda b, v: sample_sequences(b, 2, 2, pad=v, ends=[]), "0 True"),
    ("sample_sequences", "sampler", lambda b, v: sample_sequences(b, 2, 2, sampler=v, ends=[]), "None"),
    ("sample_sequences", "columns", lambda b, v: sample_sequences(b, 2, 2, columns=v, ends=[]), "None"),
    ("sample_sequences", "ends", lambda b, v: sample_sequences(b, 2, 2, ends=v), "[] [x]"),
    ("sample_n_step", "count", lambda b, v: sample_n_step(b, v, 2, 0.9, ends=[]), ""),
    ("sample_n_step", "n:", lambda b, v: sample_n_step(b, 2, v, 0.9, ends=[]), ""),
    ("sample_n_step", "gamma", lambda b, v: sample_n_step(b, 2, 2, v, ends=[], terminations="rewards"), "0"),
    ("sample_n_step", "terminations", lambda b, v: sample_n_step(b, 2, 2, 0.9, ends=[], terminations=v), "x 3"),
    ("sample_hindsight", "count", lambda b, v: hindsight(b, count=v), ""),
    ("sample_hindsight", "goal", lambda b, v: hindsight(b, goal=v), "x 3"),
    ("sample_hindsight", "achieved", lambda b, v: hindsight(b, achieved=v), "x 3"),
    ("sample_hindsight", "reward", lambda b, v: hindsight(b, reward=v), ""),
    ("sample_hindsight", "share", lambda b, v: hindsight(b, share=v), "0"),
    ("sample_hindsight", "strategy", lambda b, v: hindsight(b, strategy=v), ""),
    ("sample_hindsight", "horizon", lambda b, v: hindsight(b, horizon=v), "0"),
    *(
        ("TrajectoryReplayBuffer", name, lambda b, v, name=name: TrajectoryReplayBuffer(**{name: v}), fine)  # type: ignore[misc]
        for name, fine in {
            "seed": "None 0 -1",
            "cache_size": "0",
            "sample_window_size": "0",
            "cache_bytes": "None 0",
            "enable_cache": "True 0",
            "auto_save": "True 0",
            "auto_save_path": "None x 3",
            "trajectory_format": "",
            "retention": "None",
            "writer": "None",
            "format_options": "None {}",
            "storage_options": "None {}",
            "on_commit": "None",
        }.items()
    ),
    *(
        ("WriterOptions", name, lambda b, v, name=name: WriterOptions(**{name: v}), fine)  # type: ignore[misc]
        for name, fine in {
            "threads": "",
            "max_pending_bytes": "",
            "shard_bytes": "",
            "snapshot_bytes": "0",
            "commit_interval": "0 2.5",
            "on_full": "",
        }.items()
    ),
    *(
        ("Retention", name, lambda b, v, name=name: Retention(**{name: v}), fine)  # type: ignore[misc]
        for name, fine in {
            **dict.fromkeys(("max_trajectories", "max_samples", "max_bytes"), "None"),
            "max_policy_age": "None 0",
        }.items()
    ),
    ("ReplayLoader", "replay", lambda b, v: ReplayLoader(v, 4), ""),
    ("ReplayLoader", "batch_size", lambda b, v: ReplayLoader(b, v), ""),
    *(
        ("ReplayLoader", name, lambda b, v, name=name: ReplayLoader(b, 4, **{name: v}), fine)  # type: ignore[misc]
        for name, fine in {
            "sampler": "None",
            "min_size": "0",
            "columns": "None [x]",
            "rank": "",
            "stores": "",
            "prefetch": "",
            "prefetch_bytes": "None",
            "device": "None",
            "timeout": "None 0 2.5",
            "demos": "None",
            "demo_share": "None",
            "min_demo_size": "None",
            "demo_sampler": "None",
            "reuse": "0 True",
        }.items()
    ),
    ("ReplayLoader", "demo_share", lambda b, v: ReplayLoader(b, 4, demos=b, demo_share=v), "None"),
    ("ReplayLoader", "min_demo_size", lambda b, v: ReplayLoader(b, 4, demos=b, min_demo_size=v), "None 0"),
    ("ReplayLoader", "state", lambda b, v: ReplayLoader(b, 4).load_state_dict(v), ""),
    (
        "ReplayLoader",
        "changed",
        lambda b, v: ReplayLoader(b, 4).load_state_dict(ReplayLoader(b, 4).state_dict(), changed=v),
        "0 True",
    ),
    ("TokenLoader", "buffer", lambda b, v: TokenLoader(v, 4), ""),
    ("TokenLoader", "tokens", lambda b, v: TokenLoader(b, v), ""),
    *(
        ("TokenLoader", name, lambda b, v, name=name: TokenLoader(b, 4, layout="padded", **{name: v}), fine)  # type: ignore[misc]
        for name, fine in {"batch_size": "", "lookahead": "", "long": "", "pad_id": "0 -1"}.items()
    ),
    ("TokenLoader", "layout", lambda b, v: TokenLoader(b, 4, layout=v), ""),
    ("ReplayBufferDataset", "replay", lambda b, v: ReplayBufferDataset(v, None, 4, 1, 1), ""),
    ("ReplayBufferDataset", "demos", lambda b, v: ReplayBufferDataset(b, v, 4, 1, 1), "None"),
    ("ReplayBufferDataset", "batch_size", lambda b, v: ReplayBufferDataset(b, None, v, 1, 1), ""),
    ("ReplayBufferDataset", "min_replay_buffer_size", lambda b, v: ReplayBufferDataset(b, None, 4, v, 1), "0"),
    ("ReplayBufferDataset", "min_demo_buffer_size", lambda b, v: ReplayBufferDataset(b, b, 4, 1, v), "0"),
    ("ReplayBufferDataset", "prefetch_size", lambda b, v: ReplayBufferDataset(b, None, 4, 1, 1, v), "0"),
    ("EpochSampler", "unit", lambda b, v: EpochSampler(unit=v), ""),
    ("EpochSampler", "epochs", lambda b, v: EpochSampler(epochs=v), "None"),
    ("FreshestSampler", "decay", lambda b, v: FreshestSampler(v), "0 2.5 huge"),
    ("FreshestSampler", "max_uses", lambda b, v: FreshestSampler(max_uses=v), "None"),
    ("LeastUsedSampler", "best", lambda b, v: LeastUsedSampler(v), ""),
    ("LeastUsedSampler", "max_uses", lambda b, v: LeastUsedSampler(max_uses=v), "None"),
    ("GroupSampler", "least", lambda b, v: GroupSampler(v), ""),
    ("GroupSampler", "most", lambda b, v: GroupSampler(most=v), "None"),
    ("GroupSampler", "max_age", lambda b, v: GroupSampler(max_age=v), "None 0"),
    ("WeightedSampler", "factors", lambda b, v: WeightedSampler(v), "[]"),
    ("WeightedSampler", "priorities", lambda b, v: WeightedSampler(priorities=v), "None"),
    ("WeightedSampler", "unit", lambda b, v: WeightedSampler(unit=v), ""),
    ("WeightedSampler", "stratified", lambda b, v: WeightedSampler(stratified=v), "0 True"),
    ("Priorities", "alpha", lambda b, v: Priorities(alpha=v), "0 2.5 huge"),
    ("Priorities", "beta", lambda b, v: Priorities(beta=v), "0 2.5 huge"),
    ("Priorities", "eps", lambda b, v: Priorities(eps=v), "0 2.5 huge"),
    ("Priorities", "per", lambda b, v: Priorities(per=v), ""),
    ("Recency", "half_life", lambda b, v: Recency(v), "2.5 huge"),
    ("Recency", "by", lambda b, v: Recency(1, v), ""),
    ("Staleness", "max_age", lambda b, v: Staleness(v), "0"),
    ("Staleness", "floor", lambda b, v: Staleness(1, v), "0"),
    ("UseLimit", "max_uses", lambda b, v: UseLimit(v), "None"),
    ("UseLimit", "cooldown", lambda b, v: UseLimit(cooldown=v), "0"),
    ("sampler_of", "sampler", lambda b, v: sampler_of(v), ""),
    ("sampler_of", "sampler", lambda b, v: sampler_of({"name": v}), ""),
    ("sampler_of", "recency", lambda b, v: sampler_of({"name": "weighted", "recency": v}), ""),
    ("update", "priorities", lambda b, v: weighted(b).update(drawn(b).ids, drawn(b).samples, v), ""),
    ("update", "ids", lambda b, v: weighted(b).update(v, np.zeros(0, np.int64), []), "[]"),
    ("value", "values", lambda b, v: LeastUsedSampler().value(np.arange(2), v), "tensor"),
    *(
        (type(sampler).__name__, "count", lambda b, v, s=sampler: b.follow(s) or s.draw(v, b._draws.generator), "")  # type: ignore[misc,func-returns-value]
        for sampler in (EpochSampler(), FreshestSampler(), LeastUsedSampler(), WeightedSampler())
    ),
]


def hindsight(buffer: TrajectoryReplayBuffer, **other: Any) -> Any:
    named = {"count": 2, "goal": "curr_obs.s", "achieved": "curr_obs.s", "reward": lambda a, g: (a == g).double()}
    return sample_hindsight(buffer, **{"ends": [], "share": 1.0, **named, **other})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


@pytest.fixture
def buffer(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrajectoryReplayBuffer]:
    monkeypatch.chdir(path)
    made = TrajectoryReplayBuffer(seed=1, auto_save=True, auto_save_path=path / "store", sample_window_size=0)
    with made:
        if not len(made):
            made.add_trajectories([block(key) for key in range(4)])
            made.points.save(0)
        yield made


@pytest.mark.parametrize(
    ("argument", "call", "fine"),
    [pytest.param(argument, call, fine, id=f"{who}-{argument}") for who, argument, call, fine in CALLS],
)
def test_wrong_values(
    buffer: TrajectoryReplayBuffer, argument: str, call: Call, fine: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="trajstore")
    wrong = []
    for label, value in WRONG.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(buffer, value)
        except (TrajstoreError, ValueError, TypeError) as error:
            named = any(name in str(error) for name in argument.split("|"))
            if label not in fine.split() and not named:
                wrong.append(f"{label}: {type(error).__name__}: {error}")
            elif label in fine.split() and not isinstance(error, TrajstoreError):
                wrong.append(f"{label} (fine): {type(error).__name__}: {error}")
        except Exception as error:
            wrong.append(f"{label}: {type(error).__name__}: {error}")
        else:
            if label not in fine.split():
                wrong.append(f"{label}: was taken")
    assert wrong == []


def test_columns_that_there_are_not_are_named_with_those_that_there_are(buffer: TrajectoryReplayBuffer) -> None:
    with pytest.raises(TrajstoreError, match=r"columns: no trajectory has zz; there are curr_obs\.s, rewards"):
        buffer.sample(3, columns=["zz", "rewards"])
    with pytest.raises(TrajstoreError, match=r"columns: 'rewards' is one text, .* columns=\['rewards'\]"):
        buffer.sample(3, columns="rewards")


def test_priorities_of_a_tensor_with_a_gradient_or_of_half_precision_count(buffer: TrajectoryReplayBuffer) -> None:
    sampler = weighted(buffer)
    batch = buffer.sample(4, sampler=sampler)
    given = [torch.full((4,), 2.0, requires_grad=True), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    powers = []
    for priorities in given:
        assert buffer.update_priorities(sampler, batch.drawn, priorities) == 0
        powers.append(sampler.state_dict()["powers"])
    assert torch.equal(*powers)
    assert float(powers[0].max()) > 1.5


@pytest.mark.parametrize("rows", [([0], [0]), (np.arange(2), np.arange(1)), (np.ones(1), np.zeros(1, np.int64))])
def test_rows_that_nobody_drew(buffer: TrajectoryReplayBuffer, rows: Any) -> None:
    with pytest.raises(TrajstoreError, match=r"^drawn"):
        buffer.read(Drawn(*rows))


def test_storage_options_for_a_local_path_are_told(path: Path, buffer: TrajectoryReplayBuffer) -> None:
    options = {"key": "x"}
    calls: list[Callable[[], Any]] = [
        lambda: writer_to(path / "another", storage_options=options).close(),
        lambda: TrajectoryReplayBuffer.open(path / "store", storage_options=options),
        lambda: saved_points(path / "store", **options),
        lambda: saved_state(path / "store", 0, **options),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="storage_options: key: no effect on .* which is a local path"):
            call()


def test_another_format_of_an_existing_store_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for form, told in (("zarr", 0), ("zarr", 0), ("pt", 1), ("pt", 0)):
        caplog.clear()
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, trajectory_format=form) as buffer:
            buffer.add_trajectories([block(0)])
        assert caplog.text.count("newest shard is of format zarr, and new ones are written as pt") == told

"""Wrong values of any argument of buffers, loaders and samplers raise trajstore errors that name it."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajstore.loader
import trajstore.points
import trajstore.samplers
from tests.feeding.test_loader import block
from tests.stores import stored, writer_to
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore._core.buffer.sequences import sample_n_step
from trajstore.errors import TrajstoreError
from trajstore.interop.convert import convert_to
from trajstore.ledger import Ledger
from trajstore.loader import ReplayBufferDataset, ReplayLoader, Share
from trajstore.points import points_at
from trajstore.samplers import Drawn, EpochSampler, Priorities, WeightedSampler, sampler_of

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
    "1j": 1j,
    "[1j]": torch.ones(3, dtype=torch.complex64),
    "0-d": np.array(1.5),
    "object array": np.array([2, None, 1j], object),
    "long": "n" * 256,
    "nul": "a\0b",
}

NAMES = "x 3 long nul"

Call = Callable[[TrajectoryReplayBuffer, Any], Any]

FINE: dict[str, dict[str, str]] = {
    # By callable and argument: labels of the wrong values above that are valid there.
    "sample": {"num_chunks": "", "columns": "None", "out": "None {}", "sampler": "None"},
    "sample_trajectories": {"count": "", "sampler": "None"},
    "draw": {"num_chunks": "", "sampler": "None"},
    "read": {"drawn": "", "columns": "None", "out": "None {}"},
    "update_priorities": {"sampler": "", "drawn": "", "priorities": ""},
    "get": {"trajectory_id": "0 -1 3"},
    "is_ready": {"min_size": "0"},
    "add_rollouts": {"columns": "{}", "prompts": "None", "starts": "None"},
    "load_state_dict": {"state": ""},
    "flush": {"timeout": "None 0 2.5"},
    "wait": {"ids": "[]", "timeout": "None 0 2.5"},
    "mirror.wait": {"ids": "None []"},
    "evict": {"ids": "[]"},
    "points.pin": {"name": "x 3"},
    "points.remove": {"name": f"0 {NAMES}"},
    "points.save": {"step": "0", "state": "None {}", "keep": "None"},
    "points.rollback": {"step": "0", "aside": "0 True"},
    "points.go_to": {"name": f"0 {NAMES}", "aside": "0 True"},
    "save_checkpoint": {"save_path": NAMES, "layout": ""},
    "load_checkpoint": {"load_path": NAMES, "pin": f"None {NAMES}", "strict": "None True 0"},
    "open": {"path": NAMES, "share": "None", "pin": f"None {NAMES}", "strict": "None True 0", "seed": "None 0 -1"},
    "points.changes": {"name": f"0 {NAMES}", "aside": "0 True"},
    "points.state": {"name": f"0 {NAMES}"},
    "points_at": {"path": NAMES},
    "sample_sequences": {
        **{"buffer": "", "count": "", "length": "", "pad": "0 True"},
        **{"sampler": "None", "columns": "None", "ends": "[] [x]"},
    },
    "sample_n_step": {"count": "", "gamma": "0", "terminations": NAMES},
    "sample_hindsight": {
        **{"count": "", "goal": NAMES, "achieved": NAMES, "reward": "", "share": "0", "strategy": "", "horizon": "0"}
    },
    "TrajectoryReplayBuffer": {
        **{"seed": "None 0 -1", "cache_size": "0", "sample_window_size": "0", "cache_bytes": "None 0"},
        **{"enable_cache": "True 0", "auto_save": "True 0", "auto_save_path": f"None {NAMES}", "trajectory_format": ""},
        **{"retention": "None", "writer": "None", "format_options": "None {}", "storage_options": "None {}"},
        **{"on_commit": "None", "store_frames_once": "None True 0"},
    },
    "WriterOptions": {**dict.fromkeys(("threads", "max_pending_bytes", "shard_bytes"), ""), "commit_interval": "0 2.5"},
    "Retention": {**dict.fromkeys(("max_trajectories", "max_bytes"), "None"), "max_policy_age": "None 0"},
    "ReplayLoader": {
        **dict.fromkeys(("replay", "batch_size", "rank", "stores", "prefetch"), ""),
        **dict.fromkeys(("sampler", "device"), "None"),
        **{"min_size": "0", "columns": "None [x]", "timeout": "None 0 2.5", "reuse": "0 True"},
        "ledger": "None",
    },
    "TokenLoader": {**dict.fromkeys(("buffer", "tokens", "batch_size", "long", "layout"), ""), "pad_id": "0 -1"},
    "ReplayBufferDataset": {"batch_size": "", "min_replay_buffer_size": "0", "prefetch_size": "0"},
    "EpochSampler": {"unit": "", "epochs": "None"},
    "GroupSampler": {"least": "", "most": "None", "max_age": "None 0"},
    "WeightedSampler": {"factors": "[]", "priorities": "None", "unit": ""},
    "Priorities": {"alpha": "0 2.5 huge", "beta": "0 2.5 huge", "eps": "0 2.5 huge", "per": ""},
    "Recency": {"half_life": "2.5 huge", "by": ""},
    "Staleness": {"max_age": "0", "floor": "0"},
    "UseLimit": {"max_uses": "None", "cooldown": "0"},
}

GOOD: dict[str, Any] = {
    # Values of required arguments that are not under test; functions get the buffer.
    **{"num_chunks": 2, "count": 2, "n": 2, "length": 2, "gamma": 0.9, "priorities": [1, 1, 1], "batch_size": 4},
    **{"samples_per_insert": 1, "tolerance": 1},
    **{"trajectory_ids": [], "flats": [], "uuids": b"", "rank": 0, "ranks": 1, "step": 1, "save_path": "new"},
    **{"goal": "curr_obs.s", "achieved": "curr_obs.s", "tokens": 4, "max_age": 1, "half_life": 1, "demo_buffer": None},
    **{"min_replay_buffer_size": 1, "min_demo_buffer_size": 1, "reward": lambda _: lambda a, g: (a == g).double()},
    **dict.fromkeys(("buffer", "replay", "replay_buffer"), lambda b: b),
    **dict.fromkeys(("path", "load_path"), lambda b: b._path),
    **{"drawn": lambda b: b.draw(3), "sampler": lambda b: weighted(b)},
    **{"columns": {"input_ids": torch.arange(3)}, "lengths": [3], "documents": [{}]},
}
MODULES = (trajstore, trajstore.loader, trajstore.samplers, trajstore.points)
ALSO: dict[str, dict[str, Any]] = {
    **{"wait": {"ids": [0], "timeout": 0}, "mirror.wait": {"timeout": 0}, "TokenLoader": {"layout": "padded"}},
    **{
        **{call: {"name": "x"} for call in ("points.go_to", "points.changes", "points.state")},
        "sample_sequences": {"ends": []},
        "sample_n_step": {"ends": [], "terminations": "rewards"},
    },
    **{"sample_hindsight": {"ends": [], "share": 1.0}, "sample": {"num_chunks": 2}},
}
"""Arguments with another value than their default."""


def weighted(buffer: TrajectoryReplayBuffer) -> WeightedSampler:
    sampler = WeightedSampler(priorities=Priorities())
    sampler.follow(buffer)
    return sampler


def calling(name: str, argument: str) -> Call:
    """Return a call with a value for one argument and valid ones for the other required arguments."""

    def call(buffer: TrajectoryReplayBuffer, value: Any) -> Any:
        function = next((getattr(module, name) for module in MODULES if hasattr(module, name)), None)
        if function is None:
            function = attrgetter(name)(buffer)
        given = dict(ALSO.get(name, {}))
        for parameter in inspect.signature(function).parameters.values():
            if (
                parameter.default is parameter.empty
                and parameter.kind is not parameter.VAR_KEYWORD
                and parameter.name not in (*given, argument)
            ):
                good = GOOD[parameter.name]
                given[parameter.name] = good(buffer) if callable(good) else good
        return function(**{**given, argument: value})

    return call


CALLS: list[tuple[str, str, Call, str]] = [
    *((name, argument, calling(name, argument), fine) for name, of in FINE.items() for argument, fine in of.items()),
    # calls whose message names another argument, or that need further arguments
    ("sample_window_size", "sample_window_size", lambda b, v: setattr(b, "sample_window_size", v), "0"),
    ("add_trajectories", "add_trajectories|rajectory", lambda b, v: b.add_trajectories(v), "[]"),
    ("add_trajectories of one", "rajectory", lambda b, v: b.add_trajectories([v]), ""),
    ("add_rollouts", "lengths|documents", lambda b, v: b.add_rollouts(GOOD["columns"], v, [{}]), ""),
    ("add_rollouts", "document", lambda b, v: b.add_rollouts(GOOD["columns"], [3], v), ""),
    ("load_checkpoint", "is_distributed", lambda b, v: b.load_checkpoint(b._path, v, 0, 1), "0 True"),
    ("load_checkpoint", "local_rank", lambda b, v: b.load_checkpoint(b._path, True, v, 1), "0"),
    ("load_checkpoint", "world_size", lambda b, v: b.load_checkpoint(b._path, True, 0, v), ""),
    ("sample_n_step", "n:", lambda b, v: sample_n_step(b, 2, v, 0.9, ends=[]), ""),
    ("ReplayLoader", "weight", lambda b, v: ReplayLoader({"a": Share(b), "b": Share(b, weight=v)}, 4), "None 2.5"),
    ("ReplayLoader", "count", lambda b, v: ReplayLoader({"a": Share(b), "b": Share(b, count=v)}, 4), "None"),
    ("ReplayLoader", "state", lambda b, v: ReplayLoader(b, 4).load_state_dict(v), ""),
    (
        "ReplayLoader",
        "changed",
        lambda b, v: ReplayLoader(b, 4).load_state_dict(ReplayLoader(b, 4).state_dict(), changed=v),
        "0 True",
    ),
    ("ReplayBufferDataset", "replay", lambda b, v: ReplayBufferDataset(v, None, 4, 1, 1), ""),
    ("ReplayBufferDataset", "demo", lambda b, v: ReplayBufferDataset(b, v, 4, 1, 1), "None"),
    ("ReplayBufferDataset", "min_demo_buffer_size", lambda b, v: ReplayBufferDataset(b, b, 4, 1, v), "0"),
    ("sampler_of", "sampler", lambda b, v: sampler_of(v), ""),
    ("annotate", "who", lambda b, v: annotate(b, [], {}, who=v), f"None {NAMES}"),
    ("Ledger", "path", lambda _, v: Ledger(v).close(), NAMES),
    ("convert_to", "where", lambda b, v: convert_to(b._path, "new", "lerobot", where=v), f"None {NAMES}"),
    ("convert_to", "pin", lambda b, v: convert_to(b._path, "new", "jsonl", pin=v), f"None {NAMES}"),
    ("sampler_of", "sampler", lambda b, v: sampler_of({"name": v}), ""),
    ("sampler_of", "recency", lambda b, v: sampler_of({"name": "weighted", "recency": v}), ""),
    ("update", "priorities", lambda b, v: weighted(b).update(b.draw(3).ids, b.draw(3).samples, v), ""),
    ("update", "ids", lambda b, v: weighted(b).update(v, np.zeros(0, np.int64), []), "[]"),
    *(
        (type(sampler).__name__, "count", lambda b, v, s=sampler: s.follow(b) or s.draw(v, b._draws.generator), "")  # type: ignore[misc,func-returns-value]
        for sampler in (EpochSampler(), WeightedSampler())
    ),
]


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


def test_the_number_of_transitions_is_named_by_what_it_counts(buffer: TrajectoryReplayBuffer) -> None:
    for call in (buffer.sample, buffer.draw):
        with pytest.raises(TrajstoreError, match=r"num_chunks \(the number of transitions\): 0, must be at least 1"):
            call(0)


def test_priorities_of_a_tensor_with_a_gradient_or_of_half_precision_count(buffer: TrajectoryReplayBuffer) -> None:
    sampler = weighted(buffer)
    batch = buffer.sample(4, sampler=sampler)
    given = [torch.full((4,), 2.0, requires_grad=True), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    kept = []
    for priorities in given:
        assert buffer.update_priorities(sampler, batch.drawn, priorities) == 0
        kept.append(sampler.state_dict()["priorities"])
    assert torch.equal(*kept)
    assert float(kept[0].max()) > 1.5


@pytest.mark.parametrize("rows", [([0], [0]), (np.arange(2), np.arange(1)), (np.ones(1), np.zeros(1, np.int64))])
def test_rows_that_nobody_drew(buffer: TrajectoryReplayBuffer, rows: Any) -> None:
    with pytest.raises(TrajstoreError, match=r"^drawn"):
        buffer.read(Drawn(*rows))


def test_storage_options_for_a_local_path_are_told(path: Path, buffer: TrajectoryReplayBuffer) -> None:
    options = {"key": "x"}
    calls: list[Callable[[], Any]] = [
        lambda: writer_to(path / "another", storage_options=options).close(),
        lambda: TrajectoryReplayBuffer.open(path / "store", storage_options=options),
        lambda: points_at(path / "store", **options).saved,
        lambda: points_at(path / "store", **options).state(0),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="storage_options: key: no effect on .* which is a local path"):
            call()


def test_another_format_of_an_existing_store_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for form, count in (("zarr", 0), ("zarr", 0), ("pt", 1), ("pt", 0)):
        caplog.clear()
        stored(tmp_path, [block(0)], trajectory_format=form)
        assert caplog.text.count("newest shard has format zarr, and new ones get pt") == count

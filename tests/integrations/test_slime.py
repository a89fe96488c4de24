"""The functions for slime, with its arguments and a sample as its public source has it (August 2026)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_hooks.integrations.slime import ReplayDataSource, record_sample, record_samples, recording_of
from trajstore.errors import ConfigurationError, InvalidTrajectoryError


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    """The fields of slime's Sample that are read here, and one that is not known here."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        known = {item.name for item in fields(Sample)}
        return Sample(
            **{name: value for name, value in data.items() if name in known} | {"status": Status(data["status"])}
        )


class Source:
    """A data source of two prompts, again and again."""

    def __init__(self, args: Any) -> None:
        self.args, self.saved = args, []
        self.added: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        again = [self.added.pop() for _ in self.added[:num_samples]]
        return again + [
            [Sample(prompt=f"p{at % 2}", index=10 * at + n, group_index=at, label="4") for n in range(3)]
            for at in range(num_samples - len(again))
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.added += samples

    def save(self, rollout_id: int) -> None:
        self.saved.append(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self.saved.append(rollout_id)

    def __len__(self) -> int:
        return 2


def generate(sample: Sample, version: str, **changes: Any) -> Sample:
    """Fill a sample as slime's default function does, with a token of a tool."""
    values = {
        "tokens": [1, 2, 30 + (sample.index or 0), 4, 5], "response_length": 3, "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25], "weight_versions": [version], "status": Status.COMPLETED,
        "response": "four", "reward": 1.0,
    }  # fmt: skip
    for name, value in (values | changes).items():
        setattr(sample, name, value)
    return sample


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setitem(sys.modules, "slime_of_tests", SimpleNamespace(Source=Source))  # type: ignore[arg-type]
    made: list[Any] = []

    def make(**options: Any) -> Any:
        defaults = {
            "trajstore_path": str(tmp_path / "store"),
            "trajstore_source": "slime_of_tests.Source",
            "use_tis": True,
        }
        made.append(SimpleNamespace(**defaults | options))
        return made[-1]

    yield make
    for args in made:
        if getattr(args, "trajstore_path", None):
            recording_of(args).buffer.close()


def step(args: Any, source: ReplayDataSource, version: str, hook: bool, **changes: Any) -> list[list[Sample]]:
    """Run one rollout step as slime does, and return its groups."""
    groups = source.get_samples(2)
    for sample in [sample for group in groups for sample in group if sample.status is Status.PENDING]:
        generate(sample, version, **changes | ({"reward": None} if hook else {}))
        if hook:
            record_sample(args, sample)
            sample.reward = changes.get("reward", 1.0)
    record_samples(args, groups, source)
    return groups


@pytest.mark.parametrize("hook", [True, False], ids=["on arrival", "after the step"])
@pytest.mark.parametrize("reward", [0.5, {"acc": 0.5, "why": "short"}], ids=["number", "dict"])
def test_a_step_is_recorded_and_replayed_in_a_later_one(arguments: Callable[..., Any], hook: bool, reward: Any) -> None:
    args = arguments(trajstore_replay=1, reward_key="acc" if isinstance(reward, dict) else None)
    source = ReplayDataSource(args)
    first = step(args, source, "1", hook, reward=reward)
    assert all(sample.metadata.keys() == {"trajectory_id"} for group in first for sample in group)
    step(args, source, "2", hook, reward=reward)
    groups = source.get_samples(2)
    assert len(recording_of(args).buffer) == 12
    for group in groups:
        assert [sample.status for sample in group] == [Status.PENDING, Status.PENDING, Status.COMPLETED]
        again, before = group[2], {tuple(sample.tokens): sample for old in first for sample in old}
        old = before[tuple(again.tokens)]
        assert again.prompt == group[0].prompt
        assert (again.index, again.group_index) == (group[1].index + 1, group[0].group_index)
        for name in ("response_length", "response", "loss_mask", "rollout_log_probs", "weight_versions", "label"):
            assert getattr(again, name) == getattr(old, name), name
        assert again.reward == (reward if not (hook and isinstance(reward, dict)) else {"acc": 0.5})
        assert again.metadata == {"replayed": True}
    record_samples(args, groups, source)
    assert len(recording_of(args).buffer) == 12, "neither replayed samples nor pending ones"
    stored = recording_of(args).buffer.get(0)
    assert (stored.reward.outcome, stored.policy_version, stored.is_terminated) == (0.5, 1, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"multimodal_train_inputs": {"pixels": object()}}, "multimodal_train_inputs"),
        ({"weight_versions": []}, "weight_versions"),
        ({"rollout_id": 77}, "rollout_id"),
        ({"rollout_log_probs": None}, None),
        ({"reward": None}, None),
        ({"reward": float("nan")}, None),
        ({"tokens": [1, 2], "response_length": 0, "loss_mask": [], "rollout_log_probs": []}, None),
    ],
)
def test_samples_that_cannot_be_trained_again_are_recorded_only(
    arguments: Callable[..., Any], caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str | None
) -> None:
    args = arguments(trajstore_replay=1)
    source = ReplayDataSource(args)
    step(args, source, "1", False, **changes)
    step(args, source, "2", False, weight_versions=["2"])
    assert len(recording_of(args).buffer) == 12
    assert all(sample.status is Status.PENDING for group in source.get_samples(2) for sample in group)
    assert reason is None or any(f"without {reason}, and is not replayed" in text for text in caplog.messages)


def test_groups_that_were_begun_pass_unchanged(arguments: Callable[..., Any]) -> None:
    args = arguments(trajstore_replay=2)
    source = ReplayDataSource(args)
    for version in ("1", "2"):
        step(args, source, version, False)
    begun = [generate(Sample(prompt="p0", index=n), "2", status=Status.ABORTED) for n in range(3)]
    source.add_samples([begun])
    first, second = source.get_samples(2)
    assert first is begun
    assert [sample.status for sample in second] == [Status.PENDING, Status.COMPLETED, Status.COMPLETED]
    record_samples(args, [begun], source)
    assert len(recording_of(args).buffer) == 12, "no aborted ones"
    source.save(3)
    source.load()
    assert (source.saved, len(source)) == ([3, None], 2)


def test_wrong_options(arguments: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="trajstore_path: missing; set it in the YAML file"):
        ReplayDataSource(arguments(trajstore_path=None))
    with pytest.raises(ConfigurationError, match="set --use-tis or --use-rollout-logprobs"):
        ReplayDataSource(arguments(trajstore_replay=1, use_tis=False))
    with pytest.raises(InvalidTrajectoryError, match="loss_mask has 2 values for 3"):
        record_samples(arguments(), [[generate(Sample(index=1), "1", loss_mask=[1, 1])]])
    record_sample(arguments(), generate(Sample(index=1), "1"), evaluation=True)
    assert len(recording_of(arguments()).buffer) == 0


@pytest.mark.parametrize(("interval", "own"), [(1, None), (2, None), (1, 5)])
def test_ages_count_over_restarts_although_slime_counts_weight_versions_anew(
    arguments: Callable[..., Any], interval: int, own: int | None
) -> None:
    """Three jobs on one store; the second resumes from an earlier checkpoint. With ``own``, the user sets the count."""
    age = 2
    for begin, end in ((0, 12), (8, 20), (20, 30)):
        start = 0 if own is None else begin // interval + own
        args = arguments(
            trajstore_replay=1,
            trajstore_max_staleness=age,
            update_weights_interval=interval,
            update_weight_start_version=start,
        )
        source = ReplayDataSource(args)
        source.load(begin - 1)
        for rollout in range(begin, end):
            version = start + 1 + (rollout - begin) // interval
            step_version = begin // interval + version - start
            groups = source.get_samples(2)
            replayed = [sample for group in groups for sample in group if sample.status is Status.COMPLETED]
            ages = [step_version - int(sample.response) for sample in replayed]
            assert all(0 <= one <= age + 1 for one in ages), ages
            assert len(replayed) == 2 or (begin == 0 and rollout < 2 * interval), rollout
            for sample in [sample for group in groups for sample in group if sample.status is Status.PENDING]:
                generate(sample, str(version), response=str(step_version))
            record_samples(args, groups, source)
        recording_of(args).buffer.close()


@pytest.mark.parametrize("start", [None, 0, 32])
def test_ages_count_on_without_a_data_source_that_names_its_rollout(
    arguments: Callable[..., Any], caplog: pytest.LogCaptureFixture, start: int | None
) -> None:
    """Three jobs that do not call ``load``; with ``start``, the user continues the count of the second one."""
    ages = []
    for job, first in enumerate((0, start or 0, 0)):
        args = arguments(trajstore_replay=1, trajstore_max_staleness=2, update_weight_start_version=first)
        source = ReplayDataSource(args)
        for version in range(1, 6):
            step_version = 32 * job + version
            groups = source.get_samples(2)
            for sample in (sample for group in groups for sample in group):
                if sample.status is Status.COMPLETED:
                    ages.append((job, version, int(sample.response.split("-")[0]) - job, step_version))
                else:
                    generate(sample, str(first + version), response=f"{job}-{version}")
            record_samples(args, groups, source)
        stored = recording_of(args).buffer
        newest = max(stored.get(number).policy_version or 0 for number in stored.trajectory_ids.tolist())
        stored.close()
        assert newest == {0: 5, 1: 37 if start else 11, 2: 43 if start else 17}[job]
    assert {job for job, *_ in ages} == {0, 1, 2}
    assert {behind for _, version, behind, _ in ages if version > 3} == {0}, "no longer of the job before"
    assert caplog.text == ""


@dataclass
class Adapter:
    """An adapter of miles' multi-LoRA."""

    name: str
    slot: int


@dataclass
class MilesSample(Sample):
    """A sample with fields of miles; those of slime that it lacks are class attributes of no sample."""

    routing_key: str | None = None
    adapter: Adapter | None = None
    rollout_indexer_topk: Any = None
    opd_reverse_kl: list[float] | None = None

    def __post_init__(self) -> None:
        del self.session_id

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> MilesSample:
        known = {item.name for item in fields(MilesSample)} - {"session_id"}
        return MilesSample(
            **{name: value for name, value in data.items() if name in known} | {"status": Status(data["status"])}
        )


class MilesSource(Source):
    """Two prompts, alternately for two adapters."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [
            [
                MilesSample(
                    prompt="p",
                    index=10 * at + n,
                    group_index=at,
                    routing_key=f"{at}-{n}",
                    adapter=Adapter(f"a{at}", at),
                )
                for n in range(3)
            ]
            for at in range(num_samples)
        ]


def test_samples_of_miles_are_replayed_for_their_own_adapter(
    arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "miles_of_tests", SimpleNamespace(Source=MilesSource))  # type: ignore[arg-type]
    args = arguments(trajstore_replay=1, trajstore_source="miles_of_tests.Source")
    source = ReplayDataSource(args)
    for version in ("1", "2"):
        for at, group in enumerate(groups := source.get_samples(2)):
            for sample in group:
                if sample.status is Status.PENDING:
                    generate(sample, version, response=f"of a{at}")
        record_samples(args, groups, source)
    for at, group in enumerate(source.get_samples(2)):
        assert [sample.status for sample in group] == [Status.PENDING, Status.PENDING, Status.COMPLETED]
        assert group[2].response == f"of a{at}"
        assert (group[2].adapter, group[2].routing_key) == (Adapter(f"a{at}", at), f"{at}-2")  # type: ignore[attr-defined]
    record_samples(args, [[generate(MilesSample(prompt="q", index=1), "3", opd_reverse_kl=[0.1], new_field={1, 2})]])
    assert "without opd_reverse_kl" in caplog.text
    assert "new_field" in caplog.text


@pytest.mark.parametrize("option", ["recompute_logprobs_via_prefill", "mask_offpolicy_in_partial_rollout"])
def test_arguments_that_make_replay_useless_are_refused(arguments: Callable[..., Any], option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{option.replace('_', '-')}"):
        ReplayDataSource(arguments(trajstore_replay=1, **{option: True}))
    ReplayDataSource(arguments(**{option: True}))

"""The buffer against a dict: equal after each of a series of random operations."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.stateful.machines import Twinned, long, short
from tests.stores import keys_at, writer_to
from tests.support.witness import check_batch, check_trajectory, rows_of, witness
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.buffer.sink import StoreSink
from trajstore._core.formats import FORMATS
from trajstore.operations.verify import verify

LIMIT = 10


class Twin(Twinned):
    """Covers draws, retention, checkpoints and late values; ``test_snapshots`` covers points and pins."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint: tuple[dict[int, int], torch.Tensor, dict[int, dict[str, Any]]] | None = None
        self.notes: dict[int, dict[str, Any]] = {}

    @initialize(fmt=st.sampled_from(list(FORMATS)), limited=st.booleans(), window=st.sampled_from([5, 1, 0, 100]))
    def begin(self, fmt: str, limited: bool, window: int) -> None:
        self.retention = Retention(max_trajectories=LIMIT) if limited else Retention()
        self.window = window
        self.open(fmt, cached=True)
        self.add(3)

    def open(self, fmt: str, *, cached: bool) -> None:
        options = WriterOptions(commit_interval=0.001, shard_bytes=60_000)
        kept = {"enable_cache": cached, "cache_size": 2, "retention": self.retention, "writer": options}
        store = self.path / "store"
        self.buffer = writer_to(store, seed=1, sample_window_size=self.window, trajectory_format=fmt, **kept)
        self.buffer.load_state_dict({"seed": 9, "rng_state": self.generator.get_state()})
        assert self.buffer.seed == 9

    def finish_adding(self) -> None:
        """Flush, so that retention is applied, and apply it to the twin."""
        self.buffer.flush()
        if self.retention.max_trajectories is not None:
            self.twin = dict(list(self.twin.items())[-LIMIT:])

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        self.add_some(count)
        self.finish_adding()

    @rule()
    def flush(self) -> None:
        self.finish_adding()

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.twin)), unique=True, max_size=3))
        self.buffer.evict(chosen)
        for number in chosen:
            del self.twin[number]

    @precondition(lambda self: self.twin)
    @rule(data=st.data(), value=st.none() | st.integers(0, 3), inbox=st.booleans())
    def annotate(self, data: Any, value: int | None, inbox: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.twin)), unique=True, min_size=1, max_size=3))
        values = (
            {"score": 1.0, "tag": "t"}
            if value is None
            else {"score": value, "tag": None if value and self.is_given("tag") else "é"}
        )
        annotate(self.path / "store" if inbox else self.buffer, chosen, values)
        if inbox:
            self.take_in()
        for number in chosen:
            self.notes[number] = self.notes.get(number, {}) | values

    def is_given(self, name: str) -> bool:
        """Return whether any trajectory has such a value, which retraction needs."""
        return any(self.notes.get(number, {}).get(name) is not None for number in self.twin)

    @precondition(lambda self: self.twin)
    @rule(data=st.data(), value=st.integers(0, 50), back=st.booleans())
    def give_rows(self, data: Any, value: int, back: bool) -> None:
        """Give a value to each row, or retract those of some trajectories."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.twin)), unique=True, min_size=1, max_size=3))
        given = None if back and self.is_given("rows") else value
        rows = [torch.full(witness(self.twin[number]).rewards.shape[:2], float(value)) for number in chosen]  # type: ignore[union-attr]
        annotate(self.buffer, chosen, {"rows": None if given is None else rows})
        for number in chosen:
            self.notes[number] = self.notes.get(number, {}) | {"rows": given}

    @rule()
    def compact(self) -> None:
        self.buffer.compact()

    def take_in(self) -> None:
        backing = self.buffer._sink
        assert isinstance(backing, StoreSink)
        backing.writer.inbox.take_in()

    @precondition(lambda self: len(self.twin) > LIMIT - 3)  # rarely enough for other operations
    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.twin = {}

    @precondition(lambda self: self.twin)
    @rule(count=st.integers(1, 12))
    def sample(self, count: int) -> None:
        keys = list(self.twin.values())[-self.window :]
        window = [rows for key in keys for rows in witness(key).curr_obs["tag"].reshape(-1)]
        drawn = torch.randint(0, len(window), (min(count, len(window)),), generator=self.generator)
        expected = rows_of(torch.stack([window[number] for number in drawn.tolist()]))
        batch = self.buffer.sample(count)
        check_batch(batch)
        assert torch.equal(batch["curr_obs"]["tag"], expected["curr_obs.tag"])
        assert torch.equal(batch["rewards"], expected["rewards"])

    @rule(fmt=st.sampled_from(list(FORMATS)), cached=st.booleans())
    def reopen(self, fmt: str, cached: bool) -> None:
        self.buffer.close()
        assert verify(self.path / "store").sound
        self.open(fmt, cached=cached)

    @rule()
    def save(self) -> None:
        self.buffer.save_checkpoint(self.path / "checkpoint")
        self.checkpoint = dict(self.twin), self.generator.get_state(), dict(self.notes)

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def load(self) -> None:
        assert self.checkpoint is not None
        expected, state, notes = self.checkpoint
        assert keys_at(self.path / "checkpoint") == expected
        other = TrajectoryReplayBuffer(sample_window_size=5)
        other.load_checkpoint(self.path / "checkpoint")
        check_notes(other, notes)
        assert torch.equal(other.state_dict()["rng_state"], state)
        other.close()

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "buffer"):
            return
        for number, key in list(self.twin.items())[::3]:
            assert check_trajectory(self.buffer.get(number)) == key
        check_notes(self.buffer, self.notes)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            assert keys_at(self.path / "store") == self.twin
            with TrajectoryReplayBuffer.open(self.path / "store") as reader:
                check_notes(reader, self.notes)
        self.temporary.cleanup()


def check_notes(buffer: TrajectoryReplayBuffer, expected: dict[int, dict[str, Any]]) -> None:
    """Compare the late values of all visible trajectories."""
    for row in buffer.query().rows():
        notes = expected.get(row["trajectory_id"], {})
        assert {name: row.get(name) for name in ("score", "tag")} == {
            name: notes.get(name) for name in ("score", "tag")
        }
    for number in buffer.trajectory_ids.tolist()[::3]:
        rows, value = buffer.get(number).notes.get("rows"), expected.get(number, {}).get("rows")
        assert rows is None if value is None else rows.unique().tolist() == [value]


TestTwin = short(Twin, 5, 25)
TestLongTwin = long(Twin, 400)

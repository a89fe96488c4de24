"""The process that is killed: it uses a store in every way it can, and writes down what it was promised."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

import torch

from tools.crash.journal import KEEP, Journal
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore.testing.witness import check_batch, check_trajectory, witness

FORMATS = ("pt", "zarr", "pt", "pkl")
_KEYS_PER_ROUND = 1 << 20


def torture(folder: str, round_number: int, seed: int) -> None:
    """Use the store in ``folder`` until killed; that the journal is there says that it has begun."""
    import tools.crash.warm  # noqa: F401  # the fork server may lack it

    torch.set_num_threads(1)
    journal = Journal(Path(folder) / f"journal_{round_number:06d}")
    child = Child(Path(folder), round_number, random.Random(f"{seed}/{round_number}"), journal)
    child.open()
    while True:
        child.step()


class Notes(Protocol):
    """Where a child writes down what it was promised."""

    def note(self, event: str, **values: Any) -> None:
        """Take one entry, so that it is there when this returns."""


class Child:
    """Uses the store ``folder/store`` at random, and tells what it was promised.

    Args:
        folder: of store and checkpoint.
        round_number: how many children came before it.
        chance: decides what is done.
        journal: is told.
    """

    def __init__(self, folder: Path, round_number: int, chance: random.Random, journal: Notes) -> None:
        self.folder = folder
        self.journal = journal
        self.round = round_number
        self.chance = chance
        self.next_key = round_number * _KEYS_PER_ROUND
        self.next_value = self.next_key
        self.keys: dict[int, int] = {}
        self.opened = False
        self.pins = sorted(path.stem for path in (folder / "store" / "pins").glob("*.json"))

    def open(self) -> None:
        """Open the store, and see what is in it."""
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=self.folder / "store",
            trajectory_format=FORMATS[self.round % len(FORMATS)],
            sample_window_size=0,
            retention=Retention(max_trajectories=KEEP),
            # Snapshots are rare otherwise, and dying in one is of interest.
            writer=WriterOptions(threads=2, commit_interval=0.005, shard_bytes=1 << 16, snapshot_bytes=1 << 15),
        )
        self.opened = True
        self.look()

    def look(self) -> None:
        """See which trajectories there are; each must be what its key says."""
        self.keys = {number: check_trajectory(self.buffer.get(number)) for number in self._ids()}

    def _ids(self) -> list[int]:
        ids: list[int] = self.buffer.trajectory_ids.tolist()
        return ids

    def step(self) -> None:
        """Do one thing."""
        actions = (
            *(self.add, self.flush, self.evict, self.sample, self.pin, self.unpin),
            *(self.checkpoint, self.reopen, self.load, self.annotate),
        )
        self.chance.choices(actions, weights=(40, 20, 8, 8, 4, 6, 4, 3, 2, 12))[0]()

    def add(self) -> None:
        keys = range(self.next_key, self.next_key + self.chance.randint(1, 6))
        self.next_key = keys.stop
        self.keys |= dict(zip(self.buffer.add_trajectories([witness(key) for key in keys]), keys, strict=True))

    def flush(self) -> None:
        before = self._ids()
        self.buffer.flush()
        self.journal.note("flushed", keys={str(number): self.keys[number] for number in before})

    def evict(self) -> None:
        ids = self._ids()
        chosen = sorted(self.chance.sample(ids, min(len(ids) // 3, self.chance.randint(1, 3))))
        if chosen:
            self.buffer.flush()  # may let retention act: only what is still there can be evicted
            chosen = [number for number in chosen if number in set(self._ids())]
            self.journal.note("evicting", ids=chosen)
            self.buffer.evict(chosen)
            self.journal.note("evicted", ids=chosen)

    def sample(self) -> None:
        if len(self.buffer):
            self.buffer.clear_cache()
            check_batch(self.buffer.sample(64))

    def pin(self) -> None:
        name = f"pin{self.next_key}"
        if name in self.pins:
            return
        self.journal.note("pinning", name=name)
        self.buffer.flush()
        keys = {str(number): self.keys[number] for number in self._ids()}
        self.buffer.points.pin(name)
        self.pins.append(name)
        self.journal.note("pinned", name=name, keys=keys)

    def unpin(self) -> None:
        if self.pins:
            name = self.pins.pop(0)
            self.journal.note("unpinning", name=name)
            self.buffer.points.unpin(name)
            self.journal.note("unpinned", name=name)

    def annotate(self) -> None:
        """Give trajectories a value that is higher than all before it, as the writer or through the inbox.

        The writer gives it by row too, in the same call: both are there, or neither.
        """
        self.flush()
        chosen = sorted(self.chance.sample(ids := self._ids(), min(len(ids), 3)))
        if chosen:
            self.next_value += 1
            self.journal.note("annotating", ids=chosen, value=self.next_value)
            store = self.folder / "store" if self.chance.random() < 0.5 else self.buffer
            values: dict[str, Any] = {"v": self.next_value}
            if isinstance(store, TrajectoryReplayBuffer):
                shapes = [self.buffer.get(number).rewards.shape[:2] for number in chosen]
                values |= {
                    "rows": [torch.full(shape, self.next_value, dtype=torch.float64) for shape in shapes],
                    "of_rows": values["v"],
                }
            annotate(store, chosen, values)
            self.journal.note("annotated", ids=chosen, value=self.next_value)

    def checkpoint(self) -> None:
        self.buffer.flush()
        self.journal.note("saving", keys={str(number): self.keys[number] for number in self._ids()})
        self.buffer.save_checkpoint(self.folder / "checkpoint")
        self.journal.note("saved")

    def load(self) -> None:
        with TrajectoryReplayBuffer(sample_window_size=0) as reader:
            reader.load_checkpoint(self.folder / "store")
            if len(reader):
                check_batch(reader.sample(16))

    def reopen(self) -> None:
        self.opened = False
        self.buffer.close()
        self.open()

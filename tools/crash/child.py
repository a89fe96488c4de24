"""Who uses a store in every way, and writes down what was promised; one of them is the process that is killed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.support.witness import check_batch, check_trajectory, witness
from tools.crash.journal import KEEP, Journal
from trajstore import Retention, TrajectoryReplayBuffer, WriterOptions, annotate
from trajstore._core.writing import commit_log

FORMATS = ("pt", "zarr", "pt", "pkl")
_KEYS_PER_ROUND = 1 << 20


def torture(folder: str, round_number: int, seed: int) -> None:
    """Use the store in ``folder`` until killed; that the journal is there says that it has begun."""
    import tools.crash.warm  # noqa: F401  # the fork server may lack it

    torch.set_num_threads(1)
    commit_log.LOG_BYTES = 1 << 15  # the index is rarely written otherwise, and a kill during that is of interest
    journal = Journal(Path(folder) / f"journal_{round_number:06d}")
    child = Child(Path(folder), round_number, random.Random(f"{seed}/{round_number}"), journal)
    child.open()
    while True:
        child.step()


class Child:
    """Uses the store ``folder/store`` at random, and notes what it was promised.

    Args:
        folder: of store and checkpoint.
        round_number: how many children came before it.
        chance: decides what is done.
        journal: is told.
    """

    buffer: TrajectoryReplayBuffer
    weights: ClassVar[Mapping[str, int]] = {
        **{"add": 40, "flush": 20, "evict": 8, "sample": 8, "pin": 4, "unpin": 6},
        **{"checkpoint": 4, "reopen": 3, "load": 2, "annotate": 12},
    }
    """Of what is done, by the name of the method."""

    def __init__(self, folder: Path, round_number: int, chance: random.Random, journal: Journal) -> None:
        self.folder, self.round, self.chance, self.journal = folder, round_number, chance, journal
        self.next_key = self.next_value = round_number * _KEYS_PER_ROUND
        self.keys: dict[int, int] = {}
        """Of the trajectories that it knows, by id."""
        self.opened = False
        self.pins = sorted(path.stem for path in (folder / "store" / "pins").glob("*.json"))

    @property
    def ids(self) -> list[int]:
        """Of all trajectories, in order."""
        ids: list[int] = self.buffer.trajectory_ids.tolist()
        return ids

    def some(self, most: int) -> list[int]:
        """Return some ids."""
        ids = self.ids
        return sorted(self.chance.sample(ids, min(len(ids), self.chance.randint(1, most))))

    def step(self) -> None:
        """Do one thing."""
        (name,) = self.chance.choices([*self.weights], weights=[*self.weights.values()])
        getattr(self, name)()

    def add(self) -> None:
        keys = range(self.next_key, self.next_key + self.chance.randint(1, 6))
        self.next_key = keys.stop
        ids = self.buffer.add_trajectories([witness(key) for key in keys])
        self.keys |= dict(zip(ids, keys, strict=True))

    def flush(self) -> None:
        before = self.ids
        self.buffer.flush()
        known = {str(number): self.keys[number] for number in before if number in self.keys}
        self.journal.note("flushed", keys=known)

    def evict(self) -> None:
        self.buffer.flush()  # may let retention act: only what is still there can be evicted
        chosen = self.some(3)
        self.journal.note("evicting", ids=chosen)
        self.buffer.evict(chosen)
        self.journal.note("evicted", ids=chosen)

    def annotate(self) -> None:
        """Give trajectories a value that is higher than all before it, as the writer or through the store's inbox.

        The writer gives it by row too, in the same call: both are there, or neither.
        """
        self.flush()
        chosen, inbox = self.some(3), self.chance.random() < 0.5
        if chosen:
            self.next_value += 1
            self.journal.note("annotating", ids=chosen, value=self.next_value)
            values: dict[str, Any] = {"v": self.next_value}
            if not inbox:
                shapes = [self.buffer.get(number).rewards.shape[:2] for number in chosen]
                values |= {
                    "rows": [torch.full(shape, self.next_value, dtype=torch.float64) for shape in shapes],
                    "of_rows": values["v"],
                }
            annotate(self.folder / "store" if inbox else self.buffer, chosen, values)
            self.journal.note("annotated", ids=chosen, value=self.next_value)

    def open(self) -> None:
        """Open the store, and see what is in it."""
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=self.folder / "store",
            trajectory_format=FORMATS[self.round % len(FORMATS)],
            sample_window_size=0,
            retention=Retention(max_trajectories=KEEP),
            writer=WriterOptions(threads=2, commit_interval=0.005, shard_bytes=1 << 16),
        )
        self.opened = True
        self.look()

    def look(self) -> None:
        """See which trajectories there are; each must be what its key says."""
        self.keys = {number: check_trajectory(self.buffer.get(number)) for number in self.ids}

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
        keys = {str(number): self.keys[number] for number in self.ids}
        self.buffer.points.pin(name)
        self.pins.append(name)
        self.journal.note("pinned", name=name, keys=keys)

    def unpin(self) -> None:
        if self.pins:
            name = self.pins.pop(0)
            self.journal.note("unpinning", name=name)
            self.buffer.points.remove(name)
            self.journal.note("unpinned", name=name)

    def checkpoint(self) -> None:
        self.buffer.flush()
        self.journal.note("saving", keys={str(number): self.keys[number] for number in self.ids})
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

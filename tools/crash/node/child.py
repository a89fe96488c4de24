"""What the process on the node does until it is killed: it changes its store, and notes what the mirror has."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.crash.child import User
from tools.crash.journal import Journal
from trajstore import Mirror, TrajectoryReplayBuffer
from trajstore.remote.mirror import mirror as mirror_module

FORMATS = ("pt", "zarr", "pkl")


class Writer(User):
    """Uses a mirrored store."""

    weights = {"add": 12, "settle": 4, "evict": 1, "point": 1, "back": 1, "compact": 1}  # noqa: RUF012

    def added(self, keys: Sequence[int]) -> dict[int, int]:
        self.journal.note("adding", keys=list(keys))
        new = super().added(keys)
        self.journal.note("added", keys={str(number): key for number, key in new.items()})
        return new

    def settle(self) -> None:
        self.buffer.flush()

    def back(self) -> None:
        """Go back to any saved point; nobody knows here what is in those that the mirror has brought."""
        if steps := self.steps:
            self.buffer.flush()
            self.journal.note("rolling_back", ids=self.ids)
            self.buffer.points.rollback(self.chance.choice(steps))
            self.journal.note("rolled_back", ids=self.ids)


def work(store: str, mirror: str, storage_options: dict[str, Any], journal: str, seed: int, first_key: int) -> None:
    """Change a mirrored store at random for ever.

    Args:
        store: path of the store.
        mirror: URL of its mirror.
        storage_options: of the mirror.
        journal: file on another machine, so to speak: it is not lost.
        seed: of what is done.
        first_key: of the witnesses that are added.
    """
    logging.getLogger("trajstore").setLevel(logging.ERROR)  # rollbacks warn of what they set aside
    notes = Journal(Path(journal))
    writer = Writer(random.Random(seed), notes, first_key)
    mirror_module._FIRST_PAUSE = mirror_module._LONGEST_PAUSE = 0.2
    writer.buffer = TrajectoryReplayBuffer(
        auto_save=True,
        auto_save_path=store,
        trajectory_format=FORMATS[seed % len(FORMATS)],
        sample_window_size=0,
        mirror=Mirror(mirror, storage_options=storage_options, interval=0.0),
    )
    notes.note("ready")
    while True:
        writer.step()
        if (state := writer.buffer.mirror.state) is not None:
            notes.note("mirrored", watermark=state.newest_id, error=state.error)

"""Stores with one fault each, for the comparison of peers; they run in a process without pytest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.crash.peers.child import Peer, Rollout


class Lines(Peer):
    """Appends a line per rollout, without fsync."""

    syncs = False

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        path = self.folder / "lines"
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = json.loads(line)
            yield fields.pop("number"), fields

    def add(self, rollouts: Sequence[Rollout]) -> None:
        with (self.folder / "lines").open("a") as file:
            file.write("".join(f"{json.dumps({'number': rollout.number, **rollout.fields})}\n" for rollout in rollouts))
            file.flush()
            if self.syncs:
                os.fsync(file.fileno())


class Synced(Lines):
    """Has no fault."""

    syncs = True


class Late(Lines):
    """Writes a group only with the second one after it, so the newest acknowledged group is never written."""

    waiting: tuple[Sequence[Rollout], ...] = ((), ())

    def add(self, rollouts: Sequence[Rollout]) -> None:
        super().add(self.waiting[0])
        self.waiting = (self.waiting[1], rollouts)


class Twice(Lines):
    """Writes each rollout twice."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        super().add([*rollouts, *rollouts])


class Partial(Lines):
    """Writes the first rollout of a group only, without a reward and with another version."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        with (self.folder / "lines").open("a") as file:
            file.write(f"{json.dumps({'number': rollouts[0].number, 'tokens': rollouts[0].tokens, 'version': -1})}\n")

"""Stores with one fault each, for the comparison of peers; they run in a process without pytest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.crash.peers.child import Peer, Rollout


class Lines(Peer):
    """Appends a line per rollout, without fsync; a kill leaves all lines of a call or none."""

    syncs = False

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        path = self.folder / "lines"
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = json.loads(line)
            yield fields.pop("number"), fields

    def add(self, rollouts: Sequence[Rollout]) -> None:
        self.append(*({"number": rollout.number, **rollout.fields} for rollout in rollouts))

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Replace the file by one with more lines."""
        path, new = self.folder / "lines", self.folder / "new"
        before = path.read_text() if path.exists() else ""
        with new.open("w") as file:
            file.write(before + "".join(f"{json.dumps(line)}\n" for line in lines))
            file.flush()
            if self.syncs:
                os.fsync(file.fileno())
        new.replace(path)


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
        self.append({"number": rollouts[0].number, "tokens": rollouts[0].tokens, "version": -1})

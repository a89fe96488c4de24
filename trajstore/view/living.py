"""The live contents of the page: follows the store and answers requests."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from trajstore._core.store.catalog import Catalog
from trajstore._core.store.notes import Notes
from trajstore._core.store.run_ids import id_from, own_id, rank_of_id, shown_id
from trajstore._core.store.salvage import open_leniently
from trajstore.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StoreError,
    TrajectoryUnavailableError,
    TrajstoreError,
    UnknownColumnError,
    counted,
)
from trajstore.operations.opening import open_readable
from trajstore.operations.trajectory_report import Decode, decoder, tokenizer_of
from trajstore.query.engine import pl
from trajstore.query.relations import RELATIONS
from trajstore.query.texts import METADATA, keys_in, words
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Trajectory
from trajstore.view.answers import Answer, columns_of, in_order, keys_of, late_values, named_rows, plain_dict
from trajstore.view.overview import overview
from trajstore.view.rollout import Pictures, answer_of, pictures_of
from trajstore.view.session import OpenSessions, tree_of

if TYPE_CHECKING:
    from trajstore._core.files.base import Directory
    from trajstore.query import Query

logger = logging.getLogger(__name__)

_QUESTIONS = 4
"""Number of queries whose ids are cached."""

MOST_PATHS = 256
"""Maximum number of rows that are read for a session's tree."""

_KEYS_FROM = 200
"""Number of the newest rollouts whose metadata is read for its keys."""

_LOOK_APART = 5.0
"""Seconds between two looks for writers."""

FAILURE = "(kind = 'agent' and outcome is null) or outcome <= 0.5"
"""Condition of the trajectories that are no success; blocks without an outcome are neither."""

_FRAMES = 64
"""Maximum number of pictures per request."""


@dataclass(frozen=True, slots=True)
class State:
    """The visible state at one moment.

    Attributes:
        name: unique name of the state, also across restarts of the server.
        trajectories: number of visible trajectories.
        trouble: reason why nothing newer can be shown, or damage found when the store was opened; None if all is well.
        sessions: number of changes of open sessions so far.
        written: whether a writer has the store open.
    """

    name: str
    trajectories: int
    trouble: str | None = None
    sessions: int = 0
    written: bool = False

    @property
    def moment(self) -> str:
        """Unique name of the state, of the open sessions, and of whether there is a writer."""
        return f"{self.name}.{self.sessions}.{self.written:d}"


class Living:
    """The visible contents, and the answers about them.

    One thread calls :meth:`refresh`, :meth:`page` and the other methods about many trajectories. Methods about a single
    trajectory may be called by a second thread.

    Args:
        path: directory or URL of a store, a checkpoint, a run or a directory of RLinf.
        pin: show the trajectories of this pin; None: the newest.
        copied: for a bundle: compare the checksums of each shard, and show late values that wait in the inbox.
        tokenizer: folder or name of the tokenizer that decodes tokens. None: the folder that a rollout names.

    Raises:
        StoreNotFoundError: there is nothing to show.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: nothing is readable.
    """

    def __init__(
        self, path: str | Path, *, pin: str | None = None, copied: bool = False, tokenizer: str | Path | None = None
    ) -> None:
        self.path = str(path)
        """Display name of the contents."""
        self._pin = pin
        self._tokenizer = tokenizer
        self._reader, damage = open_readable(path, pin, verify_shards=copied, pending=copied)
        self._damage = damage and f"A part of the store cannot be shown: {damage}"
        self._pictures = lru_cache(1)(self._pictures_of)  # the page asks for a block's frames in many requests
        self._decoder = lru_cache(None)(self._decoder_of)
        """Of the second thread, as the field above."""
        self._answers: OrderedDict[tuple[str, str, tuple[str, ...]], npt.NDArray[np.int64]] = OrderedDict()
        """Ids by state, condition and order; of the first thread, as the fields below."""
        self._open = OpenSessions()
        self._start, self._number = secrets.token_hex(4), 0
        self._looked = -math.inf
        """Monotonic time at which the writer locks were read last."""
        self.state = State(self._name(), len(self._reader), self._damage, written=self._is_written())
        """The present state; replaced as a whole, so that any thread may read it."""

    def close(self) -> None:
        """Release the reader's lease."""
        self._reader.close()

    def _name(self) -> str:
        return f"{self._start}-{self._number}"

    # -- many trajectories --------------------------------------------------------------------------

    def refresh(self) -> State:
        """Show new commits, and return the state."""
        sessions = self.state.sessions
        try:
            changed = self._reader.refresh()
            sessions += self._open.refresh(() if self._pin else self._directories().values())
            written = self._is_written()
            trouble = self._damage
        except (StoreError, OSError) as error:  # may be temporary while the directory is replaced
            changed, written, trouble = False, False, str(error)
            if trouble != self.state.trouble:
                logger.warning("%s", trouble)
        if changed or trouble != self.state.trouble:
            self._number += 1
        self.state = State(self._name(), len(self._reader), trouble, sessions, written)
        return self.state

    def _is_written(self) -> bool:
        """Return whether a writer has the store open; reads its lock, which may be far away, every few seconds."""
        if self._pin is not None:
            return False
        if time.monotonic() - self._looked < _LOOK_APART:
            return self.state.written
        self._looked = time.monotonic()
        return any(directory.is_written() for directory in self._directories().values())

    def about(self) -> Answer:
        """Return the path, the available facts, and the state."""
        columns = columns_of(self._reader.query().table())
        return {"path": self.path, "columns": columns, **told(self.state)}

    def keys(self) -> Answer:
        """Return columns of the newest rollouts' metadata, see :func:`trajstore.view.answers.keys_of`."""
        question = self._reader.query()
        rollouts = question.table().filter((pl.col("kind") == "agent") & pl.col("readable"))
        newest = rollouts.sort("committed").tail(_KEYS_FROM)
        if question.scan is None:
            return {"columns": []}
        return {"columns": keys_of(question.scan(METADATA, newest).select("json").collect()["json"])}

    def page(
        self, where: str, order: Sequence[str], first: int, count: int, state: str = "", columns: Sequence[str] = ()
    ) -> Answer:
        """Return a page of a query's rows, facts by name: ``{"total", "first", "rows", "state"}``.

        Args:
            where: condition on facts, or on messages: then of the trajectories with such a message. Empty for all.
            order: expressions to sort by.
            first: number of the first row.
            count: number of rows.
            state: state of the previous page; if its ids are no longer cached, the present state is used.
            columns: values of metadata in the rows, ``metadata.KEY``.

        Raises:
            ConfigurationError: an expression is invalid; names its part of the query.
        """
        ids, state = self._ids_of(where, order, state)
        facts = in_order(self._reader.query().table(), ids[first : first + count])
        if keys := keys_in(columns):
            question = replace(self._reader.query(), facts=lambda: facts)
            facts = facts.hstack(question.select(*keys).table())
        rows = named_rows(facts)
        return {"total": len(ids), "first": first, "rows": rows, "state": state}

    def open_sessions(self) -> Answer:
        """Return the sessions that are not rollouts yet, see :meth:`trajstore.view.session.OpenSessions.listed`."""
        return {**self._open.listed(), "seen": self.state.sessions}

    def open_session(self, session_id: str) -> Answer | None:
        """Return the tree of an open session, see :meth:`trajstore.view.session.OpenSessions.tree`.

        Raises:
            CorruptStoreError: a call is damaged.
        """
        found = self._open.tree(session_id)
        return None if found is None else {**found, "seen": self.state.sessions}

    def open_path(self, session_id: str, call_id: str) -> bytes:
        """Return the answer about the first path of an open session that has a call, as of :meth:`rollout`.

        Raises:
            TrajectoryUnavailableError: the session is not open, or has no such call.
            CorruptStoreError: a call is damaged.
        """
        row = self._open.path(session_id, call_id)
        if row is None:
            raise TrajectoryUnavailableError(f"session {session_id}: is not open, or has no call {call_id!r}")
        return self.body(row)

    def _directories(self) -> dict[int, Directory]:
        return {rank: catalog.directory for rank, catalog in self._catalogs().items()}

    def _catalogs(self) -> Mapping[int, Catalog]:
        """Return the stores' catalogs by rank, which have the late values; RLinf's directories have none."""
        return self._reader._live.catalogs_by_rank()

    def _ids_of(self, where: str, order: Sequence[str], state: str) -> tuple[npt.NDArray[np.int64], str]:
        """Return a query's ids and their state: the requested state if it is cached."""
        key = state, where, tuple(order)
        if key not in self._answers:
            question = self._reader.query().order_by(*order) if order else self._reader.query()
            key = self.state.name, where, tuple(order)
            if key not in self._answers:
                self._answers[key] = _matching(question, where)
        self._answers.move_to_end(key)
        while len(self._answers) > _QUESTIONS:
            self._answers.popitem(last=False)
        return self._answers[key], key[0]

    def around(self, shown: str, where: str, order: Sequence[str]) -> Answer:
        """Return a trajectory's place in a query, and the ids as displayed of its neighbours.

        ``at`` is its row, None if it is not in the query; ``previous``, ``next``, ``previous_failure`` and
        ``next_failure`` are None where there is none.

        Args:
            shown: its id as displayed.
            where: condition; empty for all.
            order: expressions to sort by.

        Raises:
            ConfigurationError: an expression is invalid; names its part of the query.
        """
        ids, _ = self._ids_of(where, order, "")
        at = next(iter(np.flatnonzero(ids == id_from("trajectory_id", shown)).tolist()), None)
        answer: Answer = {"at": at, "total": len(ids)}
        failures = np.isin(ids, self._ids_of(FAILURE, (), "")[0])
        for name, places in (("", np.arange(len(ids))), ("_failure", np.flatnonzero(failures))):
            before, after = np.searchsorted(places, (at, at + 1)) if at is not None else (0, len(places))
            answer["previous" + name] = shown_id(int(ids[places[before - 1]])) if before else None
            answer["next" + name] = shown_id(int(ids[places[after]])) if after < len(places) else None
        return answer

    def overview(self, where: str = "") -> Answer:
        """Return figures and curves, see :func:`trajstore.view.overview.overview`.

        Raises:
            ConfigurationError: the condition is invalid; names the position.
        """
        return {**overview(self.table(where)), "state": self.state.name}

    def table(self, where: str = "") -> pl.DataFrame:
        """Return the facts of the trajectories that match a condition, in the order of their ids.

        Args:
            where: condition; empty for all.

        Raises:
            ConfigurationError: the condition is invalid, with the reason.
        """
        table = self._reader.query().table()
        return table.filter(np.isin(table["trajectory_id"], self._ids_of(where, (), "")[0])) if where else table

    def group(self, task: str, version: int | Literal["all"] | None) -> Answer:
        """Return the rollouts of a task, and the list of their policy versions; those of all versions newest first.

        Args:
            task: name of the task.
            version: highest policy version of the rollouts, or ``all``; None: the newest.
        """
        siblings = self._reader.query().table().filter(pl.col("task") == task)
        known = siblings["version_high"].drop_nulls().unique().sort().to_list()
        chosen = known[-1] if version is None and known else version
        chosen = None if chosen == "all" else chosen
        siblings = siblings.reverse() if chosen is None else siblings.filter(pl.col("version_high") == chosen)
        return {"task": task, "versions": known, "version": chosen, "rollouts": named_rows(siblings)} | {
            "state": self.state.name
        }

    # -- one trajectory -----------------------------------------------------------------------------

    def rollout(self, shown: str) -> bytes:
        """Return the answer about a trajectory, see :func:`trajstore.view.rollout.answer_of`.

        Args:
            shown: its id as displayed.

        Raises:
            TrajectoryUnavailableError: no such trajectory, or it was evicted.
            CorruptStoreError: the trajectory is damaged.
        """
        return self.body(self.get(shown))

    def session(self, session_id: str, own: str = "", among: Collection[str] | None = None) -> Answer:
        """Return the tree of a session in the store, see :func:`trajstore.view.session.tree_of`.

        Further keys: ``paths`` (number and id of each row that was asked for, at most ``MOST_PATHS`` and ``own``),
        ``of`` (number of rows that the session says it has), and ``unread`` (reason by id for each unreadable row).

        Args:
            session_id: its id.
            own: a row to read in any case, by id as displayed.
            among: the only rows to read; None: all.

        Raises:
            TrajectoryUnavailableError: it has no row here.
        """
        table = self._reader.query().table().filter(pl.col("session") == session_id).sort("session_path")
        shown = [shown_id(number) for number in table["trajectory_id"]]
        paths = [
            (path, name) for path, name in zip(table["session_path"], shown, strict=True) if not among or name in among
        ]
        if not paths:
            raise TrajectoryUnavailableError(f"session {session_id}: is not open, and no path of it is in the store")
        paths = [each for place, each in enumerate(paths) if place < MOST_PATHS or each[1] == own]
        rows, unread = [], {}
        for _, name in paths:
            try:
                row = self.get(name)
            except (TrajstoreError, OSError) as error:
                unread[name] = str(error)
                continue
            if isinstance(row, AgentTrajectory):
                rows.append((name, row))
        answer = {"id": session_id, "paths": paths, "of": table["session_paths"].max(), "unread": unread}
        return {**answer, **tree_of(rows)}

    def get(self, shown: str) -> AnyTrajectory:
        """Return a trajectory; raises the errors of :meth:`rollout`."""
        try:
            return self._reader.get(shown)
        except TrajectoryUnavailableError as error:
            if self._damage is None:
                raise
            raise self._none_of(shown) from error

    def body(self, trajectory: AnyTrajectory) -> bytes:
        """Return the result of :meth:`rollout` for a trajectory that was read."""
        decode = self._decoder(tokenizer_of(trajectory)) if isinstance(trajectory, AgentTrajectory) else None
        return answer_of(trajectory, decode)

    def frames(self, shown: str, name: str, environment: int, steps: Sequence[int]) -> bytes:
        """Return pictures of a block, as bytes ``[n, height, width, channels]``.

        Args:
            shown: id of the block as displayed.
            name: dotted name of the column.
            environment: number of the environment.
            steps: numbers of the steps, in the order of the result.

        Raises:
            ConfigurationError: the block lacks a step or the environment, or too many pictures are requested.
            SchemaMismatchError: the block has no such pictures.
            TrajectoryUnavailableError: no such block, or it was evicted.
        """
        pictures = self._pictures(self.state.name, shown).get(name)
        if pictures is None:
            raise SchemaMismatchError(f"block {shown} has no pictures {name!r}")
        length, batch = pictures.rows.shape[:2]
        if not 0 < len(steps) <= _FRAMES or environment >= batch or max(steps) >= length:
            raise ConfigurationError(
                f"frames: block {shown} has {counted(length, 'step')} and {counted(batch, 'environment')}; at most "
                f"{_FRAMES} frames per request"
            )
        return pictures.frames(environment, steps)

    def _pictures_of(self, state: str, shown: str) -> dict[str, Pictures]:
        """Return the pictures of a block in a state, by the names of their columns."""
        block = self.get(shown)
        return pictures_of(block) if isinstance(block, Trajectory) else {}

    def facts(self, shown: str) -> Answer:
        """Return the facts of a trajectory.

        Raises:
            TrajectoryUnavailableError: no such trajectory, or it was evicted.
        """
        number = id_from("trajectory_id", shown)
        rows = self._reader.query().table().filter(pl.col("trajectory_id") == number)
        if not len(rows):
            raise self._none_of(shown_id(number))
        return {**plain_dict(rows.row(0, named=True)), "trajectory_id": shown_id(number)}

    def notes(self, shown: str) -> Answer:
        """Return the recorded late values of a trajectory, see :func:`trajstore.view.answers.late_values`.

        Of a pin, they are those that it showed, also of trajectories evicted since.

        Raises:
            TrajectoryUnavailableError: no store has such an id.
        """
        number, catalogs = id_from("trajectory_id", shown), self._catalogs()
        catalog = catalogs.get(rank_of_id(number))
        if catalog is not None and self._pin is not None:
            whole, _ = open_leniently(catalog.directory)
            notes = whole.values_of(whole.snapshot(self._pin))
        elif catalog is not None:
            notes = catalog.notes
        elif catalogs:
            raise self._none_of(shown)
        else:
            notes = Notes()
        return {**late_values(own_id(number), notes), "state": self.state.name}

    def _none_of(self, shown: str) -> TrajectoryUnavailableError:
        """Return the error for an id that cannot be shown; names the damage that it is lost in."""
        damage, number = self._damage, id_from("trajectory_id", shown)
        catalog = self._catalogs().get(rank_of_id(number))
        if damage is None:
            return TrajectoryUnavailableError(f"trajectory {shown}: does not exist, or was evicted")
        if catalog is None or self._is_recorded(catalog, number):
            why = "recorded, but unreadable; the damage is named at the top of the page"
        else:
            why = "not in the readable part of the store"
        return TrajectoryUnavailableError(f"trajectory {shown}: {why}")

    def _is_recorded(self, catalog: Catalog, number: int) -> bool:
        """Return whether a store has a trajectory, readable or not."""
        if self._reader._live.locked(lambda contents: contents.index.find(number) is not None):
            return True
        return open_leniently(catalog.directory)[0].index.find(own_id(number)) is not None

    def _decoder_of(self, named: str | None) -> Decode | None:
        """Return what decodes the tokens of rollouts that name this tokenizer."""
        return decoder(named, self._tokenizer)


def _matching(question: Query, where: str) -> npt.NDArray[np.int64]:
    """Return the ids of trajectories that match a condition, or that have a message that does."""
    if not where:
        return question.ids()
    try:
        return question.where(where).ids()
    except UnknownColumnError:
        if RELATIONS["messages"].keys().isdisjoint(words(where)):
            raise
        return replace(question, relation="messages").where(where).ids()


def told(state: State) -> Answer:
    """Return what the page shows of a state."""
    return {"state": state.name, "trajectories": state.trajectories, "trouble": state.trouble}

"""What lives as the page shows it: it follows what is written, and answers."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajstore.core.columns.fields import walk
from trajstore.core.sampling import Drawn
from trajstore.core.store.notes import Notes
from trajstore.core.store.run_ids import id_from, own_id, rank_of_id, shown_id
from trajstore.core.writing.inbox import InboxView
from trajstore.errors import ConfigurationError, StoreError, TrajectoryUnavailableError, TrajstoreError
from trajstore.operations.trajectory_report import Decode, decoder, tokenizer_of
from trajstore.query.engine import polars
from trajstore.trajectory import AgentTrajectory, AnyTrajectory
from trajstore.view.answers import columns_of, in_order, named_rows, plain_dict
from trajstore.view.late import late_values
from trajstore.view.overview import Sample, overview, sampled
from trajstore.view.rollout import answer_of
from trajstore.view.shown import Shown

if TYPE_CHECKING:
    from polars import DataFrame

logger = logging.getLogger(__name__)

Answer = dict[str, Any]

_QUESTIONS = 4
"""Questions whose ids are kept."""


MOST_GIVEN = 10_000
"""Trajectories that the page gives a value at once."""

_SUMS = 10_000
"""Rollouts whose sum of log-probs is kept."""

_FRAMES = 64
"""Pictures that are given at a time."""


@dataclass(frozen=True, slots=True)
class State:
    """What is shown at a moment.

    Attributes:
        name: another one for each state, also of a server that was started again.
        trajectories: how many are shown.
        trouble: why nothing newer can be shown, or what was damaged when the store was opened; None if all is well.
    """

    name: str
    trajectories: int
    trouble: str | None = None


class Living:
    """What is shown, and what it answers.

    :meth:`refresh`, :meth:`page` and what else asks about many are called by one thread, what reads a single
    trajectory by one that may be another.

    Args:
        shown: of which the page is; belongs to this from now on.
        tokenizer: folder or name of the tokenizer that makes text of tokens. None: the folder that a rollout names.
    """

    def __init__(self, shown: Shown, *, tokenizer: str | Path | None = None) -> None:
        self._shown = shown
        self._tokenizer = tokenizer
        self._decoders: dict[str | None, Decode | None] = {}
        self._inboxes: dict[str, InboxView] = {}
        """Of the stores, by URL."""
        self._answers: OrderedDict[tuple[str, str, tuple[str, ...]], npt.NDArray[np.int64]] = OrderedDict()
        self._log_probs: OrderedDict[Sample, tuple[float, int]] = OrderedDict()
        """Sums over the tokens of rollouts, and of how many; of the thread that reads single ones."""
        self._start, self._number = secrets.token_hex(4), 0
        self.state = State(self._name(), len(shown), shown.damage)
        """The present one; replaced whole, so that any thread may look at it."""

    def close(self) -> None:
        """Give back what was taken to read."""
        self._shown.close()

    @property
    def path(self) -> str:
        """What is shown, as people call it."""
        return self._shown.path

    def _name(self) -> str:
        return f"{self._start}-{self._number}"

    # -- about many ---------------------------------------------------------------------------------

    def refresh(self) -> State:
        """Show what was committed since, and return the state shown."""
        try:
            changed, trouble = self._shown.refresh(), self._shown.damage
        except (StoreError, OSError) as error:  # perhaps for a moment only: somebody may be replacing the directory
            changed, trouble = False, str(error)
            if trouble != self.state.trouble:
                logger.warning("%s", trouble)
        if changed or trouble != self.state.trouble:
            self._number += 1
            self.state = State(self._name(), len(self._shown), trouble)
        return self.state

    def about(self) -> Answer:
        """Return what is shown: its path, the facts that there are, whether it is a pool, and the state."""
        columns, pool = columns_of(self._shown.query().table()), self._shown.pool is not None
        return {"path": self.path, "columns": columns, "pool": pool, **_told(self.state)}

    def page(self, where: str, order: Sequence[str], first: int, count: int, state: str = "") -> Answer:
        """Return rows of the answer to a question, facts by name: ``{"total", "first", "rows", "state"}``.

        Args:
            where: condition; empty for all.
            order: expressions to sort by.
            first: number of the first row.
            count: how many.
            state: that of the rows asked for before; if its ids are kept no longer, the answer is of the present one.

        Raises:
            ConfigurationError: an expression is wrong; says where.
        """
        ids, state = self._ids_of(where, order, state)
        rows = named_rows(in_order(self._shown.query().table(), ids[first : first + count]))
        return {"total": len(ids), "first": first, "rows": rows, "state": state}

    def ids(self, where: str, order: Sequence[str] = (), state: str = "") -> Answer:
        """Return the ids of the answer to a question, as they are shown: ``{"ids", "gone", "state"}``.

        Those that are there no longer are only counted, as ``gone``.

        Args:
            where: condition; empty for all.
            order: expressions to sort by.
            state: that of the rows asked for before, as for :meth:`page`.

        Raises:
            ConfigurationError: they are more than values are given to at once; or the condition is wrong, says where.
        """
        ids, state = self._ids_of(where, order, state)
        if len(ids) > MOST_GIVEN:
            raise ConfigurationError(
                f"annotate: {len(ids):,} trajectories, the page gives values to at most {MOST_GIVEN:,} at once; choose "
                "some with a condition, or call trajstore.annotate"
            )
        self.refresh()
        there = ids[np.isin(ids, self.table()["trajectory_id"])]
        return {"ids": [shown_id(number) for number in there.tolist()], "gone": len(ids) - len(there), "state": state}

    def _ids_of(self, where: str, order: Sequence[str], state: str) -> tuple[npt.NDArray[np.int64], str]:
        """Return the ids of an answer, and of which state it is: the one asked for, if it is kept."""
        key = state, where, tuple(order)
        if key not in self._answers:
            question = self._shown.query().order_by(*order) if order else self._shown.query()
            key = self.state.name, where, tuple(order)
            if key not in self._answers:
                self._answers[key] = (question.where(where) if where else question).ids()
        self._answers.move_to_end(key)
        while len(self._answers) > _QUESTIONS:
            self._answers.popitem(last=False)
        return self._answers[key], key[0]

    def overview(self, where: str) -> Answer:
        """Return figures and curves of the trajectories of which a condition holds; see ``view/overview``.

        Raises:
            ConfigurationError: the condition is wrong; says where.
        """
        pool = None if self._shown.pool is None else self._shown.pool.overview()
        told = {"pool": pool, "limits": list(self._shown.limits), "state": self.state.name}
        return {**overview(self.table(where)), **told}

    def table(self, where: str = "") -> DataFrame:
        """Return the facts of the trajectories of which a condition holds, in the order of their ids.

        Raises:
            ConfigurationError: the condition is wrong; says where.
        """
        question = self._shown.query()
        return (question.where(where) if where else question).table()

    def group(self, task: str, version: int | None) -> Answer:
        """Return the rollouts of a task: facts of those of one policy version, and which versions there are.

        Args:
            task: name of the task.
            version: highest policy version of the rollouts; None: the newest, and of a pool's histories all.
        """
        pl = polars()
        siblings = self._shown.query().table().filter(pl.col("task") == task)
        known = siblings["version_high"].drop_nulls().unique().sort().to_list()
        chosen = known[-1] if version is None and known and self._shown.pool is None else version
        if chosen is not None:
            siblings = siblings.filter(pl.col("version_high") == chosen)
        return {"task": task, "versions": known, "version": chosen, "rollouts": named_rows(siblings)} | {
            "state": self.state.name
        }

    def sampled(self, where: str, over: str) -> tuple[Answer, list[list[Sample]]]:
        """Return of which points :meth:`log_prob` is to tell, and of which rollouts; see ``view/overview``.

        Raises:
            ConfigurationError: the condition is wrong, or there are no curves over this.
        """
        if over not in ("version", "time"):
            raise ConfigurationError(f"over: {over!r}, must be version or time")
        told, samples = sampled(self.table(where), over)
        return {**told, "log_prob": [], "unread": 0, "state": self.state.name}, samples

    # -- about one ----------------------------------------------------------------------------------

    def rollout(self, shown: str) -> bytes:
        """Return a trajectory as :func:`trajstore.view.rollout.answer_of` tells it.

        Args:
            shown: its id, as it is shown.

        Raises:
            TrajectoryUnavailableError: there is none, or none any more.
            CorruptStoreError: it is damaged.
        """
        return self.body(self.get(shown))

    def get(self, shown: str) -> AnyTrajectory:
        """Return a trajectory; raises what :meth:`rollout` does."""
        return self._shown.get(shown)

    def body(self, trajectory: AnyTrajectory) -> bytes:
        """Return what :meth:`rollout` returns of a trajectory that was read."""
        decode = self._decoder(trajectory) if isinstance(trajectory, AgentTrajectory) else None
        return answer_of(trajectory, decode)

    def frames(self, shown: str, name: str, environment: int, steps: Sequence[int]) -> bytes:
        """Return pictures of a block, as bytes ``[n, height, width, channels]``.

        Args:
            shown: id of the block, as it is shown.
            name: dotted name of the column.
            environment: which one.
            steps: which steps, in this order.

        Raises:
            ConfigurationError: the block has no such step or environment, or too much is asked for at once.
            SchemaMismatchError: it has no such column.
            TrajectoryUnavailableError: there is none, or none any more.
        """
        number = np.array([id_from("trajectory_id", shown)], np.int64)
        (length,), (batch,) = self._shown.extents(number)
        if not 0 < len(steps) <= _FRAMES or environment >= batch or max(steps) >= length:
            raise ConfigurationError(
                f"frames: block {shown} has {length} steps and {batch} environments, and {_FRAMES} frames are given at "
                "a time"
            )
        samples = np.array(steps, np.int64) * batch + environment
        found = self._shown.read(Drawn(number.repeat(len(steps)), samples), [name])
        return b"".join(tensor.numpy().tobytes() for _, tensor in walk(found))

    def log_prob(self, samples: Sequence[Sample]) -> tuple[float | None, int]:
        """Return the mean log-prob of the tokens that the model wrote, over some rollouts, and how many are unreadable.

        None where no log-probs were recorded. Those of the trainer count, else the engine's.
        """
        found, unread = [], 0
        for sample in samples:
            number, committed = sample
            if sample not in self._log_probs:
                try:
                    self._log_probs[sample] = _log_probs_of(self.get(shown_id(number)))
                except TrajectoryUnavailableError:  # evicted since: the next state has others
                    continue
                except (TrajstoreError, OSError) as error:  # the page says how many
                    logger.debug("%s", error)
                    unread += 1
                    continue
            found.append(self._log_probs[sample])
            if committed is None:  # without a time nothing says that the next one of this id is the same
                del self._log_probs[sample]
        while len(self._log_probs) > _SUMS:
            self._log_probs.popitem(last=False)
        tokens = sum(count for _, count in found)
        return (sum(total for total, _ in found) / tokens if tokens else None), unread

    def facts(self, shown: str) -> Answer:
        """Return the facts of a trajectory.

        Raises:
            TrajectoryUnavailableError: there is none, or none any more.
        """
        pl = polars()
        number = id_from("trajectory_id", shown)
        rows = self._shown.query().table().filter(pl.col("trajectory_id") == number)
        if not len(rows):
            raise _none_of(shown)
        return {**plain_dict(rows.row(0, named=True)), "trajectory_id": shown_id(number)}

    def notes(self, shown: str) -> Answer:
        """Return the values of a trajectory that came late, as :func:`trajstore.view.late.late_values` tells them.

        Called by the thread that asks about many: it follows what is written.

        Raises:
            TrajectoryUnavailableError: there is none, or none any more.
        """
        number = id_from("trajectory_id", shown)
        catalogs = self._shown.catalogs()
        if not catalogs:  # a directory of RLinf has no values, nor has a pool's file; a handle's stores are elsewhere
            limits = [] if catalogs is not None else list(self._shown.limits)
            return {**late_values(own_id(number), Notes(), []), "limits": limits, "state": self.state.name}
        before = catalogs.get(rank_of_id(number))
        if before is None:
            raise _none_of(shown)
        if self._shown.pin is not None:  # with the values that it showed, also of trajectories evicted since
            return {**self.notes_shown(shown), "state": self.state.name}
        inbox = self._inboxes.setdefault(before.directory.url, InboxView(before.directory))
        waiting = inbox.look(before.store_id)
        self.refresh()  # after that: what was taken in between is in the store
        catalog = (self._shown.catalogs() or {}).get(rank_of_id(number))
        if catalog is None or catalog.unknown([own_id(number)]):
            raise _none_of(shown)
        return {**late_values(own_id(number), catalog.notes, waiting), "state": self.state.name}

    def notes_shown(self, shown: str) -> Answer:
        """Return the values of a trajectory that came late, of the state that is shown; what waits is none of them."""
        number = id_from("trajectory_id", shown)
        catalog = (self._shown.catalogs() or {}).get(rank_of_id(number))
        if catalog is None:
            notes = Notes()
        elif self._shown.pin is None:
            notes = catalog.notes
        else:
            notes = catalog.values_of(catalog.snapshot(self._shown.pin))
        return late_values(own_id(number), notes, [])

    def _decoder(self, trajectory: AgentTrajectory) -> Decode | None:
        name = tokenizer_of(trajectory)
        if name not in self._decoders:
            self._decoders[name] = decoder(trajectory, self._tokenizer)
        return self._decoders[name]


def _log_probs_of(trajectory: AnyTrajectory) -> tuple[float, int]:
    """Return the sum of the log-probs of the tokens that a model wrote, and how many they are."""
    if not isinstance(trajectory, AgentTrajectory):
        return 0.0, 0
    values = trajectory.old_log_probs if trajectory.old_log_probs is not None else trajectory.rollout_log_probs
    if values is None:
        return 0.0, 0
    if trajectory.response_mask is not None:
        values = values[trajectory.response_mask.bool()]
    return float(values.double().sum()), values.numel()


def _none_of(shown: str) -> TrajectoryUnavailableError:
    return TrajectoryUnavailableError(f"trajectory {shown}: there is none, or it was evicted")


def _told(state: State) -> Answer:
    return {"state": state.name, "trajectories": state.trajectories, "trouble": state.trouble}

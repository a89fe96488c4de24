"""Export, import and checks of experience pools: the work of ``trajstore pool``."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer_hooks.replay.entry import EARLIER_RUN, of_earlier_run
from trainer_hooks.replay.message_rows import MessageTokenizer
from trainer_hooks.replay.outcomes import asked_for, is_replayed, known_outcome
from trainer_hooks.replay.persistence import newest_pool
from trainer_hooks.replay.pool import ExperienceManager
from trainer_hooks.replay.rows import whole_sessions
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import LeftOut, is_worth_keeping
from trainer_hooks.replay.store import BufferStore
from trajstore._core.files.held import check_path
from trajstore._core.files.opening import open_directory
from trajstore._core.reading.places import POOL_FILES, find_place
from trajstore._core.store.catalog import Catalog
from trajstore.errors import (
    ConfigurationError,
    CorruptStoreError,
    InvalidTrajectoryError,
    StoreNotFoundError,
    listed,
    trajectories,
)
from trajstore.trajectory import AgentTrajectory


@dataclass(frozen=True)
class Exchanged:
    """Result of an export or import.

    Attributes:
        source: the source; of several ``step_N``, the chosen one.
        trajectories: trajectories in the pool afterwards.
        tasks: tasks with trajectories.
        refused: trajectories that were refused, by reason (see ``Refusal``).
        read: trajectories that were examined: the sum of ``entered``, ``refused``, ``left_out`` and ``unreadable``.
        before: trajectories in the pool before; 0 if files replaced them.
        entered: trajectories that entered the pool; ``trajectories`` is ``before`` plus these, less those that
            ``left``.
        left: trajectories that left the pool meanwhile, by reason (see ``Departure``).
        left_out: for each reason why rollouts could never enter, a sentence with their number.
        unreadable: damaged trajectories of the source store, left out.
        tokenized: trajectories that had messages only and were given tokens.
        without_log_probs: how many of these have no recorded log-probs that fit the tokens.
    """

    source: str
    trajectories: int
    tasks: int
    refused: Counter[str]
    read: int = 0
    before: int = 0
    entered: int = 0
    left: Counter[str] = field(default_factory=Counter)
    left_out: tuple[str, ...] = ()
    unreadable: int = 0
    tokenized: int = 0
    without_log_probs: int = 0


def export_pool(store: str | Path, folder: str | Path) -> Exchanged:
    """Write the pool of a store as files (``difficulty2task_dict.json`` and others); the run may still be running.

    Args:
        store: directory or URL of the pool's store; only read.
        folder: output directory, such as ``experience_pool/step_120``; an existing one is replaced.

    Raises:
        StoreNotFoundError: there is no store.
        ConfigurationError: ``store`` is not a pool, or ``folder`` is a file.
        CorruptStoreError: the pool in the store cannot be decoded.
        StoreWriteError: the folder did not reach the disk.
    """
    check_is_pool(store)
    if check_path(Path(folder)).exists() and not Path(folder).is_dir():
        raise ConfigurationError(f"{folder}: is a file; give the folder that is to be written")
    with _Reader(store) as reader:
        manager = ExperienceManager(PoolRules(n_rollout=1), store=reader)
        manager.save_experience_pool_to_disk(folder)
        return Exchanged(
            str(store), len(manager), len(manager.get_task_ids()), manager.refused, unreadable=reader.unreadable
        )


def import_pool(
    store: str | Path,
    source: str | Path,
    rules: PoolRules,
    *,
    replace: bool = False,
    same_run: bool = False,
    tokenizer: MessageTokenizer | None = None,
    task_prefix: str = "",
) -> Exchanged:
    """Fill a store's pool from files or from rollouts; the store is created if there is none.

    Rollouts are admitted step by step, as during training. Importing them again gives the same pool, unless
    ``save_filter="best"`` draws by ``exp_select_mode="random"``.

    Args:
        store: directory or URL of the pool's store.
        source: files of a pool (ours or AgentEvolver's), a folder ``experience_pool`` (its newest step), or a store of
            agent rollouts, which are admitted in order of their policy versions.
        rules: the rules of admission.
        replace: whether files may replace a pool that is not empty. Rollouts are always added.
        same_run: whether policy versions count the steps of the run that will use the pool, because it continues from
            the checkpoint of these rollouts. Otherwise an earlier run made them, and their age is unknown
            (``of_earlier_run``).
        tokenizer: of the run that will use the pool, for rollouts that have messages only.
        task_prefix: prepended to the name of every task, as in the run that will use the pool.

    Raises:
        ConfigurationError: ``store`` is not a pool; or the pool is not empty and ``replace`` is not set, or it has
            another tokenizer; or the files have messages only, and there is no tokenizer.
        StoreNotFoundError: there is nothing at ``source``.
        StoreLockedError: a run is using the store.
        CorruptStoreError: the store or the files cannot be read.
    """
    path = check_path(Path(source))
    files = path if (path / POOL_FILES[0]).is_file() else newest_pool(path)
    if files is None and path.exists() and Path(store).exists() and path.samefile(store):
        raise ConfigurationError(
            f"{store}: is both the pool and the source of the import; name another store of rollouts"
        )
    if files is None:
        with _Reader(source) as reader:  # first, so that an unreadable source does not leave an empty pool
            rollouts, unreadable = reader.rollouts(), reader.unreadable
    check_is_pool(store)
    with BufferStore.open(store) as buffer:
        manager = ExperienceManager(rules, store=buffer, tokenizer=tokenizer)
        before, entered = len(manager), 0
        if files is None:
            left_out: dict[LeftOut, int] = {}
            with_task = [
                dataclasses.replace(rollout, task_id=task_prefix + rollout.task_id)
                for rollout in rollouts
                if rollout.task_id
            ]
            for step, same_step in itertools.groupby(with_task, _step_of):
                stamped = [rollout if same_run and step >= 0 else of_earlier_run(rollout) for rollout in same_step]
                offered, refused = manager.admit(stamped, asked_for(stamped), left_out=left_out)
                entered += offered - refused
            left_out_reasons, read = _sentences(left_out, rollouts, rules), len(rollouts) + unreadable
        else:
            if len(manager) and not replace:
                raise ConfigurationError(
                    f"{store}: the pool holds {trajectories(len(manager))}, which an import from files replaces; say so"
                    " (--replace), or give another store"
                )
            read = manager.load_experience_pool_from_disk(files, same_run=same_run, task_prefix=task_prefix)
            left_out_reasons, entered, unreadable, before = (), read - manager.refused.total(), 0, 0
        manager.flush()
        return Exchanged(
            str(files or source),
            len(manager),
            len(manager.get_task_ids()),
            manager.refused,
            read=read,
            before=before,
            entered=entered,
            left=manager.left,
            left_out=left_out_reasons,
            unreadable=unreadable,
            tokenized=manager.tokenized.made,
            without_log_probs=manager.tokenized.without_log_probs,
        )


def check_is_pool(store: str | Path) -> None:
    """Refuse a place that holds something other than a pool, since pool entries would mix with other trajectories.

    A missing place and a store without trajectories pass.

    Raises:
        ConfigurationError: it holds something else, which the message names.
        StoreNotFoundError: it is a file.
        CorruptStoreError: it cannot be read.
    """
    try:
        place = find_place(store)
    except StoreNotFoundError:
        if "://" not in str(store) and Path(store).is_file():
            raise
        return
    if place.kind != "store":
        descriptions = {"rlinf": "a directory of RLinf", "experience_pool": "the files of a pool, not its store"}
        folder = "a run directory" if place.rank_names else "a folder"
        description = descriptions.get(place.kind) or f"{folder} with {listed(part.name for part in place.parts)}"
        raise ConfigurationError(f"{store}: holds {description}; give the directory of the pool's store")
    with _Reader(store) as reader:
        numbers = reader.ids()
        if not numbers or reader.newest_point() is not None:
            return
    raise ConfigurationError(
        f"{store}: holds {trajectories(len(numbers))} (ids {numbers[0]:,} to {numbers[-1]:,}) and no experience pool,"
        " whose entries would be mixed with them; give the pool its own directory"
    )


def _sentences(
    left_out: Mapping[LeftOut, int], rollouts: Sequence[AgentTrajectory], rules: PoolRules
) -> tuple[str, ...]:
    """Return how many rollouts could never enter, and why, the most frequent reason first."""
    positive = rules.save_filter == "positive"
    below = [rollout for rollout in rollouts if not is_replayed(rollout) and not is_worth_keeping(rollout, rules)]
    highest = max((outcome for rollout in below if (outcome := known_outcome(rollout)) is not None), default=0.0)
    failing = "have no outcome above 0" if positive else "are no successes"
    bound = "save_filter positive" if positive else f"success_threshold {rules.success_threshold:g}"
    texts: dict[LeftOut, str] = {
        "replayed": "came out of a pool themselves",
        "not_worth_keeping": f"{failing}: the highest outcome is {highest:g}, {bound}",
        "solved": "are of tasks that were solved when they came: every rollout of that step, or of an earlier one"
        " without a failure since, is a success",
        "out_of_bounds": f"are of tasks that do not have {rules.bounds} (n_rollout)",
        "not_best": "are not the best of their task and step (save_filter)",
    }
    counts = Counter({texts[reason]: count for reason, count in left_out.items()})
    counts["have no task_id"] = sum(not rollout.task_id for rollout in rollouts)
    return tuple(f"{count:,} {reason}" for reason, count in (+counts).most_common())


def _step_of(rollout: AgentTrajectory) -> int:
    """Return a rollout's step, as counted by its own run; -1 if it has none.

    In a step of verl's asynchronous trainer, rollouts have several policy versions; ``metadata["step"]`` is their step.
    """
    metadata = rollout.metadata
    earlier = metadata.get(EARLIER_RUN)
    version = earlier.get("policy_version") if isinstance(earlier, Mapping) else rollout.policy_version
    step = metadata.get("step") if "max_global_steps" in metadata else version
    return step if isinstance(version, int) and isinstance(step, int) else -1


class _Reader(BufferStore):
    """A store of agent trajectories, loaded into a buffer that does not write."""

    def __init__(self, path: str | Path) -> None:
        from trajstore._core.buffer.replay_buffer import TrajectoryReplayBuffer

        if "://" not in str(path) and not Path(path).is_dir():
            raise StoreNotFoundError(f"{path}: no such directory")
        self.store_id = ""
        self._damaged: set[int] = set()
        self._path = path
        self._buffer = TrajectoryReplayBuffer(enable_cache=False)
        self._absent = self._buffer.load_checkpoint(str(path), strict=False)

    @property
    def unreadable(self) -> int:
        """Number of trajectories whose files are absent, or were read and found damaged."""
        return self._absent + len(self._damaged)

    def rollouts(self) -> list[AgentTrajectory]:
        """Return all readable rollouts in order of their policy versions, unknown ones first; sessions as one each."""
        readable = []
        for number in self.ids():
            with suppress(CorruptStoreError):  # counted in `unreadable`
                readable.append(self.get(number))
        return sorted(whole_sessions(readable, strict=False), key=_step_of)

    def close(self) -> None:
        self._buffer.close()

    def _catalog(self) -> Catalog:
        return Catalog.open(open_directory(self._path))

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        try:
            trajectory = super().get(trajectory_id)
        except CorruptStoreError:
            self._damaged.add(trajectory_id)
            raise
        except InvalidTrajectoryError as error:
            raise ConfigurationError(f"{self._path}: {error}") from error
        return replace(trajectory, notes={}) if trajectory.notes else trajectory  # the notes belong to the other store

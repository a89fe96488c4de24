"""Pools filled from rollouts and files, and written as files: the work of ``trajstore pool``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer_hooks.replay.agentevolver import with_fields_of_metadata
from trainer_hooks.replay.entry import EARLIER_RUN, is_demonstration, of_earlier_run
from trainer_hooks.replay.message_rows import MessageTokenizer, Tokenized, tokenized
from trainer_hooks.replay.outcomes import asked_for, is_replayed, known_outcome
from trainer_hooks.replay.persistence import newest_pool
from trainer_hooks.replay.pool import ExperienceManager
from trainer_hooks.replay.rows import whole_sessions
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.selection import LeftOut, is_worth_keeping, outcome_refusal
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
from trajstore.trajectory import AgentTrajectory, Reward


@dataclass(frozen=True)
class Exchanged:
    """Result of writing a pool as files, or of filling one.

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
        control_tokens: names of control tokens in their texts, each of which has a space in it now.
        problems: for each rollout whose messages cannot become tokens, its name and the reason.
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
    control_tokens: int = 0
    problems: tuple[str, ...] = ()


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
    if holds_others(store):
        raise ConfigurationError(f"{store}: holds rollouts and no experience pool; there is nothing to export")
    if check_path(Path(folder)).exists() and not Path(folder).is_dir():
        raise ConfigurationError(f"{folder}: is a file; give the folder that is to be written")
    with _Reader(store) as reader:
        manager = ExperienceManager(PoolRules(n_rollout=1), store=reader)
        manager.save_experience_pool_to_disk(folder)
        return Exchanged(
            str(store), len(manager), len(manager.get_task_ids()), manager.refused, unreadable=reader.unreadable
        )


def seed_pool(
    store: str | Path,
    source: str | Path,
    rules: PoolRules,
    *,
    same_run: bool = False,
    tokenizer: MessageTokenizer | None = None,
    task_prefix: str = "",
    outcome: float | None = None,
) -> Exchanged:
    """Fill a store's pool from rollouts or from pool files; the store is created if there is none.

    Rollouts are admitted step by step, as during training, and demonstrations
    (``metadata["demonstration"]``, and messages without matching log-probs) by :meth:`ExperienceManager.seed`. Seeding
    from the same rollouts again gives the same pool, unless ``save_filter="best"`` draws by
    ``exp_select_mode="random"``.

    Args:
        store: directory or URL of the pool's store.
        source: a store of agent rollouts, which are admitted in order of their policy versions; or files of a pool
            (ours or AgentEvolver's), or a folder ``experience_pool`` (its newest step), for an empty pool.
        rules: the rules of admission.
        same_run: whether policy versions count the steps of the run that will use the pool, because it continues from
            the checkpoint of these rollouts. Otherwise an earlier run made them, and their age is unknown
            (``of_earlier_run``).
        tokenizer: of the run that will use the pool, for rollouts that have messages only.
        task_prefix: prepended to the name of every task, as in the run that will use the pool.
        outcome: of rollouts that have none.

    Raises:
        ConfigurationError: ``store`` is not a store; or files are given for a pool that is not empty, or together with
            ``outcome``; or the pool has another tokenizer, or rules that never replay demonstrations; or the files have
            messages only, and there is no tokenizer.
        StoreNotFoundError: there is nothing at ``source``.
        StoreLockedError: a run is using the store.
        CorruptStoreError: the store or the files cannot be read.
    """
    path = check_path(Path(source))
    files = path if (path / POOL_FILES[0]).is_file() else newest_pool(path)
    if files is None:
        if path.exists() and Path(store).exists() and path.samefile(store):
            raise ConfigurationError(f"{store}: is both the pool and its source; name another store of rollouts")
        with _Reader(source) as reader:  # first, so that an unreadable source does not leave an empty pool
            rollouts, unreadable = reader.rollouts(), reader.unreadable
    elif outcome is not None:
        raise ConfigurationError(f"outcome: {outcome:g}, but trajectories in the files of {files} have theirs")
    is_recording = holds_others(store)
    with BufferStore.open(store) as buffer:
        buffer.is_recording |= is_recording  # the pool then chooses among what is recorded later, and evicts none
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        manager = ExperienceManager(
            rules,
            store=buffer,
            tokenizer_fingerprint=fingerprint,
            tokenizer=tokenizer if files else None,  # rollouts have their tokens before they are admitted
        )
        before = len(manager)
        if files is None:
            prepared = [_prepared(rollout, task_prefix, outcome) for rollout in rollouts]
            each = [tokenized([rollout], tokenizer) if tokenizer else Tokenized([rollout]) for rollout in prepared]
            made = sum(each, Tokenized([]))
            made.log(source)
            problems = tuple(
                f"rollout {rollout.rollout_id!r} of task {rollout.task_id!r}: {problem}"
                for rollout, result in zip(prepared, each, strict=True)
                for problem in result.problems
            )
            left_out = _admit(manager, [one for result in each for one in result.histories], same_run=same_run)
            read = len(rollouts) + unreadable
            entered = len(rollouts) - sum(left_out.values()) - manager.refused.total()
        else:
            if before:
                raise ConfigurationError(
                    f"{store}: the pool holds {trajectories(before)}, whose buckets and skip set files would replace;"
                    " give another store"
                )
            read = manager.load_experience_pool_from_disk(files, same_run=same_run, task_prefix=task_prefix)
            left_out, entered, unreadable, made = {}, read - manager.refused.total(), 0, manager.tokenized
            problems = tuple(made.problems)
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
            left_out=tuple(f"{count:,} {reason}" for reason, count in Counter(left_out).most_common()),
            unreadable=unreadable,
            tokenized=made.made,
            without_log_probs=made.without_log_probs,
            control_tokens=made.control_tokens,
            problems=problems,
        )


def _prepared(rollout: AgentTrajectory, task_prefix: str, outcome: float | None) -> AgentTrajectory:
    """Return a rollout with its task's whole name, AgentEvolver's values in its fields, and an outcome if given."""
    rollout = with_fields_of_metadata(rollout)
    if rollout.task_id:
        rollout = replace(rollout, task_id=task_prefix + rollout.task_id)
    if outcome is not None and known_outcome(rollout) is None:
        rollout = replace(rollout, reward=replace(rollout.reward or Reward(), outcome=outcome))
    return rollout


def _admit(manager: ExperienceManager, rollouts: Sequence[AgentTrajectory], *, same_run: bool) -> dict[str, int]:
    """Admit rollouts step by step, then demonstrations; return the number that could never enter, by reason."""
    with_task = [rollout for rollout in rollouts if rollout.task_id]
    demonstrations = [rollout for rollout in with_task if is_demonstration(rollout)]
    sampled = [rollout for rollout in with_task if not is_demonstration(rollout)]
    for step, same_step in itertools.groupby(sampled, _step_of):
        stamped = [rollout if same_run and step >= 0 else of_earlier_run(rollout) for rollout in same_step]
        manager.admit(stamped, asked_for(stamped))
    worthy = [one for one in demonstrations if is_worth_keeping(one, manager.rules) or outcome_refusal(one)]
    manager.left_out["not_worth_keeping"] += len(demonstrations) - len(worthy)
    manager.seed(worthy)
    return _sentences(manager.left_out, rollouts, manager.rules)


def holds_others(store: str | Path) -> bool:
    """Return whether a store has trajectories and no pool: the recorded rollouts of a run.

    Raises:
        ConfigurationError: the place holds something that is no store of rollouts, which the message names.
        StoreNotFoundError: it is a file.
        CorruptStoreError: it cannot be read.
    """
    if "://" not in str(store) and (Path(store) / POOL_FILES[0]).is_file():
        raise ConfigurationError(f"{store}: holds the files of a pool, not its store; give the directory of its store")
    try:
        place = find_place(store)
    except StoreNotFoundError:
        if "://" not in str(store) and Path(store).is_file():
            raise
        return False
    if place.kind != "store":
        folder = "a run directory" if place.rank_names else "a folder"
        is_of_rlinf, parts = place.kind == "rlinf", listed(part.name for part in place.parts)
        description = "a directory of RLinf" if is_of_rlinf else f"{folder} with {parts}"
        raise ConfigurationError(f"{store}: holds {description}; give the directory of the pool's store")
    with _Reader(store) as reader:
        newest = reader.newest_id()
        if newest < 0 or reader.newest_point() is not None:
            return False
        with suppress(CorruptStoreError):
            reader.get(newest)  # refuses steps
    return True


def _sentences(
    left_out: Mapping[LeftOut, int], rollouts: Sequence[AgentTrajectory], rules: PoolRules
) -> dict[str, int]:
    """Return how many rollouts could never enter, by the reason in words."""
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
    return +counts


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
        """Return all readable rollouts in order of their policy versions, unknown ones first; sessions as one each.

        Those without a ``rollout_id`` get the name of the store and their id there.
        """
        readable = []
        for number in self.ids():
            with suppress(CorruptStoreError):  # counted in `unreadable`
                rollout = self.get(number)
                name = rollout.rollout_id or f"{Path(self._path).name}/{number}"
                readable.append(replace(rollout, rollout_id=name))
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

"""AgentEvolver's names on the hooks' classes: code of its trainer runs with only its imports changed.

Each class accepts the arguments of AgentEvolver's documents and of its current code, and passes them to the class here
that does the work. ``docs/howto/trainers.md`` lists the names and the differences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from trainer_hooks import dataproto, guidance, masks
from trainer_hooks.advantages import compute_grpo_outcome_advantage
from trainer_hooks.batch import BatchRow, build_batch
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance.config import GuidanceConfig
from trainer_hooks.guidance.manager import RolloutMode
from trainer_hooks.guidance.summary import by_task, conversation_of
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.replay import REPLAY_MARK, mean_entropy
from trainer_hooks.replay import ExperienceManager as Pool
from trainer_hooks.replay import ExperienceMixCollateFn as Mixer
from trainer_hooks.replay.agentevolver import from_agentevolver, values_in_metadata
from trainer_hooks.replay.entry import PoolEntry, own_entropy
from trainer_hooks.replay.message_rows import MessageTokenizer
from trainer_hooks.replay.outcomes import count_outcomes, is_replayed
from trainer_hooks.replay.rows import rows_of
from trainer_hooks.replay.selection import choose_to_save, in_bounds, outcome_refusal
from trainer_hooks.replay.wellformed import field_problem
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, counted
from trajstore.trajectory import AgentTrajectory
from trajstore.trajectory import Reward as PlainReward

if TYPE_CHECKING:
    from verl import DataProto

logger = logging.getLogger(__name__)

__all__ = [
    "EMClient",
    "ExperienceManager",
    "ExperienceMixCollateFn",
    "ExperienceWorker",
    "ReplayEnvManager",
    "ReplayTrainer",
    "Reward",
    "TaskExpConfig",
    "TrajExpConfig",
    "Trajectory",
    "compute_grpo_outcome_advantage",
    "compute_response_mask",
    "from_agentevolver",
    "het_compute_token_on_off_policy_loss",
]

Task = TypeVar("Task")

_OF_RULES = ("max_trajectories_per_task", "experience_lbound", "experience_rbound", "exp_select_mode")


_TODAY = {
    "train_rollout_mode": "train_rollout_expmode",
    "val_rollout_mode": "val_rollout_expmode",
    "rollout_ratio": "rollout_expratio",
    "train_sample_mode": "train_sample_expmode",
    "init_exp_before_training": "init_experience_before_training",
}
"""Options of ``exp_manager`` in AgentEvolver's current code, and their names in its documents, which are those here."""

_OF_TRAINER = ("init_exp_only", "init_experience_only")
"""Options that AgentEvolver's trainer reads itself."""


def _guidance_of(config: Any) -> GuidanceConfig:
    """Return the guidance options of a configuration with AgentEvolver's names.

    Raises:
        ConfigurationError: unknown keys, one option given twice, values out of range.
    """
    given = dict(config.get("exp_manager") or {})
    maker = dict(config.get("experience_maker") or {})
    if "summary_batch_size" in given:
        if "summary_batch_size" in maker:
            raise ConfigurationError("summary_batch_size: in exp_manager and in experience_maker; give one of them")
        maker["summary_batch_size"] = given.pop("summary_batch_size")
    options: dict[str, Any] = {}
    for key, value in given.items():
        name = str(_TODAY.get(key, key))
        if name in options:
            raise ConfigurationError(f"exp_manager: gives the option {name} under two names; give one of them")
        if name not in _OF_TRAINER:
            options[name] = value
    return GuidanceConfig.from_config({"experience_maker": maker, "exp_manager": options})


def _sampling(name: Any) -> Any:
    """Return the name here of a way to sample tasks."""
    return "by_difficulty" if name in ("uniform", "random") else name


class Reward(PlainReward):
    """A reward with AgentEvolver's ``madness``, kept in ``metadata``."""

    def __init__(self, *, madness: float = 0.0, **fields: Any) -> None:
        super().__init__(**fields)
        if madness:
            self.metadata = {**self.metadata, "madness": madness}

    @property
    def madness(self) -> float:
        """Penalty for the model's mistakes; 0 without any."""
        return float(self.metadata.get("madness", 0.0))

    @property
    def success(self) -> bool:
        """True if the outcome is above 0."""
        return (self.outcome or 0.0) > 0

    def model_dump(self) -> dict[str, Any]:
        """Return the values by name, as AgentEvolver's ``group_tokenize`` asks for them."""
        return {**asdict(self), "madness": self.madness}


class Trajectory(AgentTrajectory):
    """A trajectory whose messages are also called ``steps``; positional arguments are in AgentEvolver's order."""

    def __init__(
        self,
        data_id: str = "",
        rollout_id: str = "",
        steps: list[dict[str, Any]] | None = None,
        query: str = "",
        is_terminated: bool | None = None,
        reward: PlainReward | None = None,
        metadata: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        if steps is not None:
            if "messages" in fields:
                raise ConfigurationError("steps: the same as messages; give one of them")
            fields["messages"] = steps
        super().__init__(
            data_id=data_id,
            rollout_id=rollout_id,
            query=query,
            is_terminated=is_terminated,
            reward=reward,
            metadata={} if metadata is None else metadata,
            **fields,
        )

    @classmethod
    def of_history(cls, history: AgentTrajectory) -> Trajectory:
        """Return a history, with its values also in ``metadata``, where AgentEvolver's code reads them."""
        values = {item.name: getattr(history, item.name) for item in fields(history)}
        values["metadata"] = {**history.metadata, **values_in_metadata(history)}
        values["reward"] = None if history.reward is None else Reward(**asdict(history.reward))
        return cls(**values)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The messages."""
        return self.messages

    @property
    def success(self) -> bool:
        """True if the outcome is above 0."""
        return self.reward is not None and (self.reward.outcome or 0.0) > 0


@dataclass
class TaskExpConfig:
    """Guidance of one task in a step: a flag for each rollout, and whether training keeps the experience."""

    add_exp: list[bool]
    train_mode: guidance.TrainMode = "discard"


@dataclass(kw_only=True)
class TrajExpConfig(guidance.TrajExpConfig):
    """Guidance of one rollout, and the rollout's names."""

    add_exp: bool = True
    data_id: str = ""
    rollout_id: str = ""
    query: str = ""
    mode: RolloutMode = "sample"


class EMClient(guidance.EMClient):
    """Client of a ReMe service whose calls name their workspace; see :class:`trainer_hooks.guidance.EMClient`.

    A failed call is logged and returns an empty text.

    Args:
        base_url: of the service.
        timeout: seconds for one call.
    """

    def __init__(self, base_url: str = "http://localhost:8001", timeout: float = 1200.0) -> None:
        super().__init__(base_url, retrieve_timeout=timeout, summary_timeout=timeout)

    def call_context_generator(self, trajectory: Any, retrieve_top_k: int = 1, workspace_id: str = "default") -> str:
        """Return the experiences for a trajectory's messages as one text; empty if there are none, or the call failed.

        Args:
            trajectory: with messages.
            retrieve_top_k: number of experiences.
            workspace_id: workspace to search.
        """
        query = conversation_of(from_agentevolver(trajectory).messages)
        try:
            return self.retrieve(query, retrieve_top_k, workspace_id=workspace_id).text
        except guidance.MakerError as error:
            logger.warning("guidance: retrieving experience failed: %s", error)
            return ""

    def call_summarizer(self, trajectories: Sequence[Any], workspace_id: str = "default") -> tuple[int | str, float]:
        """Send trajectories to the service, which makes experiences of them.

        Returns:
            The number of experiences made (an empty text if the call failed), and the seconds that the call took.
        """
        start = time.monotonic()
        made: int | str = ""
        try:
            made = self.summarize(list(map(from_agentevolver, trajectories)), workspace_id=workspace_id)
        except guidance.MakerError as error:
            logger.warning("guidance: summarizing %s failed: %s", counted(len(trajectories), "trajectory"), error)
        return made, time.monotonic() - start


class ExperienceManager(Pool):
    """The experience pool and the allocation of guidance, both from a trainer's configuration.

    Args:
        config: the trainer's configuration, or its section ``exp_manager``: a dict, or a node of OmegaConf.
        n_rollout: rollouts per task; ``None`` = ``actor_rollout_ref.rollout.n`` of the configuration.
        pool: further arguments of :class:`trainer_hooks.replay.ExperienceManager`, such as ``store``.

    Raises:
        ConfigurationError: values out of range, or the number of rollouts is unknown.
    """

    def __init__(self, config: Any, *, n_rollout: int | None = None, **pool: Any) -> None:
        self.config = _trainer_config(config)
        section = self.config["exp_manager"]
        self._rollout = _lookup(self.config, "actor_rollout_ref.rollout")
        n = _lookup(self._rollout, "n") if n_rollout is None else n_rollout
        if n is None:
            raise ConfigurationError(
                "n_rollout: the configuration has no actor_rollout_ref.rollout.n; give the whole configuration, or"
                " n_rollout="
            )
        keys = dict(_lookup(section, "experience_replay") or {})
        self.use_current_policy_entropy = bool(keys.pop("use_current_policy_entropy", True))
        if "task_sampling" in keys:
            keys["task_sampling"] = _sampling(keys["task_sampling"])
        replay = ExperienceReplayConfig.from_mapping(keys)
        super().__init__(replay.pool_rules(n), **pool)
        self.replay_start_ratio = replay.replay_start_ratio
        self.guidance = _guidance_of(self.config)
        self._allocation = guidance.GuidanceManager(self.guidance.rules(), seed=self.guidance.seed)
        of_guidance = [item.name for item in fields(guidance.AllocationRules)]
        for options, names in ((self.rules, _OF_RULES), (self.guidance, of_guidance)):
            for name in names:  # attributes that AgentEvolver's code reads
                setattr(self, name, getattr(options, name))
        self.em_client = None if self.guidance.base_url is None else EMClient(self.guidance.base_url)
        self.thread_pool = ThreadPoolExecutor(max_workers=self.guidance.workers, thread_name_prefix="summaries")

    # ---- guidance ----

    def get_complete_exp_configs(self, tasks: Sequence[Any], mode: RolloutMode = "sample") -> list[TaskExpConfig]:
        """Return train mode and guided rollouts of each task.

        Args:
            tasks: of the step.
            mode: ``sample`` in training; ``validate`` in validation, with ``rollout.val_kwargs.n`` rollouts per task.
        """
        return self.allocate_add_exp(self.allocate_train_mode(tasks), mode)

    def allocate_train_mode(self, tasks: Sequence[Any]) -> list[TaskExpConfig]:
        """Return the train mode of each task, without guided rollouts."""
        return [TaskExpConfig([], mode) for mode in self._allocation.allocate_train_mode(tasks)]

    def allocate_add_exp(self, exp_configs: list[TaskExpConfig], mode: RolloutMode) -> list[TaskExpConfig]:
        """Choose each task's guided rollouts; change and return the given configurations."""
        n = self.rules.n_rollout
        if mode == "validate":
            n = _lookup(self._rollout, "val_kwargs.n") or n
        for config, flags in zip(
            exp_configs, self._allocation.allocate_add_exp([n] * len(exp_configs), mode), strict=True
        ):
            config.add_exp = list(flags)
        return exp_configs

    def update_experience_pool(
        self, trajectories: Sequence[Any], global_steps: int | None = None
    ) -> Future[tuple[int | str, float]] | None:
        """Send trajectories to the ReMe service in the background, in every ``updated_freq``-th step.

        Args:
            trajectories: rollouts of the step.
            global_steps: the step; ``None`` = :attr:`global_steps`.

        Returns:
            The call's future, whose result is that of ``call_summarizer``; ``None`` in other steps.
        """
        step = self.global_steps if global_steps is None else global_steps
        options = self.guidance
        if not options.enable_summarizer or not options.updated_freq or step % options.updated_freq:
            return None
        if self.em_client is None:
            raise ConfigurationError(
                "experience_maker.base_url: not given, but enable_summarizer needs a service; the embedded maker"
                " belongs to trainer_hooks.guidance.hook.GuidanceHook"
            )
        return self.thread_pool.submit(self.em_client.call_summarizer, trajectories, options.workspace_id)

    submit_summary_task = update_experience_pool

    def collect_summary_result(self, summary_task: Future[tuple[int | str, float]] | None) -> float | None:
        """Wait for a summary; return its seconds, ``None`` without one."""
        return None if summary_task is None else summary_task.result()[1]

    def summarize_in_batch(self, trajectories: Sequence[Any]) -> None:
        """Send all rollouts to the ReMe service, ``summary_batch_size`` of one task in a call, and wait."""
        if self.em_client is None:
            raise ConfigurationError("experience_maker.base_url: not given, but summarize_in_batch needs a service")
        tasks = by_task(list(map(from_agentevolver, trajectories)))
        size, name = self.guidance.summary_batch_size, self.guidance.workspace_id
        calls = [rollouts[at : at + size] for rollouts in tasks for at in range(0, len(rollouts), size)]
        list(self.thread_pool.map(self.em_client.call_summarizer, calls, [name] * len(calls)))

    # ---- replay ----

    def update_difficulty2task_dict(self, trajectories: Sequence[Any], asked: Mapping[str, int] | None = None) -> None:
        """Put every task into its bucket, and retire solved ones (:meth:`ExperienceManager.judge`)."""
        read = list(map(from_agentevolver, trajectories))
        self.judge(read, {one.task_id: self.rules.n_rollout for one in read} if asked is None else asked)

    def update_skip_uid_set_and_filter_trajectories(
        self,
        trajectories: Sequence[Any],
        n_rollout: int | None = None,
        entropys: Sequence[torch.Tensor] | torch.Tensor | None = None,
        response_mask: Sequence[torch.Tensor] | torch.Tensor | None = None,
        asked: Mapping[str, int] | None = None,
    ) -> list[Any]:
        """Retire solved tasks, and return those of the given rollouts that are worth keeping.

        All get ``metadata["entropy"]``, those returned also ``metadata["policy_version"]`` if unknown. Log-probs may be
        set before this call or after it, but before :meth:`save_trajectories_to_memory`.

        Args:
            trajectories: the step's rollouts, of AgentEvolver's classes or :class:`AgentTrajectory`.
            n_rollout: number of rollouts requested of every task.
            entropys: ``[N, R]``, nats, or ``None``.
            response_mask: as ``entropys``; 1 where the model wrote.
            asked: number of requested rollouts by task, instead of ``n_rollout``.

        Raises:
            InvalidTrajectoryError: a trajectory has no ``task_id``.
            ConfigurationError: both ``asked`` and ``n_rollout`` are given.
        """
        read = list(map(from_agentevolver, trajectories))
        if n_rollout is not None:
            if asked is not None:
                raise ConfigurationError("n_rollout: the same as asked for each task; give one of them")
            asked = {trajectory.task_id: n_rollout for trajectory in read}
        self.judge(read, asked)
        outcomes = count_outcomes(read, self.rules.success_threshold, asked)
        enter = {name for name, outcome in outcomes.items() if in_bounds(outcome, self.rules)} - self.skip_uid_set
        means: list[float | None] = [None] * len(read)
        if entropys is not None and response_mask is not None:
            means = [mean_entropy(*row) for row in zip(entropys, response_mask, strict=True)]
        candidates: dict[str, list[AgentTrajectory]] = {}
        places: dict[int, int] = {}
        for number, (given, rollout, mean) in enumerate(zip(trajectories, read, means, strict=True)):
            if (refusal := outcome_refusal(rollout)) and not is_replayed(rollout):
                self.refused[refusal.value] += 1
            if rollout.task_id in enter and not is_replayed(rollout):
                entropy = own_entropy(rollout) if mean is None and not field_problem(rollout) else mean
                copy = replace(rollout, entropy=entropy)
                candidates.setdefault(rollout.task_id, []).append(copy)
                places[id(copy)] = number
            if mean is not None:
                given.metadata["entropy"] = mean
        chosen = [one for held in candidates.values() for one in choose_to_save(held, self.rules, self._generator)]
        for rollout in chosen:
            given = trajectories[places[id(rollout)]]
            if rollout.entropy is not None:
                given.metadata["entropy"] = rollout.entropy
            if rollout.policy_version is None:
                given.metadata["policy_version"] = self.global_steps
        return [trajectories[places[id(rollout)]] for rollout in chosen]

    def save_trajectories_to_memory(self, trajectories: Sequence[Any]) -> int:
        """Add rollouts to the pool (:meth:`ExperienceManager.seed`), and return how many of them it now holds."""
        return len(trajectories) - self.seed(list(map(from_agentevolver, trajectories))).total()

    @property
    def task2trajectories(self) -> Mapping[str, tuple[Trajectory, ...]]:
        """``{task_id: (trajectory, ...)}``, oldest first, read-only, with values in ``metadata``; reads the pool."""
        return {task: tuple(map(Trajectory.of_history, held)) for task, held in super().task2trajectories.items()}

    def sample_tasks_from_replaypool(self, *unnamed: Any, num_tasks: int = 2, **options: Any) -> list[str]:
        """Draw tasks as in :meth:`trainer_hooks.replay.ExperienceManager`, with named arguments only.

        Raises:
            ConfigurationError: arguments without names, whose order differs between AgentEvolver's versions.
        """
        if unnamed:
            raise ConfigurationError(
                f"sample_tasks_from_replaypool{unnamed!r}: name the arguments (num_tasks=, difficulty=, strategy=);"
                " their order differs between AgentEvolver's versions"
            )
        if "strategy" in options:
            options["strategy"] = _sampling(options["strategy"])
        return super().sample_tasks_from_replaypool(num_tasks, **options)

    def _replayed(self, records: Sequence[tuple[PoolEntry, AgentTrajectory]]) -> list[AgentTrajectory]:
        return [Trajectory.of_history(history) for history in super()._replayed(records)]

    def get_offpolicy_trajectories_from_memory(self, task_id: str, num_trajectories: int = 1) -> list[AgentTrajectory]:
        """Return the up to ``num_trajectories`` best histories of a task."""
        return self.get_offpolicy_batch([task_id], num_trajectories)

    def get_all_candidates_batch(self, tasks: Sequence[Any]) -> dict[str, list[AgentTrajectory]]:
        """Return, for each task that has any, all histories that may be drawn now, oldest first, as marked copies."""
        names = [getattr(task, "task_id", task) for task in tasks]
        candidates = {
            name: self._ledger.read(self._state.eligible(name, self.rules, self.training_step)) for name in names
        }
        return {task: self._replayed(held) for task, held in candidates.items() if held}

    def get_offpolicy_batch(
        self, tasks: Sequence[Any], num_trajectories_per_task: int = 1, use_saved_entropy: bool = False
    ) -> list[AgentTrajectory]:
        """Return histories as in :meth:`trainer_hooks.replay.ExperienceManager.get_offpolicy_batch`.

        Args:
            tasks: task ids, or objects with a ``task_id``.
            num_trajectories_per_task: maximum number of histories per task.
            use_saved_entropy: whether to choose by the saved entropy even if :attr:`current_entropy` is available.
        """
        current = self.current_entropy
        try:
            if use_saved_entropy or not self.use_current_policy_entropy:
                self.current_entropy = None
            return super().get_offpolicy_batch(tasks, num_trajectories_per_task)
        finally:
            self.current_entropy = current


class ExperienceMixCollateFn(Mixer[Task], Generic[Task]):
    """Splits every batch into experience tasks and on-policy tasks, with tasks from a task manager.

    Args:
        exp_manager: the pool.
        train_task_manager: has ``get_task_by_id(task_id)``, which returns a task or ``None``.
        n_rollout: rollouts per task; must be the pool's.
        mixing: further arguments of :class:`trainer_hooks.replay.ExperienceMixCollateFn`.

    Raises:
        ConfigurationError: as there; or ``n_rollout`` is not the pool's.
    """

    def __init__(
        self,
        exp_manager: Pool,
        train_task_manager: Any,
        exp_ratio: float | Callable[[float], float] = 0.5,
        replay_start_ratio: float = 0.0,
        offpolicy_trajectories_per_task: int | None = None,
        n_rollout: int | None = None,
        **mixing: Any,
    ) -> None:
        if n_rollout not in (None, exp_manager.rules.n_rollout):
            raise ConfigurationError(f"n_rollout: {n_rollout}, the pool's is {exp_manager.rules.n_rollout}")
        self.exp_manager, self.train_task_manager = exp_manager, train_task_manager
        self.exp_ratio, self.replay_start_ratio = exp_ratio, replay_start_ratio
        super().__init__(
            exp_manager,
            self._get_task_by_id,
            exp_ratio=exp_ratio,
            replay_start_ratio=replay_start_ratio,
            offpolicy_trajectories_per_task=offpolicy_trajectories_per_task,
            **mixing,
        )
        self.offpolicy_trajectories_per_task, self.n_rollout = self._histories, self._n_rollout

    def _get_task_by_id(self, task_id: str) -> Task | None:
        task: Task | None = self.train_task_manager.get_task_by_id(task_id)
        return task


class ExperienceWorker(guidance.ExperienceWorker):
    """Inserts experience of a ReMe service into messages, and removes it.

    Args:
        config: the trainer's configuration, or its section ``exp_manager``.

    Raises:
        ConfigurationError: values out of range, or experience is to be inserted without a service.
    """

    def __init__(self, config: Any) -> None:
        self.config = _trainer_config(config)
        options = _guidance_of(self.config)
        self.experience_template = options.experience_template
        self.em_client = None if options.base_url is None else EMClient(options.base_url)
        maker = None
        if options.enable_context_generator:
            if options.base_url is None:
                raise ConfigurationError(
                    "experience_maker.base_url: not given, but enable_context_generator needs a service; the embedded"
                    " maker belongs to trainer_hooks.guidance.hook.GuidanceHook"
                )
            maker = guidance.EMClient(options.base_url, workspace_id=options.workspace_id, dialect=options.dialect)
        self._text = guidance.ExperienceTemplate.of(options.experience_template)
        super().__init__(maker, template=self._text, retrieve_top_k=options.retrieve_top_k)

    def manage_rollout_context(  # type: ignore[override]  # AgentEvolver's name and result
        self, init_messages: Sequence[Mapping[str, Any]], traj_exp_config: guidance.TrajExpConfig
    ) -> tuple[list[dict[str, Any]], guidance.TrajExpConfig]:
        """Return the messages to send to the model, and the given configuration, which records the insertion."""
        return super().manage_rollout_context(init_messages, traj_exp_config), traj_exp_config

    def manage_training_context(self, message: str, metadata_config: Mapping[str, Any]) -> tuple[str, str]:
        """Return the experience in a message, and the message to train on.

        Args:
            message: text of one message.
            metadata_config: metadata of the rollout; unless its ``task_train_mode`` (or ``task_train_exp_mode``) is
                ``discard``, nothing is removed.
        """
        mode = metadata_config.get("task_train_mode", metadata_config.get("task_train_exp_mode", "discard"))
        if mode != "discard":
            return "", message
        found, cleaned = guidance.strip_template(message, self._text)
        return "\n".join(found), cleaned


class ReplayEnvManager:
    """Methods for an environment manager: histories as rollouts of this step, and both as a ``DataProto``.

    ``tokenizer`` must be set: a tokenizer of Hugging Face.
    """

    tokenizer: Any

    def convert_offpolicy_to_cmt(
        self,
        offpolicy_trajectories: Sequence[Any],
        config: Any = None,
        tokenizer: Any = None,
        task_id_to_data_id: Mapping[str, int] | None = None,
    ) -> list[Trajectory]:
        """Return histories marked as replayed, each with the ``data_id`` of its task's fresh rollouts.

        Args:
            offpolicy_trajectories: from ``get_offpolicy_batch``; not changed. Recorded tokens are kept as they are.
            config: not needed; accepted because AgentEvolver's code gives it.
            tokenizer: makes tokens of histories with messages only; ``None`` = ``self.tokenizer``.
            task_id_to_data_id: position of each task in the batch.

        Raises:
            InvalidTrajectoryError: a history's task is not in the batch, so it has no group.
        """
        positions = task_id_to_data_id or {}
        converted = []
        for history in map(from_agentevolver, offpolicy_trajectories):
            if history.task_id not in positions:
                raise InvalidTrajectoryError(
                    f"task_id_to_data_id: has no task {history.task_id!r}; a history must be in a group with its"
                    " task's fresh rollouts"
                )
            if history.input_ids is None:
                history = MessageTokenizer.of(self.tokenizer if tokenizer is None else tokenizer).rows_of(history)
            metadata = {**history.metadata, REPLAY_MARK: True}
            history = replace(history, data_id=str(positions[history.task_id]), metadata=metadata)
            converted.append(Trajectory.of_history(history))
        return converted

    def to_dataproto(self, cmt_array: Sequence[Any]) -> DataProto:
        """Return trajectories as a ``DataProto`` with the keys of :mod:`trainer_hooks.batch`.

        Args:
            cmt_array: fresh rollouts and converted histories, with tokens; ``data_id`` is the number of the group.

        Raises:
            InvalidTrajectoryError: a trajectory lacks tokens, or its ``data_id`` is not a number.
            MissingDependencyError: verl is not installed.
        """
        return self.samples_to_dataproto(self.trajectories_to_samples(cmt_array))

    def get_extra(self, cmt: Any) -> dict[str, Any]:
        """Return a rollout's values for ``extras`` of its rows; ``task_train_expmode`` is ``discard`` or ``keep``."""
        guided = guidance.Guidance.of(cmt)
        mode = cmt.metadata.get("task_train_exp_mode") if guided is None else guided.train_mode
        return {
            "add_exp": bool(cmt.metadata.get("add_exp")) if guided is None else True,
            "task_train_expmode": "discard" if mode == "discard" else "keep",
            "experience_list": cmt.metadata.get("experience_list", []),
            "is_experience_replay": bool(cmt.metadata.get(REPLAY_MARK)),
            "old_log_probs": cmt.metadata.get("old_log_probs"),
        }

    def trajectories_to_samples(self, cmt_array: Sequence[Any]) -> list[BatchRow]:
        """Return the rows of trajectories; see :meth:`to_dataproto`."""
        rows = []
        for position, given in enumerate(cmt_array):
            trajectory = from_agentevolver(given)
            if not trajectory.data_id.isdecimal():
                raise InvalidTrajectoryError(
                    f"trajectories[{position}]: data_id {trajectory.data_id!r}, must be the position of its task"
                )
            extras, parts = self.get_extra(given), rows_of(trajectory)
            rows += [
                BatchRow(
                    trajectory=part,
                    group_id=int(trajectory.data_id),
                    is_experience_replay=bool(extras.get("is_experience_replay")),
                    add_exp=bool(extras.get("add_exp")),
                    train_mode=extras.get("task_train_expmode") or "keep",
                    rollout=None if len(parts) == 1 else (position, number, len(parts)),
                    extras=extras,
                )
                for number, part in enumerate(parts)
            ]
        return rows

    def samples_to_dataproto(self, samples: Sequence[BatchRow]) -> DataProto:
        """Return rows as a ``DataProto``; see :meth:`to_dataproto`."""
        pad = self.tokenizer.pad_token_id
        return dataproto.to_dataproto(build_batch(samples, self.tokenizer.eos_token_id if pad is None else pad))


class ReplayTrainer:
    """Methods for a trainer: selection of histories by the current policy's entropy, and recorded log-probs.

    ``exp_manager``, ``env_manager`` (with the methods of :class:`ReplayEnvManager`) and ``actor_rollout_wg`` must be
    set.
    """

    exp_manager: ExperienceManager
    env_manager: Any
    actor_rollout_wg: Any

    def _select_best_offpolicy_by_current_entropy(
        self,
        task_to_candidates: Mapping[str, Collection[AgentTrajectory]],
        tasks: Sequence[Any],
        num_trajectories_per_task: int = 1,
    ) -> list[AgentTrajectory]:
        """Return the best histories of each task that has candidates, by entropy under the current policy.

        Only tasks with more histories than are drawn are scored. If scoring fails, the saved entropy decides; the
        failure is logged.
        """
        self.exp_manager.current_entropy = self._entropies
        having = [task for task in tasks if task_to_candidates.get(getattr(task, "task_id", task))]
        return self.exp_manager.get_offpolicy_batch(having, num_trajectories_per_task)

    def _entropies(self, histories: Sequence[AgentTrajectory]) -> list[float]:
        """Return each history's mean entropy under the current policy, in nats; NaN without tokens of the model."""
        names = dict.fromkeys(history.task_id for history in histories)
        positions = {name: position for position, name in enumerate(names)}
        data = self.env_manager.to_dataproto(
            self.env_manager.convert_offpolicy_to_cmt(histories, task_id_to_data_id=positions)
        )
        entropys = self.actor_rollout_wg.compute_log_prob(data).batch["entropys"]
        mask, rollouts = data.batch["response_mask"], data.batch["rollouts"]
        means = [
            mean_entropy(entropys[rollouts == number], mask[rollouts == number]) for number in range(len(histories))
        ]
        return [float("nan") if mean is None else mean for mean in means]

    def _replace_recorded_old_log_probs(
        self, batch: DataProto, current_old_log_prob: DataProto, entropys: torch.Tensor | None = None
    ) -> DataProto:
        """Return the batch with ``old_log_probs``: the recorded ones on replayed tokens, the current ones elsewhere.

        Args:
            batch: with ``exp_mask`` and ``recorded_old_log_probs``; changed. Without ``recorded_mask``, recorded values
                of 0 are AgentEvolver's filling.
            current_old_log_prob: with ``old_log_probs`` [B, R] under the current policy.
            entropys: not needed; accepted because AgentEvolver's code gives it.
        """
        columns = batch.batch
        recorded = columns["recorded_old_log_probs"]
        columns["old_log_probs"] = masks.replace_recorded_old_log_probs(
            current_old_log_prob.batch["old_log_probs"],
            recorded,
            columns.get("recorded_mask", recorded != 0),
            columns["exp_mask"],
        )
        return batch


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the response's part of ``loss_mask``, [B, R]; of ``attention_mask`` if there is no loss mask."""
    names = data.batch.keys()
    mask = data.batch["loss_mask" if "loss_mask" in names else "attention_mask"]
    return masks.compute_response_mask(mask, data.batch["responses"].shape[1])


def _trainer_config(config: Any) -> Mapping[str, Any]:
    """Return the trainer's configuration, given it or its section ``exp_manager``."""
    if not hasattr(config, "keys"):
        raise ConfigurationError(f"config: {config!r}, must be a configuration with exp_manager")
    if "exp_manager" in config:
        return config  # type: ignore[no-any-return]
    root = config._get_root() if hasattr(config, "_get_root") else None  # a node of OmegaConf knows its configuration
    return root if root is not None and "exp_manager" in root else {"exp_manager": config}


def _lookup(config: Any, path: str) -> Any:
    """Return the value at a dotted path; ``None`` if it is absent."""
    for name in path.split("."):
        config = config.get(name) if hasattr(config, "get") else None
    return config

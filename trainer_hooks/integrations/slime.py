"""Recording and replay for slime and miles, whose functions are named by path.

The functions take their options from slime's arguments, which the YAML file of ``--custom-config-path`` sets:
``trajstore_path``, the directory or URL of the store; ``trajstore_replay``, how many rollouts of each group are
recorded ones (0); ``trajstore_max_staleness``, how many weight versions old a replayed rollout may be (any number); and
``trajstore_source``, the path of the data source to wrap (slime's own, with a buffer).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from trainer_hooks.integrations.rollouts import Recording, agent_trajectory, check_corrects, known, lacking, prompt_key
from trainer_hooks.plain import kept
from trainer_hooks.wrapper import Wrapper
from trajstore import TrajectoryReplayBuffer, annotate
from trajstore._core.base.arguments import whole, whole_or_none
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

SLIME = "slime"
"""Key of ``metadata`` with the other fields of a ``Sample``, and author of late values."""

RECORDED, REPLAYED = "trajectory_id", "replayed"
"""Keys of a sample's ``metadata``: the id under which it is recorded, and true for replayed samples."""

ENDED = ("completed", "truncated")
"""Values of the status of samples that slime does not generate again."""

_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")
_NOT_KEPT = (
    "multimodal_inputs",
    "multimodal_train_inputs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "rollout_indexer_topk",
    "teacher_log_probs",
    "opd_reverse_kl",
)
"""Fields that the store does not keep; a sample that has one is recorded without it, and not replayed."""

_OF_PLACE = ("index", "group_index", "rollout_id", "session_id", "routing_key", "adapter", "reward_spec")
"""Fields that a replayed sample takes from its place; a sample has those of its trainer."""

_UNSUITED = {
    "recompute_logprobs_via_prefill": "computes the log-probs of replayed samples again, so their ratio would be 1",
    "mask_offpolicy_in_partial_rollout": "masks all tokens of a replayed sample, so it would only shift the baseline",
}
"""Arguments that make replay useless, with the reason."""

_recordings: dict[str, Recording] = {}
"""By path: slime's functions share one process, and each is called alone."""


def recording_of(args: Any) -> Recording:
    """Return the recording of ``trajstore_path``; opens the store at the first call in a process.

    Raises:
        ConfigurationError: the path is missing, or an option is out of range.
        StoreLockedError: another process writes to the store.
    """
    path = getattr(args, "trajstore_path", None)
    if not path:
        raise ConfigurationError("trajstore_path: missing; set it in the YAML file of --custom-config-path")
    recording = _recordings.get(path)
    if recording is None or recording.buffer._closed:
        age = whole_or_none("trajstore_max_staleness", getattr(args, "trajstore_max_staleness", None), 0)
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
        recording = _recordings[path] = Recording(buffer, max_staleness=age, by_task=True, needs_reward=True)
        if not _first(args):  # else the user continues the count
            recording.count_on()
    return recording


def _first(args: Any) -> int:
    """Return the first weight version of a job."""
    return getattr(args, "update_weight_start_version", None) or 0


def record_sample(args: Any, sample: Any, evaluation: bool = False) -> None:
    """Record a sample when it ends, for ``--rollout-sample-hook-path``: a crash costs only unfinished ones.

    Its reward follows with :func:`record_samples`.
    """
    if not evaluation and sample.status.value in ENDED:
        _record(args, [sample])


def record_samples(args: Any, samples: list[Any], data_source: Any = None) -> None:
    """Record the samples of a step with their rewards, for ``--rollout-all-samples-process-path``.

    Those that a filter dropped are recorded too; aborted and replayed ones are not.

    Raises:
        InvalidTrajectoryError, StoreWriteError, StoreClosedError: they cannot be recorded.
    """
    rewards, rest = {}, []
    for sample in _leaves(samples):
        own, ended = sample.metadata or {}, sample.status.value not in ("aborted", "pending")
        if RECORDED not in own and REPLAYED not in own and ended:
            rest.append(sample)
        elif RECORDED in own and (reward := known(_reward(args, sample))) is not None:
            rewards[own[RECORDED]] = reward
    if rewards:
        annotate(recording_of(args).buffer, list(rewards), {"outcome": list(rewards.values())}, who=SLIME)
    _record(args, rest)


class ReplayDataSource(Wrapper, wraps="source"):
    """A data source for ``--data-source-path``: puts recorded samples into the groups of the source that it wraps.

    The last samples of a group are recorded ones of the same prompt, with their log-probs and rewards. slime does not
    generate these. ``save`` writes the store first, so that it has the samples that the checkpoint was trained on.

    Raises:
        ConfigurationError: an option is missing or out of range, or slime would not correct for the recorded log-probs.
    """

    def __init__(self, args: Any) -> None:
        self.args, self.recording = args, recording_of(args)
        self.replay = whole("trajstore_replay", getattr(args, "trajstore_replay", 0), 0)
        if self.replay:
            corrects = getattr(args, "use_tis", False) or getattr(args, "use_rollout_logprobs", False)
            check_corrects("slime", corrects, "--use-tis or --use-rollout-logprobs")
            for name, reason in _UNSUITED.items():
                if getattr(args, name, False):
                    flag = name.replace("_", "-")
                    raise ConfigurationError(f"trajstore_replay: --{flag} {reason}; leave one of them out")
        path = getattr(args, "trajstore_source", "slime.rollout.data_source.RolloutDataSourceWithBuffer")
        module, _, name = path.rpartition(".")
        self.source = getattr(importlib.import_module(module), name)(args)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return groups of the source, with recorded samples in place of their last ones."""
        groups: list[list[Any]] = self.source.get_samples(num_samples)
        for group in groups:
            if not all(sample.status.value == "pending" for sample in _leaves(group)):
                continue  # begun in an earlier step
            keys = [_task(sample) for sample in group]
            for at, rollout in self.recording.draw_into_groups(keys, self.recording.newest, self.replay).items():
                sample = _replayed(self.args, rollout, group[at])
                if sample.status.value in ENDED:
                    group[at] = sample
        return groups

    def save(self, rollout_id: Any) -> None:
        """Write the store, and save the source's state."""
        self.recording.buffer.flush()
        self.source.save(rollout_id)

    def load(self, rollout_id: Any = None) -> None:
        """Load the source's state; the next rollout is ``rollout_id + 1``, and slime counts weight versions anew."""
        if rollout_id is not None:
            steps = (rollout_id + 1) // (getattr(self.args, "update_weights_interval", None) or 1)
            self.recording.count_from(steps, _first(self.args))
        self.source.load(rollout_id)

    def __len__(self) -> int:
        return len(self.source)


def _record(args: Any, samples: list[Any]) -> None:
    ids = recording_of(args).record([_recorded(args, sample) for sample in samples])
    for number, sample in zip(ids, samples, strict=True):
        sample.metadata = {**(sample.metadata or {}), RECORDED: number}


def _leaves(samples: Any) -> Iterator[Any]:
    """Yield the samples of a group, of which one rollout may have several."""
    for sample in samples:
        if isinstance(sample, list):
            yield from _leaves(sample)
        else:
            yield sample


def _reward(args: Any, sample: Any) -> Any:
    key = getattr(args, "reward_key", None)
    return sample.reward[key] if key and isinstance(sample.reward, dict) else sample.reward


def _task(sample: Any) -> str:
    """Return the task of a sample: its prompt, and the name of its adapter."""
    adapter = getattr(sample, "adapter", None)
    return prompt_key(sample.prompt if adapter is None else [adapter.name, sample.prompt])


def _recorded(args: Any, sample: Any) -> AgentTrajectory:
    fields = {name: value for name, value in sample.to_dict().items() if name not in _COLUMNS}
    lacks = [name for name in _NOT_KEPT if fields.pop(name, None) is not None]
    metadata, changed = kept(SLIME, fields, _OF_PLACE)
    lacks += changed
    if sample.rollout_id not in (None, sample.index):
        lacks.append("rollout_id")  # one of several samples of a rollout
    versions = [int(version) for version in sample.weight_versions if str(version).isdigit()]
    if not versions:
        lacks.append("weight_versions")
    start, scores = len(sample.tokens) - sample.response_length, _reward(args, sample)
    parts = sample.reward if isinstance(sample.reward, dict) else {}
    prompt = sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
    return agent_trajectory(
        prompt_ids=sample.tokens[:start],
        response_ids=sample.tokens[start:],
        loss_mask=sample.loss_mask,
        log_probs=sample.rollout_log_probs,
        reward=None if isinstance(scores, dict) else scores,
        scores={name: value for name, value in parts.items() if isinstance(value, int | float)},
        version=recording_of(args).before + min(versions) if versions else None,
        task_id=_task(sample),
        is_terminated=sample.status.value == "completed",
        messages=[*prompt, {"role": "assistant", "content": sample.response}],
        metadata=metadata | lacking(f"slime: sample {sample.index}", lacks),
    )


def _replayed(args: Any, rollout: AgentTrajectory, place: Any) -> Any:
    """Return a recorded rollout as a sample of the group of ``place``."""
    columns = (rollout.input_ids, rollout.response_mask, rollout.rollout_log_probs)
    fields = dict(zip(_COLUMNS, ([] if column is None else column.tolist() for column in columns), strict=True))
    sample = type(place).from_dict(rollout.metadata[SLIME] | fields)
    for name in _OF_PLACE:
        if hasattr(place, name):
            setattr(sample, name, getattr(place, name))
    sample.remove_sample = False
    if sample.reward is None and rollout.reward is not None and (outcome := rollout.reward.outcome) is not None:
        key = getattr(args, "reward_key", None)  # the hook recorded it before it had a reward
        sample.reward = {key: outcome} if key else outcome
    sample.metadata = {**(sample.metadata or {}), REPLAYED: True}
    return sample

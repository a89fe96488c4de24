"""Trainer modes of verl's V1 trainer with recording and replay.

Each override extends verl's method with calls of :class:`~trainer_hooks.verl.session.ReplaySession`. Private methods
are overridden, so the versions of verl are pinned (:mod:`trainer_hooks.verl.versions`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn

from trainer_hooks.plan import PlannedTask
from trainer_hooks.replay.contract import fingerprint_of
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.config import ReplayBlock
from trainer_hooks.verl.cuts import checkpoint_folder, mend_tracker
from trainer_hooks.verl.guided import GuidedManager
from trainer_hooks.verl.histories import ReplaySampler
from trainer_hooks.verl.loss import LOSS_MODE, het_ppo_loss, take_figures
from trainer_hooks.verl.reading import RunTokenizer, name_of
from trainer_hooks.verl.session import ReplaySession
from trainer_hooks.verl.tasks import ROLLOUTS_WANTED, TaskTable, rollout_counts, task_name
from trainer_hooks.verl.trained import loss_terms, options_of
from trainer_hooks.verl.versions import check_verl
from trajstore.errors import ConfigurationError


class ReplayCheckpointCallback(CheckpointCallback):  # type: ignore[misc]  # verl has no types
    """Calls the user's callback, then ``complete``, which frees pool data that no checkpoint needs.

    Args:
        inner: the user's callback.
        complete: called when a checkpoint is complete.
    """

    def __init__(self, inner: CheckpointCallback, complete: Callable[[], None]) -> None:
        super().__init__(config=inner.config)
        self._inner = inner
        self._complete = complete

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Called by verl when a checkpoint is complete (with ``async_save``: started)."""
        self._inner.on_save(trainer, global_step, checkpoint_dir, async_save, **kwargs)
        self._complete()


class ReplayTrainer(PPOTrainer):  # type: ignore[misc]  # verl is not typed
    """Mixin that adds recording and replay to a trainer of verl; list it before the trainer in the bases.

    Raises:
        ConfigurationError: an unsupported version of verl, or invalid options; raised before any worker starts.
    """

    base_mode: ClassVar[str]
    """Mode of the base trainer, for verl's comparisons with literals."""

    checkpoint_callback: Any

    def __init__(self, config: Any) -> None:
        check_verl()
        self._block = ReplayBlock.from_config(config)
        mend_tracker(config)
        self._told: set[str] = set()
        mode = config.trainer.v1.trainer_mode
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
            if self._block.masks_rows:
                config.actor_rollout_ref.actor.policy_loss.loss_mode = LOSS_MODE
        super().__init__(config)
        with open_dict(config):  # restore the user's mode for the logged configuration
            config.trainer.v1.trainer_mode = mode
        whole: Any = OmegaConf.to_container(config, resolve=True)
        self._recorded_config = {"verl": whole, "contents": {**self._block.contents}}
        self.checkpoint_callback = ReplayCheckpointCallback(
            self.checkpoint_callback, lambda: self._session.hold_checkpoints()
        )

    def _build_replay_buffer(self) -> ReplaySampler:
        return ReplaySampler(
            super()._build_replay_buffer(),
            join=lambda batch: self._session.join(batch),
            finished=lambda uids, tags, metric: self._session.join_finished(uids, tags, metric),
            dropped=lambda batch: self._session.dropped(batch, self.global_steps),
            validated=lambda batch: self._session.validated(batch),
        )

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self._recorded_config["contents"]["tokenizer"] = fingerprint_of(self.tokenizer)
        self._session = ReplaySession(
            self._block,
            TaskTable(self.train_dataset) if self._block.experience_replay.enable else None,
            tokenizer=RunTokenizer(fingerprint_of(self.tokenizer), name_of(self.tokenizer), decoder=self.tokenizer),
            run=uuid.uuid4().hex,
            checkpoints=self.config.trainer.default_local_dir,
        )

    def on_init_end(self) -> None:
        """Install the loss in the workers."""
        if self._block.masks_rows:
            actor, options = (
                omega_conf_to_dataclass(self.config.actor_rollout_ref.actor),
                self._session.hook.loss_options,
            )
            self.actor_rollout_wg.set_loss_fn(partial(het_ppo_loss, config=actor, options=options))
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, then close the stores, even after an error."""
        try:
            super().fit(GuidedManager(agent_loop_manager, self._session.offered))
        finally:
            self._session.close()

    def on_validate_end(self) -> None:
        """Submit the validation's rollouts as experience."""
        super().on_validate_end()
        self._session.guided.validation_done(self.global_steps)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        self._session.prompts += len(batch)
        uids = list(batch["uid"])
        if bad := [uid for uid in uids if "_" in uid]:
            raise ConfigurationError(f"uid {bad[0]!r}: has a '_', which verl takes for the end of the uid")
        if not self._session.replays:
            return self._reusing(batch)
        # Every prompt needs this column: asynchronous modes read prompts back from the data plane, which drops a column
        # that one prompt lacks. The data set may have the column.
        if ROLLOUTS_WANTED not in batch:
            batch[ROLLOUTS_WANTED] = NonTensorStack(*[self._block.n_rollout] * len(uids))
        # Replacements of filtered prompts are few, often one: they are not planned.
        plan: list[PlannedTask[str]] = []
        if num_prompts is None:
            progress = min((self.global_steps - 1) / max(self.total_training_steps, 1), 1.0)
            ids = [task_name(*names) for names in zip(list(batch["data_source"]), list(batch["index"]), strict=True)]
            plan = self._session.plan(ids, progress, self.global_steps)
            if any(planned.histories for planned in plan):
                batch = self._mix(batch, ids, plan)
        batch = self._reusing(batch)
        wanted = dict(zip(list(batch["uid"]), rollout_counts(list(batch[ROLLOUTS_WANTED])), strict=True))
        joining = self._session.expect(
            {uid: planned.histories for uid, planned in zip(wanted, plan, strict=False)}, wanted
        )
        batch[ROLLOUTS_WANTED] = NonTensorStack(*(count - joining.get(uid, 0) for uid, count in wanted.items()))
        return batch

    def _reusing(self, batch: TensorDict) -> TensorDict:
        """Return prompts; after a crash, those of the interrupted step have the ``uid`` of their finished rollouts."""
        # The checkpoint of an asynchronous mode has the prompts under way, with their rollouts.
        return self._session.reuse.named(batch, self.global_steps) if self.base_mode == "sync" else batch

    def _mix(self, batch: TensorDict, ids: list[str], plan: list[PlannedTask[str]]) -> TensorDict:
        """Return the prompts of a plan, from the batch or, for other tasks, from the training data."""
        places: dict[str, list[int]] = {}
        for place, task in enumerate(ids):
            places.setdefault(task, []).append(place)
        absent = [planned.task for planned in plan if planned.task not in places]
        if absent:
            rows = collate_fn([dict(self._session.task_row(task)) for task in absent])
            rows["uid"] = [str(uuid.uuid4()) for _ in absent]
            rows.setdefault(ROLLOUTS_WANTED, [self._block.n_rollout] * len(absent))
            other = tu.get_tensordict(rows)
            batch = tu.concat_tensordict([batch.select(*other.keys()), other])
        for number, task in enumerate(absent):
            places[task] = [len(ids) + number]
        mixed = tu.index_select_tensor_dict(batch, [places[planned.task].pop(0) for planned in plan])
        tu.assign_non_tensor_data(mixed, "global_steps", self.global_steps)
        return mixed

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **options: Any) -> KVBatchMeta:
        batch = super()._balance_batch(batch, *args, **options)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        return self._session.balanced(batch, ranks, self._get_required_batch_multiple(ranks))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        metrics.update(self._session.scored(batch, self.global_steps))
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        dataplane.weigh_sessions(batch, self.config, self._told)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._update_actor(batch, metrics)
        if self._block.masks_rows:
            figures = take_figures(metrics)
            metrics.update(figures)
            self._session.hook.watch(figures)
        algorithm, data, replay = self.config.algorithm, self.config.data, self._block.experience_replay
        seeds = {"data": data.get("seed"), "mini_batches": self.config.actor_rollout_ref.actor.get("data_loader_seed")}
        files = [data.train_files] if isinstance(data.train_files, str) else list(data.train_files)
        self._session.trained(
            batch,
            self.global_steps,
            bypass=bool((algorithm.get("rollout_correction") or {}).get("bypass_mode", False)),
            loss=loss_terms(metrics),
            data={
                "files": [Path(name).name for name in files],
                "rows": len(self.train_dataset),
                "prompts": self._session.prompts,
            },
            seeds=seeds,
            options=options_of(
                self.config,
                self.tokenizer.pad_token_id,
                drops_negative=replay.drop_negative_off_policy,
                recorded_log_probs=replay.exp_is_correct,
            ),
            config=self._recorded_config,
        )
        return batch

    def _save_checkpoint(self) -> None:
        # Before verl's files, so that a complete checkpoint always has its cut.
        root = self.config.trainer.default_local_dir
        self._session.save(checkpoint_folder(root, self.global_steps), self.global_steps)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.config.trainer.resume_mode == "disable":
            return
        if self.global_steps == 0:  # interrupted before its first checkpoint, or new
            self._session.resume(None, 0)
            return
        given = self.config.trainer.resume_from_path
        explicit = self.config.trainer.resume_mode == "resume_path"
        root = self.config.trainer.default_local_dir
        folder = Path(given).absolute() if explicit else checkpoint_folder(root, self.global_steps)
        self._session.resume(folder, self.global_steps)


@register_trainer("sync_replay")
class PPOTrainerSyncReplay(ReplayTrainer, PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer with durable rollouts and replay."""

    base_mode = "sync"


@register_trainer("colocate_async_replay")
class PPOTrainerColocateAsyncReplay(ReplayTrainer, PPOTrainerColocateAsync):  # type: ignore[misc]
    """verl's asynchronous trainer on shared devices with durable rollouts and replay."""

    base_mode = "colocate_async"

"""Every public function and constructor of hooks, pool and guidance with good arguments, as in ``public_calls``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.trainer_hooks.public_calls import (
    MESSAGES,
    RULES,
    TEMPLATE,
    Call,
    batch_rows,
    filled,
    of_a_step,
    plain,
    rollouts,
    template,
)
from trainer_hooks.advantages import compute_grpo_outcome_advantage, share_by_rollout
from trainer_hooks.batch import BatchRow, assign_group_ids, build_batch, to_tensordict
from trainer_hooks.completion import completed_rollouts
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance import GuidanceHook
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import aggregate_loss, het_compute_token_on_off_policy_loss
from trainer_hooks.masks import (
    build_exp_mask,
    compute_response_mask,
    regularizer_masks,
    replace_recorded_old_log_probs,
)
from trainer_hooks.plan import MixedTasks, PlannedTask, rows_of_plan, rows_of_rollout
from trainer_hooks.token_sums import token_sums
from trajstore.experience import (
    BufferStore,
    ChatTemplate,
    ExperienceManager,
    ExperienceMixCollateFn,
    RatioSchedule,
    TokenRow,
    is_success,
    mean_entropy,
    newest_pool,
    of_earlier_run,
    rows_of_messages,
    with_tokens,
)
from trajstore.experience.exchange import export_pool, import_pool
from trajstore.experience.transcripts import TranscriptReader
from trajstore.guidance import (
    AllocationRules,
    EMClient,
    EndpointSummarizer,
    Experience,
    ExperienceTemplate,
    ExperienceWorker,
    ExtractiveSummarizer,
    Guidance,
    GuidanceManager,
    Insertion,
    LocalMaker,
    RetirementRule,
    Retrieved,
    TaskExpConfig,
    TrajExpConfig,
    UpdateQueue,
    Worth,
    WorthLedger,
    allocate_add_exp,
    allocate_train_mode,
    as_text,
    count_worth,
    plain_messages,
    put_in,
    strip_template,
    take_out,
    with_guidance,
)


def calls_of_functions(tmp_path: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Name and maker of every call."""
    plan, batch, rows, mask, exp, loss = of_a_step()
    tensors = batch.tensors
    generator = np.random.default_rng(0)
    maker = LocalMaker()
    experience = Experience(when_to_use="x", content="y")
    template_ = template()
    guided = Guidance("discard", ("0",), (Insertion(0, "<x>"),))
    yield from plain(
        (ReplayHook, {"config": ExperienceReplayConfig(), "n_rollout": 4, "get_task": str}),
        (GuidanceHook, {"config": GuidanceConfig()}),
        (ExperienceManager, {"rules": RULES}),
        (ExperienceMixCollateFn, {"exp_manager": filled(), "get_task": str, "replay_start_ratio": 0.0}),
        (RatioSchedule, {"points": ((0.0, 0.5),)}),
        (ChatTemplate, {"render": str, "encode": list, "special_ids": {1}}),
        (TokenRow, {"input_ids": [1], "loss_mask": [1], "response_start": 0}),
        (rows_of_messages, {"messages": MESSAGES, "template": template_}),
        (with_tokens, {"trajectory": rollouts()[0], "template": template_}),
        (is_success, {"outcome": 1.0}),
        (mean_entropy, {"entropys": rows, "response_mask": mask}),
        (of_earlier_run, {"trajectory": rollouts()[0]}),
        (newest_pool, {"base": tmp_path, "not_after": 1}),
        (BufferStore.open, {"path": tmp_path / "pool"}),
        (export_pool, {"store": tmp_path / "none", "folder": tmp_path / "out", "rules": RULES}),
        (import_pool, {"store": tmp_path / "new", "source": tmp_path / "none", "rules": RULES}),
        (TranscriptReader, {"tokenizer": SimpleNamespace(get_vocab=dict)}),
        (GuidanceManager, {"rules": AllocationRules(), "seed": 1}),
        (AllocationRules, {"rollout_expratio": 0.5, "train_sample_expmode": "hybrid", "train_sample_keepratio": 0.5}),
        (EMClient, {"base_url": "http://127.0.0.1:9"}),
        (EndpointSummarizer, {"base_url": "http://127.0.0.1:9", "model": "x"}),
        (Experience, {"when_to_use": "x", "content": "x"}),
        (experience.to_trajectory, {"step": 1}),
        (Experience.of_trajectory, {"trajectory": rollouts()[0]}),
        (ExperienceTemplate, {"before": "<", "after": ">"}),
        (TEMPLATE.fill, {"experience": "x"}),
        (ExperienceWorker, {"maker": None, "template": TEMPLATE, "retrieve_top_k": 1}),
        (ExtractiveSummarizer, {}),
        (Guidance, {"train_mode": "keep", "experiences": (), "insertions": ()}),
        (Guidance.of, {"trajectory": rollouts()[0]}),
        (Guidance.of_json, {"value": None}),
        (Insertion, {"message": 0, "text": "x"}),
        (LocalMaker, {}),
        (RetirementRule, {"below": 0.0, "least_count": 1}),
        (RetirementRule(below=0.0).retires, {"worth": Worth()}),
        (Retrieved, {"text": "x"}),
        (TaskExpConfig, {"add_exp": (True,), "train_mode": "keep"}),
        (TrajExpConfig, {"train_mode": "keep"}),
        (UpdateQueue, {"maker": maker, "capacity": 1, "batch_size": 1}),
        (Worth, {"shown": 1, "shown_reward": 1.0, "other": 1, "other_reward": 1.0}),
        (WorthLedger, {}),
        (allocate_train_mode, {"tasks": 2, "mode": "hybrid", "keep_ratio": 0.5, "generator": generator}),
        (allocate_add_exp, {"rollouts": [2], "mode": "mixed", "ratio": 0.5, "generator": generator}),
        (as_text, {"experiences": [experience]}),
        (count_worth, {"rollouts": rollouts()}),
        (plain_messages, {"trajectory": with_guidance(dataclasses.replace(rollouts()[0], messages=MESSAGES), None)}),
        (put_in, {"messages": MESSAGES, "text": "x"}),
        (strip_template, {"text": "x", "template": TEMPLATE}),
        (take_out, {"messages": MESSAGES, "insertions": []}),
        (with_guidance, {"trajectory": rollouts()[0], "guidance": guided}),
        (BatchRow, {"trajectory": rollouts()[0], "group_id": 0}),
        (MixedTasks, {"experience": ("a",), "on_policy": ()}),
        (PlannedTask, {"task": "a", "fresh_rollouts": 1, "histories": ()}),
        (assign_group_ids, {"task_positions": [0, 0], "is_experience_replay": [False, True]}),
        (build_batch, {"rows": batch_rows(), "pad_token_id": 0}),
        (to_tensordict, {"batch": batch}),
        (rows_of_plan, {"plan": plan, "fresh": rollouts(), "group_offpolicy": "shared"}),
        (rows_of_rollout, {"trajectory": rollouts()[0], "group": 0, "number": 0, "is_replayed": False}),
        (
            completed_rollouts,
            {"batch": batch, "fresh": rollouts(), "old_log_probs": rows, "entropys": rows, "policy_version": 1},
        ),
        (compute_response_mask, {"mask": exp, "response_length": 4}),
        (regularizer_masks, {"response_mask": mask, "exp_mask": exp, "regularize_replayed": "both"}),
        (
            build_exp_mask,
            {
                "loss_mask": tensors["loss_mask"],
                "attention_mask": tensors["attention_mask"],
                "prompt_length": 2,
                "is_experience_replay": torch.zeros(2, dtype=torch.bool),
                "is_discarded": torch.zeros(2, dtype=torch.bool),
            },
        ),
        (
            replace_recorded_old_log_probs,
            {
                "old_log_probs": rows,
                "recorded_old_log_probs": rows,
                "recorded_mask": tensors["recorded_mask"],
                "exp_mask": exp,
            },
        ),
        (compute_grpo_outcome_advantage, {"token_level_rewards": rows, "response_mask": mask, "index": [0, 0]}),
        (share_by_rollout, {"advantages": rows, "rollouts": batch.rollouts}),
        (
            het_compute_token_on_off_policy_loss,
            {
                "old_log_prob": rows,
                "log_prob": rows,
                "advantages": rows,
                "response_mask": mask,
                "exp_mask": exp,
                "cliprange": 0.2,
            },
        ),
        (aggregate_loss, {"losses": rows, "response_mask": mask.bool(), "loss_agg_mode": "token-mean"}),
        (token_sums, {"loss": loss, "response_mask": mask, "exp_mask": exp[:, -rows.shape[1] :]}),
    )

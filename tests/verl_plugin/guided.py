"""Shared parts of guided trainings: overrides, initial experience, checks of rows."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer_hooks.guidance import Experience, Guidance, LocalMaker
from trainer_hooks.replay import BufferStore
from trajstore import AgentTrajectory

from .assets import TRAIN_ROWS, make_rows, make_tokenizer
from .witness import LossRow

TASKS = 6
MARK = "tip: "
TEMPLATE = f"'{MARK}{{}} now '"

# Few tasks, so that they recur. Experience is long: the tokenizer has one token per character.
GUIDED = (
    "trainer.v1.trainer_mode=sync_replay",
    f"data.train_max_samples={TASKS}",
    "data.max_prompt_length=320",
    "+exp_manager.outcome.key=hit",
    "+experience_maker.enable_context_generator=true",
    "+experience_maker.retrieve_top_k=1",
    "+exp_manager.rollout_expratio=0.5",
    f"+exp_manager.experience_template={TEMPLATE}",
)


def store_of(folder: Path) -> Path:
    return folder / "checkpoints" / "trajstore" / "experiences"


def seed_experiences(folder: Path) -> None:
    """Write one experience per task into a run's folder."""
    with contextlib.closing(BufferStore.open(str(store_of(folder)))) as store:
        maker = LocalMaker(store)
        texts = [row["prompt"][0]["content"] for row in make_rows(0, TRAIN_ROWS, "train")]
        maker.add(
            [
                Experience(when_to_use=text, content=f"say {text[-1]} first", query=text, task_id=f"digit:{index}")
                for index, text in enumerate(texts)
            ]
        )


def check_guided_rows(rows: Sequence[LossRow], rollouts: Sequence[AgentTrajectory]) -> Counter[str]:
    """Check the loss's rows against the store; return the number of rows of each kind.

    Discarded rows contain no experience and are off-policy on the whole response; kept rows contain it and are
    on-policy; replayed rows have the replay mask, whether guided or not.
    """
    tokenizer = make_tokenizer()
    by_tokens: dict[tuple[int, ...], list[AgentTrajectory]] = defaultdict(list)
    for rollout in rollouts:
        by_tokens[tuple(rollout.input_ids.tolist())].append(rollout)
    counts: Counter[str] = Counter()
    for row in rows:
        match = [rollout for rollout in by_tokens[row.tokens] if torch.equal(rollout.old_log_probs, row.old_log_probs)]
        assert match, f"no rollout with the tokens and log-probs of a row of group {row.uid}"
        own = [rollout for rollout in match if rollout.metadata["uid"] == row.uid]
        matching = own[0] if own else match[0]
        guidance = Guidance.of(matching)
        mask = row.exp_mask[: row.response.numel()]
        text = tokenizer.decode(row.prompt)
        kept = guidance is not None and guidance.train_mode == "keep"
        assert (MARK in text) == kept
        kind = "plain" if guidance is None else guidance.train_mode
        if not own:
            kind = f"replayed {kind}"
            wanted = row.response_mask
        else:
            wanted = torch.full_like(mask, int(kind == "discard"))
        assert torch.equal(mask, wanted), kind
        assert not row.exp_mask[row.response.numel() :].any()
        assert torch.isfinite(row.old_log_probs).all()
        counts[kind] += 1
    return counts


def check_records(rollouts: Sequence[AgentTrajectory]) -> None:
    """Check the guidance metadata of the recorded rollouts."""
    for rollout in rollouts:
        guidance = Guidance.of(rollout)
        if guidance is None:
            continue
        assert guidance.experiences
        assert len(guidance.insertions) == 1
        assert guidance.insertions[0].text.startswith(MARK)
        assert guidance.taken_out == (guidance.train_mode == "discard")
        assert rollout.messages[0]["content"].startswith(MARK) == (guidance.train_mode == "keep")
        assert re.fullmatch("[a-z]{2} say [0-9]", rollout.query), "what the user asked, without experience"
        assert (rollout.rollout_log_probs is None) == guidance.taken_out

"""The real V1 trainer with rollouts that are shown experience: what is trained on, what is recorded."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
import torch

from trajstore import AgentTrajectory
from trajstore.experience import BufferStore
from trajstore.guidance import Experience, Guidance, LocalMaker

from .assets import TRAIN_ROWS, Assets, make_rows, make_tokenizer
from .runs import GROUP, PROMPTS, TOLERANCE, Train, comparable, log_probs_of
from .witness import LossRow

pytestmark = pytest.mark.timeout(900)

TASKS = 6
MARK = "tip: "
TEMPLATE = f"'{MARK}{{}} now '"

# Few tasks, so that they come again. The tokenizer has a token for each letter, so experience is long.
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
    """Put one experience for each task where the run with this folder looks for them."""
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
    """Check every row that the loss saw against the store; return how many there were of each kind.

    Discarded rows hold nothing of an experience, and are off-policy on the whole response; kept rows hold it and are
    on-policy; a replayed row has the mask of replay, whatever it was shown when it was made.
    """
    tokenizer = make_tokenizer()
    by_tokens: dict[tuple[int, ...], list[AgentTrajectory]] = defaultdict(list)
    for one in rollouts:
        by_tokens[tuple(one.input_ids.tolist())].append(one)
    counts: Counter[str] = Counter()
    for row in rows:
        match = [one for one in by_tokens[row.tokens] if torch.equal(one.old_log_probs, row.old_log_probs)]
        assert match, f"no rollout with the tokens and log-probs of a row of group {row.uid}"
        own = [one for one in match if one.metadata["uid"] == row.uid]
        found = own[0] if own else match[0]
        guidance = Guidance.of(found)
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
    """Check what the recorded rollouts say of what they were shown."""
    for one in rollouts:
        guidance = Guidance.of(one)
        if guidance is None:
            continue
        assert guidance.experiences
        assert len(guidance.insertions) == 1
        assert guidance.insertions[0].text.startswith(MARK)
        assert guidance.taken_out == (guidance.train_mode == "discard")
        assert one.messages[0]["content"].startswith(MARK) == (guidance.train_mode == "keep")
        assert re.fullmatch("[a-z]{2} say [0-9]", one.query), "what the user asked, without experience"
        assert (one.rollout_log_probs is None) == guidance.taken_out


STEPS = 3
MAKES = ("+experience_maker.enable_summarizer=true", "+experience_maker.updated_freq=1")


def test_guided_and_replayed_rows_side_by_side(train: Train, verl_assets: Assets, tmp_path: Path) -> None:
    """Tasks that keep experience and tasks that discard it, histories beside them, validation without either."""
    seed_experiences(tmp_path)
    done = train(
        tmp_path,
        *GUIDED,
        "+exp_manager.train_sample_expmode=hybrid",
        "+exp_manager.train_sample_keepratio=0.5",
        *MAKES,
        "+exp_manager.experience_replay.enable=true",
        "+exp_manager.experience_replay.replay_start_ratio=0.0",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=True",
        f"trainer.validation_data_dir={tmp_path / 'validation'}",
    )
    steps, rollouts, rows = done.steps, done.rollouts, done.rows
    assert len(steps) == STEPS
    assert len(rows) == STEPS * PROMPTS * GROUP
    counts = check_guided_rows(rows, rollouts)
    check_records(rollouts)

    assert counts["keep"] > 0
    assert counts["discard"] > 0
    assert sum(count for kind, count in counts.items() if kind.startswith("replayed")) > 0
    shown = [one for one in rollouts if Guidance.of(one) is not None]
    assert counts["keep"] + counts["discard"] == len(shown)
    assert len(shown) == sum(record["guidance/guided_rollouts"] for record in steps)
    first = [one for one in shown if one.policy_version == 1]
    assert len(first) == PROMPTS * GROUP // 2, "half of each task's rollouts"
    for record in steps:
        assert math.isfinite(record["actor/pg_loss"])
        assert not any(name.startswith("guidance/retrieve/failed") for name in record)
        assert record["guidance/rollouts/too_long"] == record["guidance/rollouts/not_taken_out"] == 0.0
        assert record["experience_replay/other_prompts"] == 0.0, "they are known without their experience"
    # Before the first update the log-probs that the loss compares with are those of the model as it was made, under
    # the prompt that the row has.
    discarded = next(
        row for row in rows[: PROMPTS * GROUP] if row.exp_mask[: row.response.numel()].all() and row.response_mask.any()
    )
    torch.testing.assert_close(
        log_probs_of(verl_assets.model, discarded), discarded.old_log_probs, atol=1e-4, rtol=1e-4
    )

    assert validated(tmp_path, 0)
    assert not any(MARK in text for text in validated(tmp_path, 0))

    with contextlib.closing(BufferStore.open(str(store_of(tmp_path)))) as store:
        assert len(LocalMaker(store)) > TRAIN_ROWS, "rollouts have become experience"


# ---- campaigns ----


@pytest.mark.slow
def test_a_resumed_run_guides_the_rollouts_that_the_whole_one_guided(train: Train, tmp_path: Path) -> None:
    """With a store that does not change, so that the same question has the same answer."""
    seed_experiences(tmp_path)
    options = (*GUIDED, "trainer.total_training_steps=4", "trainer.save_freq=2")
    whole = train(tmp_path, *options)
    resumed = train(
        tmp_path,
        *options,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/checkpoints/global_step_2",
    )
    assert [record["step"] for record in resumed.steps] == [3, 4]
    for ours, theirs in zip(resumed.steps, whole.steps[2:], strict=True):
        mine, wanted = (
            {name: value for name, value in comparable(one).items() if not name.startswith("guidance/")}
            for one in (ours, theirs)
        )
        assert mine == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
        for name in ("guided_rollouts", "outcome/guided", "outcome/unguided"):
            assert ours[f"guidance/{name}"] == pytest.approx(theirs[f"guidance/{name}"])
    check_guided_rows(resumed.rows, resumed.rollouts)


def validated(folder: Path, step: int) -> list[str]:
    """Return the prompts of the validation after a step."""
    return [orjson.loads(line)["input"] for line in (folder / "validation" / f"{step}.jsonl").read_bytes().splitlines()]

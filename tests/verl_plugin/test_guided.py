"""The real V1 trainer with rollouts that are shown experience: what is trained on, what is recorded."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import orjson
import pytest
import torch

from trajstore.experience import BufferStore
from trajstore.guidance import Guidance, LocalMaker

from .assets import TRAIN_ROWS, Assets
from .guided import GUIDED, MARK, check_guided_rows, check_records, log_probs, seed_experiences, store_of
from .harness import VerlSession, make_config
from .runs import GROUP, PROMPTS, recorded
from .witness import Witness

pytestmark = pytest.mark.timeout(300)

STEPS = 3


def test_guided_and_replayed_rows_side_by_side(
    verl_session: VerlSession, verl_assets: Assets, witness: Witness, tmp_path: Path
) -> None:
    """Tasks that keep experience and tasks that discard it, histories beside them, validation without either."""
    seed_experiences(tmp_path)
    witness.take()
    overrides = (
        *GUIDED,
        "+exp_manager.train_sample_expmode=hybrid",
        "+exp_manager.train_sample_keepratio=0.5",
        "+experience_maker.enable_summarizer=true",
        "+experience_maker.updated_freq=1",
        "+exp_manager.experience_replay.enable=true",
        "+exp_manager.experience_replay.replay_start_ratio=0.0",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=True",
        f"trainer.validation_data_dir={tmp_path / 'validation'}",
    )
    run = verl_session.run(make_config(verl_assets, tmp_path, overrides))
    steps = [record for record in run.metrics if "training/global_step" in record]
    rollouts, rows = recorded(tmp_path), witness.take()
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
    # Before the first update the log-probs that the loss compares with are those of the model as it was made, under
    # the prompt that the row has.
    discarded = next(
        row for row in rows[: PROMPTS * GROUP] if row.exp_mask[: row.response.numel()].all() and row.response_mask.any()
    )
    torch.testing.assert_close(log_probs(verl_assets.model, discarded), discarded.old_log_probs, atol=1e-4, rtol=1e-4)

    inputs = [orjson.loads(line) for line in (tmp_path / "validation" / "0.jsonl").read_bytes().splitlines()]
    assert inputs
    assert not any(MARK in one["input"] for one in inputs)

    with contextlib.closing(BufferStore.open(str(store_of(tmp_path)))) as store:
        assert len(LocalMaker(store)) > TRAIN_ROWS, "rollouts have become experience"

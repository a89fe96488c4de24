"""verl's command line with an options file; the loss's inputs are recomputed from the store."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from .assets import Assets
from .command import run_main
from .recount import OffPolicyLoss, check_choices, check_loss_rows, mean_entropy
from .runs import GROUP, check_replay_metrics, recorded
from .witness import Witness

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]


def write_options(project_root: Path, folder: Path) -> Path:
    """Write the how-to's file with other values for its existing keys."""
    config = yaml.safe_load((project_root / "docs" / "howto" / "verl_replay.yaml").read_text(encoding="utf-8"))
    manager = config["exp_manager"]
    assert manager["outcome"].keys() >= {"key"}
    manager["outcome"]["key"] = "hit"
    options = {
        "exp_ratio": 1.0,
        "clip_off_policy": False,
        "exp_select_mode": "random",
        "figures": "all",
        "seed": 1,
    }
    assert manager["experience_replay"].keys() >= options.keys()
    manager["experience_replay"] |= options
    target = folder / "mine.yaml"
    target.write_text(yaml.safe_dump(config), encoding="utf-8")
    return target


def test_replay_is_unclipped_and_random(
    verl_assets: Assets, project_root: Path, witness: Witness, tmp_path: Path
) -> None:
    """A run stops after three of five steps and resumes."""
    options = write_options(project_root, tmp_path)
    witness.take()
    records = []
    for end in (3, 5):
        records += run_main(
            project_root,
            verl_assets,
            tmp_path,
            "data.train_max_samples=4",
            # The policy soon moves away from the replayed rows, so clipping would show.
            "actor_rollout_ref.actor.optim.lr=5e-3",
            f"trainer.total_training_steps={end}",
            "trainer.save_freq=3",
            "trainer.resume_mode=auto",
            options=options,
            witness=witness,
        )
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    check_replay_metrics(records)
    rollouts, rows = recorded(tmp_path), witness.take()
    counted = check_loss_rows(rows, rollouts, group=lambda task: GROUP, loss=OffPolicyLoss(clip=False))
    assert counted.replayed_rows == sum(record["experience_replay/replayed_rows"] for record in records) > 0
    assert len(rollouts) == sum(record["recording/rollouts"] for record in records)
    assert counted.beyond_clip > 0
    choices = partial(check_choices, rows, rollouts, count=1, least_used_first=False)
    assert choices(value=lambda one: 0.0), "a task had several to choose from"
    for sign in (1, -1):  # always the lowest or highest entropy would not be random
        with pytest.raises(AssertionError):
            choices(value=lambda one, sign=sign: sign * mean_entropy(one))

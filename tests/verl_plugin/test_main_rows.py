"""verl's own command line with a file of options; what its loss saw is worked out anew from the store."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from trajstore import AgentTrajectory

from .assets import Assets
from .command import run_main
from .recount import OffPolicyLoss, check_choices, check_loss_rows
from .runs import GROUP, check_replay_metrics, recorded
from .witness import LossRow, Witness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Drawn = dict[tuple[int, str], set[tuple[int, ...]]]
"""Replayed rows by step and task."""


def write_options(project_root: Path, folder: Path, seed: int) -> Path:
    """Write the how-to's file with other values, as a user would; every key stands in it already."""
    config = yaml.safe_load((project_root / "docs" / "howto" / "verl_replay.yaml").read_text(encoding="utf-8"))
    manager = config["exp_manager"]
    assert manager["outcome"].keys() >= {"key"}
    manager["outcome"]["key"] = "hit"
    options = {
        "replay_start_ratio": 0.0,
        "exp_ratio": 1.0,
        "clip_off_policy": False,
        "exp_select_mode": "random",
        "seed": seed,
    }
    assert manager["experience_replay"].keys() >= options.keys()
    manager["experience_replay"] |= options
    target = folder / "mine.yaml"
    target.write_text(yaml.safe_dump(config), encoding="utf-8")
    return target


def drawn(rows: list[LossRow], rollouts: list[AgentTrajectory]) -> Drawn:
    """Return what was replayed."""
    made = {one.metadata["uid"]: (int(one.policy_version or 0), str(one.task_id)) for one in rollouts}
    found: Drawn = {}
    for row in rows:
        if row.exp_mask.any():
            found.setdefault(made[row.uid], set()).add(row.tokens)
    return found


def test_replay_is_unclipped_and_random_by_its_seed(
    verl_assets: Assets, project_root: Path, witness: Witness, tmp_path: Path
) -> None:
    """Three runs: one stops after three of five steps and goes on, one does not stop, one has another seed."""
    found: dict[str, Drawn] = {}
    for name, seed, ends in (("stops", 1, (3, 5)), ("whole", 1, (5,)), ("other", 2, (5,))):
        folder = tmp_path / name
        folder.mkdir()
        options = write_options(project_root, folder, seed)
        witness.take()
        records = []
        for end in ends:
            records += run_main(
                project_root,
                verl_assets,
                folder,
                "data.train_max_samples=4",
                # The policy soon leaves behind what it replays, so that clipping would show.
                "actor_rollout_ref.actor.optim.lr=5e-3",
                f"trainer.total_training_steps={end}",
                "trainer.save_freq=3",
                "trainer.resume_mode=auto",
                options=options,
                witness=witness,
            )
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
        check_replay_metrics(records)
        rollouts, rows = recorded(folder), witness.take()
        counted = check_loss_rows(rows, rollouts, group=lambda task: GROUP, loss=OffPolicyLoss(clip=False))
        assert counted.replayed_rows == sum(record["experience_replay/replayed_rows"] for record in records) > 0
        assert counted.beyond_clip > 0
        found[name] = drawn(rows, rollouts)
        left = check_choices(rows, rollouts, count=1, value=lambda one: 0.0, least_used_first=False)
        assert left, "a task had several to choose from"
    assert found["stops"] == found["whole"]
    assert found["other"] != found["whole"]

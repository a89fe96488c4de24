"""verl's own command line with the configuration file of the how-to: train, stop, go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trajstore.guidance import Guidance

from .assets import Assets
from .command import run_main
from .runs import GROUP, PROMPTS, check_replay_metrics, guidance_table, recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_train_and_go_on(verl_assets: Assets, project_root: Path, tmp_path: Path) -> None:
    first = run_main(project_root, verl_assets, tmp_path, "trainer.total_training_steps=2", "trainer.save_freq=2")
    assert [record["step"] for record in first] == [1, 2]
    check_replay_metrics(first)
    second = run_main(project_root, verl_assets, tmp_path, "trainer.total_training_steps=4", "trainer.resume_mode=auto")
    assert [record["step"] for record in second] == [3, 4]
    check_replay_metrics(second)
    assert second[0]["experience_replay/replayed_rows"] >= 1.0
    made = sum(record["recording/rollouts"] for record in [*first, *second])
    assert len(recorded(tmp_path)) == made <= 4 * PROMPTS * GROUP


def test_guided_rollouts(verl_assets: Assets, project_root: Path, tmp_path: Path) -> None:
    """As the how-to has it; prints the figures that it shows."""
    records = run_main(
        project_root,
        verl_assets,
        tmp_path,
        "exp_manager.experience_replay.enable=false",
        "experience_maker.enable_summarizer=true",
        "experience_maker.updated_freq=1",
        "experience_maker.enable_context_generator=true",
        "experience_maker.retrieve_top_k=1",
        "exp_manager.rollout_expratio=0.5",
        "data.max_prompt_length=384",
        "trainer.total_training_steps=6",
    )
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    sys.stdout.write("\n" + guidance_table(records) + "\n")
    assert records[0]["guidance/guided_rollouts"] == 0.0, "nothing was known"
    shown = [one for one in recorded(tmp_path) if Guidance.of(one) is not None]
    assert shown
    assert len(shown) == sum(record["guidance/guided_rollouts"] for record in records)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("+exp_manager.recording.directory=/elsewhere",),
            r"exp_manager\.recording: directory: unknown key",
        ),
        (
            ("trainer.v1.trainer_mode=sync",),
            r"experience_replay\.enable: true, but trainer\.v1\.trainer_mode=sync replays",
        ),
        (
            ("experience_maker.enable_context_generator=true",),
            r"no rollout is guided: train_rollout_expmode is mixed",
        ),
        (
            ("experience_maker.enable_summarizer=true", "trainer.v1.trainer_mode=sync"),
            r"options of guidance, but trainer\.v1\.trainer_mode=sync guides nothing",
        ),
        (("trainer.use_v1=False",), r"enable: true, but trainer\.use_v1=False replays"),
        (
            ("exp_manager.experience_replay.use_current_policy_entropy=true",),
            r"use_current_policy_entropy: True, must be false",
        ),
        (("exp_manager.experience_replay.regularize_replayed=none",), r"regularize_replayed: 'none', must be both"),
        (("exp_manager.on_resume=keep", "exp_manager.recording.enable=false"), r"on_resume: keep, needs"),
        (("exp_manager.experience_replay.offpolicy_trajectories_per_task=4",), r"must be below n_rollout = 4"),
        (("exp_manager.experience_replay.exp_ratio=1.5",), r"exp_ratio: 1\.5, must be a number in \[0, 1\]"),
    ],
    ids=[
        "unknown",
        "stock mode",
        "nothing guided",
        "guides nothing",
        "old trainer",
        "no effect",
        "no effect in verl",
        "contradiction",
        "k",
        "range",
    ],
)
def test_options_are_refused_before_ray_is_started(
    overrides: tuple[str, ...], message: str, verl_assets: Assets, project_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        run_main(project_root, verl_assets, tmp_path, *overrides)
    assert "ray init kwargs" not in str(caught.value), "what verl prints before it starts Ray"

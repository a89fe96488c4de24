"""The figures that ``ReplayHook`` hands out, and what it warns of."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from pathlib import Path

import orjson
import pytest
import torch

from tests.pages import explained_figures, unexplained
from tests.reference.test_hook import TASKS, N, begin_step, do_step, hook, roll_out
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.metrics import PREFIX
from trainer_hooks.plan import PlannedTask
from trajstore.experience import Refusal

LOSS = "experience_replay/loss/"
"""Begins what verl's micro-batches report for the figures to be made of."""


def test_a_run_that_ends_when_its_pool_is_filled_says_that_it_was_too_short(caplog: pytest.LogCaptureFixture) -> None:
    replay = hook()
    do_step(replay, 1)
    with caplog.at_level(logging.WARNING):
        replay.close()
    assert "since its last step it has 4 that could be drawn next. The run was too short" in caplog.text
    assert "no success" not in caplog.text


def test_a_run_of_the_defaults_is_not_told_to_replay_more(caplog: pytest.LogCaptureFixture) -> None:
    """Half the tasks with one history each of four: an eighth of the rows, and somewhat less of the tokens."""
    replay = hook()
    do_step(replay, 1)
    do_step(replay, 2)
    replay.watch({f"{PREFIX}off_policy_share": 0.06})
    assert "are replayed, where" not in caplog.text
    replay.watch({f"{PREFIX}off_policy_share": 0.02})
    assert "only 2.0% of the tokens are replayed, where" in caplog.text
    assert "ask for 12.5% of the rows" in caplog.text


def test_a_resume_from_files_warns_of_their_versions_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "experience_pool"
    options = {"pool_path": str(folder), "pool_save_freq": 2, "store": {"path": str(tmp_path / "pool")}}
    with hook(**options) as killed:
        for step in range(1, 4):
            do_step(killed, step)
    with caplog.at_level(logging.INFO), hook(**options) as resumed:
        resumed.resume(None, 2)
        resumed.tasks_chosen(TASKS, 0.03, 3)
    assert "step_2 with 16 trajectories of 4 tasks; the store held 24" in caplog.text
    assert "began anew" not in caplog.text
    do_step(longer := hook(), 9)
    longer.manager.save_experience_pool_to_disk(folder / "step_2")
    with hook(**options) as mistaken:
        mistaken.resume(None, 2)
    assert "versions up to 9, this is step 2: the count of steps began anew" in caplog.text


def test_starving_buckets_are_counted_on_after_a_resume() -> None:
    """A run that is cut after fifteen steps says in the twentieth what one without a cut says."""
    name = f"{PREFIX}starving_buckets"
    replay = hook(replay_difficulty=1)
    do_step(replay, 1, tasks=["a"], successes=2)
    for step in range(2, 16):
        *_, metrics = do_step(replay, step, tasks=["b", "c"], successes=1)
        assert name not in metrics
    saved = orjson.dumps(replay.manager.state_dict(), option=orjson.OPT_NON_STR_KEYS)  # as verl's checkpoints have it
    resumed = hook(replay_difficulty=1)
    resumed.resume(orjson.loads(saved), 15)
    for step in range(16, 21):
        assert name not in metrics
        *_, metrics = do_step(resumed, step, tasks=["b", "c"], successes=1)
    assert metrics[name] == 1.0
    old = {key: value for key, value in replay.state_dict().items() if key != "draws"}
    hook().resume(old, 15)  # a cut of an earlier version


def test_no_bucket_starves_before_replay_begins() -> None:
    replay = hook(replay_start_ratio=0.9)
    for step in range(1, 30):
        *_, metrics = do_step(replay, step)
    assert f"{PREFIX}starving_buckets" not in metrics


def test_demonstrations_are_not_rows_of_unknown_age() -> None:
    replay = hook()
    made = roll_out([PlannedTask(task, 1, ()) for task in TASKS], step=0)
    replay.manager.seed([dataclasses.replace(one, metadata={"demonstration": True}) for one in made])
    *_, metrics = do_step(replay, 1)
    assert metrics["experience_replay/demonstration_rows"] == metrics["experience_replay/replayed_rows"] == 2.0
    assert metrics["experience_replay/age_unknown_rows"] == 0.0


# ---- docs/howto/replay_figures.md has them all ----


def names_of_a_run() -> set[str]:
    """Return the names of every figure of a run with demonstrations, losses, and histories drawn in the background."""
    config = ExperienceReplayConfig(
        enable=True, replay_start_ratio=0.0, task_sampling="similar", prepare_in_background=True
    )
    names: set[str] = set()
    with ReplayHook(config, n_rollout=N, get_task=str, task_text=str) as replay:
        made = roll_out([PlannedTask(task, 1, ()) for task in TASKS], step=0)
        replay.manager.seed([dataclasses.replace(one, metadata={"demonstration": True}) for one in made])
        for step in range(1, 22):
            batch, fresh, current = begin_step(replay, step)
            old = replay.log_probs_computed(batch, current)
            masks = (batch.tensors["response_mask"], batch.tensors["exp_mask"])
            advantages = torch.ones(masks[0].shape)
            loss = het_compute_token_on_off_policy_loss(
                old, current, advantages, *masks, cliprange=0.2, **replay.loss_options
            )
            replay.loss_computed(batch, range(len(old)), loss, advantages, 0.2)
            names |= replay.step_done(batch, fresh, current, torch.full_like(current, 0.5)).keys()
    return names


def names_in_the_code(root: Path) -> set[str]:
    """Return the names that stand in the source in full, ``<n>`` for the end that a program puts in."""
    names = set()
    for folder in ("trainer_hooks", "trainer_hooks/verl", "trajstore/experience"):
        for path in (root / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [
                    part.value
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    else PREFIX
                    if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) in ("PREFIX", "metrics.PREFIX")
                    else "<n>"
                    for part in parts
                ]
                name = re.fullmatch(r"(experience_replay|recording)/[a-z_]+(/([a-z_]+|<n>))?", "".join(texts))
                if name is not None:
                    names.add(name[0])
    return {name for name in names if not name.startswith(LOSS)}


def test_the_page_of_figures_has_every_figure(project_root: Path) -> None:
    found = names_of_a_run() | names_in_the_code(project_root)
    assert {"experience_replay/similar_tasks", "recording/lost", "experience_replay/tasks_at_difficulty/<n>"} <= found
    assert unexplained(found - {f"{PREFIX}refused/<n>", f"{PREFIX}seconds/<n>"}) == set()
    assert unexplained(f"refused/{one.value}" for one in Refusal) == set()
    said = {f"{PREFIX}{name}" for name in explained_figures() if name.endswith("_mean")}
    assert said - found == set(), "figures that do not exist"

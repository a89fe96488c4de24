"""The figures and warnings of ``ReplayHook``."""

from __future__ import annotations

import ast
import dataclasses
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.test_hook import TASKS, N, begin_step, do_step, hook, roll_out
from tests.pages import explained_figures, unexplained
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.figures import warnings_of
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.metrics import PREFIX, added, figures_of, record_sums, token_sums
from trainer_hooks.plan import PlannedTask
from trainer_hooks.replay import Refusal

LOSS = "experience_replay/loss/"
"""Prefix of the sums that verl's micro-batches report as input of the figures."""


def test_a_run_that_ends_when_its_pool_is_filled_says_that_it_was_too_short(caplog: pytest.LogCaptureFixture) -> None:
    replay = hook()
    do_step(replay, 1)
    with caplog.at_level(logging.WARNING):
        replay.close()
    assert "since its last step it has 4 that could be drawn next. The run was too short" in caplog.text
    assert "no success" not in caplog.text


def test_a_run_of_the_defaults_is_not_told_to_replay_more(caplog: pytest.LogCaptureFixture) -> None:
    """Half the tasks replay two of four rollouts: a quarter of the rows, slightly less of the tokens."""
    replay = hook()
    do_step(replay, 1)
    do_step(replay, 2)
    replay.watch({f"{PREFIX}off_policy_share": 0.06})
    assert "are replayed, where" not in caplog.text
    replay.watch({f"{PREFIX}off_policy_share": 0.02})
    assert "only 2.0% of the tokens are replayed, where" in caplog.text
    assert "ask for 25.0% of the rows" in caplog.text


def test_demonstrations_have_the_policys_log_probs_and_are_not_rows_of_unknown_age() -> None:
    replay = hook()
    made = roll_out([PlannedTask(task, 1, ()) for task in TASKS], step=0)
    replay.manager.seed([dataclasses.replace(rollout, metadata={"demonstration": True}) for rollout in made])
    batch, fresh, current = begin_step(replay, 1)
    rows = [row for row, extras in enumerate(batch.non_tensors["extras"]) if extras["is_experience_replay"]]
    assert not batch.tensors["recorded_mask"][rows].any()
    assert torch.equal(replay.log_probs_computed(batch, current)[rows], current[rows])
    metrics = replay.step_done(batch, fresh, current, torch.full_like(current, 0.5))
    assert metrics["experience_replay/demonstration_rows"] == metrics["experience_replay/replayed_rows"] == len(rows)
    assert metrics["experience_replay/age_unknown_rows"] == 0.0


# ---- docs/howto/replay_figures.md lists all figures ----


def names_of_a_run() -> set[str]:
    """Return figure names of a run with demonstrations and losses."""
    config = ExperienceReplayConfig(enable=True, task_sampling="similar")
    names: set[str] = set()
    with ReplayHook(config, n_rollout=N, get_task=str, task_text=str) as replay:
        made = roll_out([PlannedTask(task, 1, ()) for task in TASKS], step=0)
        replay.manager.seed([dataclasses.replace(rollout, metadata={"demonstration": True}) for rollout in made])
        for step in range(1, 4):
            batch, fresh, current = begin_step(replay, step)
            old = replay.log_probs_computed(batch, current)
            masks = (batch.tensors["response_mask"], batch.tensors["exp_mask"])
            advantages = torch.ones(masks[0].shape)
            loss = het_compute_token_on_off_policy_loss(
                old, current, advantages, *masks, cliprange=0.2, **replay.loss_options
            )
            replay.loss_computed(batch, range(len(old)), loss, advantages)
            names |= replay.step_done(batch, fresh, current, torch.full_like(current, 0.5)).keys()
    return names


def names_in_the_code(root: Path) -> set[str]:
    """Return the figure names in the source; ``<n>`` stands for a computed suffix."""
    names = set()
    for folder in ("trainer_hooks", "trainer_hooks/verl", "trainer_hooks/replay"):
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
    names = names_of_a_run() | names_in_the_code(project_root)
    assert {"experience_replay/similar_tasks", "recording/lost", "experience_replay/tasks_at_difficulty/<n>"} <= names
    assert unexplained(names - {f"{PREFIX}{kind}/<n>" for kind in ("refused", "histories_refused", "seconds")}) == set()
    assert unexplained(f"refused/{reason.value}" for reason in Refusal) == set()
    explained = {f"{PREFIX}{name}" for name in explained_figures() if name.endswith("_mean")}
    assert explained - names == set(), "figures that do not exist"


# -- Loss figures against plain Python over the tokens, for one loss and for several --


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 3), tokens=st.integers(0, 4))
def test_figures_equal_plain_python(seed: int, rows: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new, advantages = (2 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    response_mask, exp_mask = torch.randint(2, (2, rows, tokens), generator=generator)
    loss = het_compute_token_on_off_policy_loss(old, new, advantages, response_mask, exp_mask, 0.2)
    figures = figures_of(token_sums(loss, response_mask, exp_mask))
    ratios: dict[str, list[float]] = {"on": [], "off": []}
    for row in range(rows):
        for column in range(tokens):
            if response_mask[row, column]:
                side = "off" if exp_mask[row, column] else "on"
                ratios[side].append(math.exp(float(new[row, column] - old[row, column])))
    expected = {}
    if ratios["on"] or ratios["off"]:
        expected["off_policy_share"] = len(ratios["off"]) / (len(ratios["on"]) + len(ratios["off"]))
    for side, values in ratios.items():
        if values:
            expected |= {f"{side}_{key}": float(loss[f"{side}_{key}"]) for key in ("pg_loss", "pg_clipfrac")}
            expected[f"{side}_pg_clipfrac_lower"] = float(loss[f"{side}_pg_clipfrac_lower"])
            expected[f"{side}_ratio_mean"] = sum(values) / len(values)
            expected[f"{side}_ratio_max"], expected[f"{side}_ratio_min"] = max(values), min(values)
            expected[f"{side}_ppo_kl"] = -sum(map(math.log, values)) / len(values)
    if ratios["off"]:
        expected["off_effective_sample_size"] = kish(ratios["off"])
        expected["off_ratio_near_zero_share"] = sum(value < 0.1 for value in ratios["off"]) / len(ratios["off"])
    assert figures == pytest.approx({f"experience_replay/{name}": value for name, value in expected.items()}, abs=1e-12)
    assert all(type(value) is float for value in figures.values())


def test_nan_is_seen_wherever_it_came() -> None:
    for values in ([1.0, math.nan], [math.nan, 1.0]):
        together = added({"on_ratio": value, "on_ratio_max": value, "on_ratio_min": value} for value in values)
        assert all(map(math.isnan, together.values()))
    assert figures_of(added([])) == {}


@pytest.mark.parametrize(
    ("ratios", "expected"), [([1.0] * 4, 1.0), ([math.inf, 1.0, 1.0, 1.0], 0.25), ([1e300] * 4, 1.0), ([0.0] * 4, None)]
)
def test_effective_sample_size_at_the_edges(ratios: list[float], expected: float | None) -> None:
    ratio = torch.tensor([ratios], dtype=torch.float64)
    names = (f"{side}_{name}" for side in ("on", "off") for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower"))
    loss = {"importance_ratio": ratio, **dict.fromkeys(names, torch.tensor(0.0))}
    size = figures_of(token_sums(loss, torch.ones(1, 4), torch.ones(1, 4))).get(f"{PREFIX}off_effective_sample_size")
    assert size == (None if expected is None else pytest.approx(expected))


def test_figures_of_a_step_are_the_same_however_it_is_cut_into_losses() -> None:
    """Mini-batches differ in size; one has no replayed token."""
    figures = []
    for sizes in ([16], [1, 2, 13], [3, 13], [13, 3]):
        replay = hook(exp_ratio=1.0, offpolicy_trajectories_per_task=2)
        do_step(replay, 1)
        do_step(replay, 2, tasks=TASKS[:2])
        batch, fresh, current = begin_step(replay, 3)
        replayed = [extras["is_experience_replay"] for extras in batch.non_tensors["extras"]]
        order = sorted(range(16), key=replayed.__getitem__)
        old = replay.log_probs_computed(batch, current)
        spread = torch.linspace(-3, 3, old.numel()).reshape(old.shape)
        advantages = torch.ones(old.shape) * torch.tensor([1.0, -1.0]).repeat(8)[:, None]
        masks = (batch.tensors["response_mask"], batch.tensors["exp_mask"][:, -old.shape[1] :])
        for size in sizes:
            part, order = order[:size], order[size:]
            old_part, advantages_part, response_mask, exp_mask = (item[part] for item in (old, advantages, *masks))
            current_part = old_part + spread[part]
            loss = het_compute_token_on_off_policy_loss(
                old_part, current_part, advantages_part, response_mask, exp_mask, 0.2, **replay.loss_options
            )
            replay.loss_computed(batch, part, loss, advantages_part)
        metrics = replay.step_done(batch, fresh, current, torch.full_like(current, 0.5))
        valid, off = masks[0].bool(), masks[0].bool() & masks[1].bool()
        assert metrics[f"{PREFIX}off_policy_share"] == int(off.sum()) / int(valid.sum())
        beginnings = tuple(PREFIX + beginning for beginning in ("on_", "off_"))
        figures.append({name: value for name, value in metrics.items() if name.startswith(beginnings)})
    whole, *cut = figures
    assert {f"{PREFIX}off_effective_sample_size", f"{PREFIX}on_ppo_kl"} <= whole.keys()
    for item in cut:
        assert item == pytest.approx(whole, rel=1e-5)


# -- Metrics against plain Python, and warnings --


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"off_policy_share": 0.51, "off_ratio_mean": 9.0}, ["off-policy: lower exp_ratio"]),
        ({"off_policy_share": 0.5, "off_ratio_mean": 10.5}, ["mean 10.5 and effective sample size 100.0%"]),
        ({"off_policy_share": 0.9, "off_ratio_mean": math.inf}, ["off-policy: lower exp_ratio", "have mean inf"]),
        ({"off_ratio_mean": 1.1, "off_effective_sample_size": 0.05}, ["mean 1.1 and effective sample size 5.0%"]),
        ({"off_ratio_mean": 1.1, "off_ratio_max": 30.0, "off_effective_sample_size": 0.6}, []),  # it learns
        ({"off_policy_share": 0.5, "off_ratio_mean": 10.0}, []),
        ({"off_policy_share": 0.012}, ["only 1.2% of the tokens are replayed, where exp_ratio and"]),
        ({"off_policy_share": 0.049}, []),  # the defaults, with slightly shorter histories
        ({"off_policy_share": 0.0}, []),
        ({"off_ratio_near_zero_share": 0.6}, ["60% of the replayed tokens have importance ratios below 0.1"]),
        ({"off_pg_loss": math.nan}, ["is NaN"]),
        ({}, []),
    ],
)
def test_warnings(metrics: dict[str, float], words: list[str]) -> None:
    figures = {f"experience_replay/{name}": value for name, value in metrics.items()}
    messages = list(warnings_of(figures, asked=0.5 * 1 / 8).values())
    assert len(messages) == len(words)
    assert all(word in message for word, message in zip(words, messages, strict=True))


def test_differences_of_recorded_log_probs() -> None:
    current = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    recorded = torch.tensor([[-1.5, -2.0, 0.0], [math.nan, -5.0, -9.0]])
    recorded_mask = torch.tensor([[True, True, False], [False, True, True]])
    off_policy = torch.tensor([[1, 1, 1], [0, 0, 1]])
    parts = [
        record_sums(*(tensor[rows] for tensor in (current, recorded, recorded_mask, off_policy)))
        for rows in (slice(1), slice(1, 2))
    ]
    assert figures_of(added(parts)) == pytest.approx(
        {
            "experience_replay/recorded_difference_mean": (0.5 + 0.0 + 3.0) / 3,
            "experience_replay/recorded_difference_max": 3.0,
        }
    )
    assert figures_of(record_sums(current, recorded, recorded_mask, torch.zeros(2, 3))) == {}
    assert figures_of(record_sums(current, recorded, torch.zeros(2, 3, dtype=torch.bool), off_policy)) == {}

"""Ledgers of trainers: the rows of a batch's tensors, and what the hook records in each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.test_hook import TASKS, N, begin_step, do_step
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.hook import ReplayHook
from trainer_hooks.losses import het_compute_token_on_off_policy_loss
from trainer_hooks.trained import HIDDEN, trained_step
from trajstore.errors import ConfigurationError, StoreLockedError
from trajstore.ledger import Ledger, audit, read
from trajstore.ledger.step import digest

BATCH: dict[str, Any] = {
    "uids": ["u", "u", "v", "v"],
    "task_ids": ["a", "a", "b", "b"],
    "mask": torch.tensor([[1, 0, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]]),
    "advantages": torch.tensor([[1.0, 9.0, 3.0], [0.1, 0.1, 0.1], [2.0, float("nan"), 9.0], [9.0, 9.0, 9.0]]),
    "ratios": torch.tensor([0.5, 1.5, 2.0, 1.0]),
    "versions": [3, None, 2, 3],
    "replayed": [False, False, True, False],
    "trajectories": [None, None, 7, None],
    "rollouts": ["x", "x", "y", "z"],
}


def make(folder: Path, **options: Any) -> ReplayHook[str]:
    config: dict[str, Any] = {"enable": True, "exp_ratio": 1.0, "offpolicy_trajectories_per_task": 1}
    config["store"] = {"path": str(folder / "pool")}
    return ReplayHook(ExperienceReplayConfig(**config, **options), n_rollout=N, get_task=str, ledger=folder / "ledger")


def do(replay: ReplayHook[str], step: int) -> None:
    """Run a step whose losses are computed in two parts; rows of the first task have the advantage -1."""
    batch, fresh, current = begin_step(replay, step)
    advantages = torch.ones_like(current)
    advantages[:N] = -1.0
    for rows in (list(range(N, len(current))), list(range(N))[::-1]):
        masks = (batch.tensors["response_mask"][rows], batch.tensors["exp_mask"][rows, -current.shape[1] :])
        old = current[rows] - 0.5
        loss = het_compute_token_on_off_policy_loss(old, current[rows], advantages[rows], *masks, cliprange=0.2)
        replay.loss_computed(batch, rows, loss, advantages[rows])
    replay.step_done(
        batch, fresh, current, torch.ones_like(current), data={"position": step}, seeds={"torch": 5}, config={"lr": 3}
    )


def test_rows_of_a_batch(tmp_path: Path) -> None:
    """Means are over trained tokens; rollouts in no store are told apart by their number in the step."""
    step = trained_step(4, **BATCH, weights=torch.tensor([1.0, 1.0, 0.0, 1.0]), loss={"pg": torch.tensor(0.5)})
    assert [row[:10] for row in step.rows.tolist()] == [
        (-1, 0, 0, 2.0, 0.5, 2, 1.0, 0.0, 3, 0),
        (-1, 1, 0, np.float32(0.1), 1.5, 3, 1.0, 0.0, -1, 0),
        (7, 0, 1, 2.0, 2.0, 1, 0.0, 0.0, 2, 1),
        (-3, 0, 1, 0.0, 1.0, 0, 1.0, 0.0, 3, 0),
    ]
    assert (step.tasks, step.loss) == (["a", "b"], {"pg": 0.5})
    assert step.rows["mask_digest"].tolist() == [digest([0, 2]), 0, 0, 0]
    assert step.unknown == ("probability", "token_digest", "log_prob")
    tokens = [torch.tensor(row) for row in ([5, 6], [5], [7, 8, 9], [5, 6])]
    known = trained_step(4, **BATCH, tokens=tokens, log_probs=BATCH["advantages"] * -1)
    assert known.rows["token_digest"].tolist() == [digest(row) for row in tokens]
    assert (known.rows["log_prob"].tolist()[:3], known.unknown) == ([-2.0, -np.float32(0.1), -2.0], ("probability",))
    with Ledger(tmp_path) as ledger:
        ledger.record(trained_step(4, **{**BATCH, "ratios": None}))
    contents = read(tmp_path)
    assert np.isnan(contents.table()["ratio"]).all()
    assert audit(contents).problems == (), "an unknown ratio is none"
    for name, wrong, message in (
        ("task_ids", ["a", "c", "b", "b"], "row 1 is of task 'c', but its group 'u' is of task 'a'"),
        ("versions", [1], "4, 4, 4, 1, 4, 4, 4 entries; each must have one for every row"),
        ("tokens", tokens[:3], "uids, tokens: 4, 3 entries"),
        ("ratios", torch.ones(3), r"ratios: shape \[3\], must be \[B, R\] or \[B\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            trained_step(4, **{**BATCH, name: wrong})


def test_a_recorded_configuration_has_no_credentials() -> None:
    config = {
        "trainer": {
            "logger": ["wandb"],
            "wandb_api_key": "S",
            "seed": 1,
            "lr": 1e-6,
            "nan": float("nan"),
            3: Path("a"),
        },
        "ray": {"runtime_env": {"env_vars": {"ANYTHING": "S", "NCCL_DEBUG": "S"}}},
        "store": {"path": "s3://user:S@bucket/a?token=S&x=1", "key": "S", "secret": "S", "endpoint": "http://a:1"},
        "more": [
            {"password": "S", "hf_token": "S", "Authorization": "S", "aws_secret_access_key": "S"},
            "https://S@a/b",
        ],
        "kept": {
            "pad_token_id": 2,
            "eos_token": "</s>",
            "max_tokens": 5,
            "key": "acc",
            "token_sum": 1,
            "password": None,
        },
    }
    step = trained_step(4, **BATCH, config=config)
    step.check()
    text = json.dumps(step.config)
    assert '"S"' not in text
    assert "S@" not in text
    assert "=S" not in text
    assert step.config["kept"] == config["kept"]
    assert step.config["trainer"] == {
        "logger": ["wandb"], "wandb_api_key": HIDDEN, "seed": 1, "lr": 1e-6, "nan": "nan", "3": "a"
    }  # fmt: skip
    assert step.config["store"]["path"] == f"s3://{HIDDEN}@bucket/a?{HIDDEN}&x=1"


def test_the_hook_records_each_step_with_the_ids_of_the_pools_store(tmp_path: Path) -> None:
    with make(tmp_path, drop_negative_off_policy=True) as replay:
        with pytest.raises(StoreLockedError, match="ledger"):
            ReplayHook(ExperienceReplayConfig(), n_rollout=N, get_task=str, ledger=tmp_path / "ledger")
        do(replay, 1)
        do(replay, 2)
        stored = replay.manager._ledger.store
        names = {number: stored.get(number).rollout_id for number in stored.ids()}
    one, two = read(tmp_path / "ledger").steps.values()
    assert (sorted(two.tasks), two.data, two.seeds) == (TASKS, {"position": 2}, {"replay": 1234, "torch": 5})
    assert (two.config, two.unknown) == ({"lr": 3}, ("probability",))
    fresh = one.rows[one.rows["trajectory"] >= 0]
    assert [names[number] for number in fresh["trajectory"].tolist()] == ["1/0", "1/1"] * len(TASKS)
    replayed = two.rows[two.rows["replayed"] == 1]
    assert set(replayed["trajectory"]) <= set(fresh["trajectory"])
    assert len(replayed) == len(TASKS)
    assert (set(replayed["version"]), set(two.rows["version"])) == ({1}, {1, 2})
    assert two.rows["weight"].tolist() == [1.0, 1.0, 1.0, 0.0] + [1.0] * (len(two.rows) - N)
    assert two.rows["advantage"].tolist() == [-1.0] * N + [1.0] * (len(two.rows) - N)
    np.testing.assert_allclose(two.rows["ratio"], np.exp(0.5), rtol=1e-6)


def test_a_run_that_begins_again_replaces_the_ledger_and_a_step_needs_a_loss(tmp_path: Path) -> None:
    with make(tmp_path) as replay:
        do(replay, 1)
        do(replay, 2)
        with pytest.raises(ConfigurationError, match=r"step 3 .*loss_computed"):
            do_step(replay, 3)
        with pytest.raises(ConfigurationError, match="lacks step 9, from which the trainer continues"):
            replay.resume({}, 9)
    with make(tmp_path) as replay, pytest.warns(UserWarning, match="2 steps will be replaced"):
        replay.tasks_chosen(TASKS, 0.0, 0)
    assert [*read(tmp_path / "ledger").steps] == [1, 2]
    with pytest.raises(ConfigurationError, match="store: pool, would have copies of the rollouts in "):
        ReplayHook[str](
            ExperienceReplayConfig(enable=True, store={"path": "pool"}), n_rollout=4, get_task=str, rollouts="r"
        )
    with pytest.raises(ConfigurationError, match="cannot be written with draws_ahead = 1"):
        ReplayHook(ExperienceReplayConfig(), n_rollout=N, get_task=str, ledger=tmp_path / "ledger", draws_ahead=1)
    for name in ("ledger", "rollouts"):
        with pytest.raises(ConfigurationError, match=f"{name}: True is a bool, must be a path or URL"):
            ReplayHook(ExperienceReplayConfig(), n_rollout=N, get_task=str, **{name: True})

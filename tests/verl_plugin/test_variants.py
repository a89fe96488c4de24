"""The real V1 trainer with each option; all rows of the loss are recomputed from the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from trajstore import AgentTrajectory

from .assets import TRAIN_ROWS, make_rows
from .rebuilt import check_steps
from .recount import OffPolicyLoss, check_choices, check_loss_rows, mean_entropy
from .runs import GROUP, REPLAY, Train

pytestmark = [pytest.mark.timeout(900), pytest.mark.campaign]

OPTION = "+exp_manager.experience_replay."
TWO_MINI_BATCHES = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A run's options and their expected effects."""

    overrides: tuple[str, ...]
    steps: int = 4
    separate: bool = False
    loss: OffPolicyLoss | None = None
    group: Callable[[str], int] = lambda task: GROUP
    two_outputs: bool = False
    own_counts: bool = False
    histories: int | None = None
    """Histories per group, if the expected choice is recomputed."""
    value: Callable[[AgentTrajectory], float] = mean_entropy
    """Sort key of the choice, smallest first."""
    in_turns: bool = False
    """Least used first, ties by ``value``."""


def outcome_of(rollout: AgentTrajectory) -> float:
    """Return a rollout's outcome."""
    return float(rollout.reward.outcome)


def own_count(task: str) -> int:
    """Return a task's number of rollouts according to the data set."""
    return 2 + 2 * (int(task.split(":")[1]) % 3)


FEW_TASKS = ("data.train_max_samples=4", f"{OPTION}exp_ratio=1.0")
ONE_HISTORY = (*FEW_TASKS, f"{OPTION}offpolicy_trajectories_per_task=1")
TURNS = f"{OPTION}in_turns=true"

VARIANTS = {
    "argmin": Variant(ONE_HISTORY, steps=5, histories=1),
    "in turns, argmax": Variant(
        (*ONE_HISTORY, TURNS, f"{OPTION}exp_select_mode=argmax"),
        steps=5,
        histories=1,
        value=lambda one: -mean_entropy(one),
        in_turns=True,
    ),
    "separate, shaped, argmax": Variant(
        (
            *ONE_HISTORY,
            f"{OPTION}group_offpolicy=separate",
            f"{OPTION}off_policy_shaping=0.1",
            f"{OPTION}exp_select_mode=argmax",
        ),
        steps=5,
        separate=True,
        loss=OffPolicyLoss(shaping=0.1),
        histories=1,
        value=lambda one: -mean_entropy(one),
    ),
    "drop_negative, positive, reward": Variant(
        (
            f"{OPTION}drop_negative_off_policy=true",
            f"{OPTION}save_filter=positive",
            f"{OPTION}exp_select_mode=reward",
            f"{OPTION}offpolicy_trajectories_per_task=2",
        ),
        loss=OffPolicyLoss(drop_negative=True),
        histories=2,
        value=lambda one: -outcome_of(one),
    ),
    "mini-batches": Variant(
        (*TWO_MINI_BATCHES, f"{OPTION}offpolicy_trajectories_per_task=3", f"{OPTION}exp_ratio=1.0"),
        steps=5,
        histories=3,
    ),
    "two outputs": Variant((f"{OPTION}offpolicy_trajectories_per_task=2",), steps=5, two_outputs=True, histories=2),
    "two outputs, mini-batches": Variant((*TWO_MINI_BATCHES, f"{OPTION}exp_ratio=1.0"), steps=6, two_outputs=True),
    "random, unclipped": Variant(
        # The policy soon moves away from the replayed rows, so clipping would show.
        (
            *FEW_TASKS,
            f"{OPTION}exp_select_mode=random",
            f"{OPTION}clip_off_policy=false",
            "actor_rollout_ref.actor.optim.lr=5e-3",
        ),
        steps=5,
        loss=OffPolicyLoss(clip=False),
    ),
    "numbers of their own": Variant(
        (f"{OPTION}offpolicy_trajectories_per_task=3", f"{OPTION}exp_ratio=1.0"),
        steps=5,
        group=own_count,
        own_counts=True,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_loss_sees_what_the_store_and_the_options_say(variant: Variant, train: Train, tmp_path: Path) -> None:
    overrides = [*REPLAY, *variant.overrides, f"trainer.total_training_steps={variant.steps}"]
    if variant.two_outputs:
        loop = tmp_path / "loop.yaml"
        loop.write_text("- name: two_outputs\n  _target_: trajstore_verl_cpu_outputs.TwoOutputs\n", encoding="utf-8")
        overrides += [
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_outputs",
        ]
    if variant.own_counts:
        rows = make_rows(0, TRAIN_ROWS, "train")
        counted = [row | {"__rollout_n__": own_count(f"digit:{row['extra_info']['index']}")} for row in rows]
        pq.write_table(pa.Table.from_pylist(counted), tmp_path / "counted.parquet")
        overrides.append(f"data.train_files={tmp_path / 'counted.parquet'}")
    done = train(tmp_path, *overrides)
    assert [record["step"] for record in done.steps] == list(range(1, variant.steps + 1))
    rollouts = [rollout for rollout in done.rollouts if rollout.metadata["trained"]]
    seen = done.rows
    counted = check_loss_rows(seen, rollouts, group=variant.group, separate=variant.separate, loss=variant.loss)
    assert counted.replayed_rows == done.sum_of("replayed_rows") > 0
    assert bool(counted.replayed_of_several) == variant.two_outputs
    assert counted.beyond_clip or variant.loss is None or variant.loss.clip
    assert done.sum_of("other_prompts") == 0
    assert counted.rows_of == {rollout.metadata["uid"]: variant.group(rollout.task_id) for rollout in rollouts}
    check_steps(done)
    assert done.sum_of("histories_refused/without_room") == 0 or variant.own_counts
    if variant.histories is not None:
        left = check_choices(
            seen, rollouts, count=variant.histories, value=variant.value, least_used_first=variant.in_turns
        )
        assert left or variant.histories > 1

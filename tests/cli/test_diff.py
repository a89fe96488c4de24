"""``trajstore diff``: two trajectories compared, through the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.stores import Run
from tests.stores import stored
from trajstore import AgentTrajectory, Reward, Trajectory, annotate
from trajstore.cli import DAMAGED

HOSTILE = "\x1b[2Jlook"


def rollout(replies: list[str], ids: list[int], **more: Any) -> AgentTrajectory:
    """Tokens: two of the prompt, then two that the model wrote and one that it was told, again and again."""
    told = [{"role": "user", "content": HOSTILE}, *({"role": "assistant", "content": one} for one in replies)]
    values: dict[str, Any] = {
        "messages": told,
        "input_ids": torch.tensor(ids),
        "response_start": 2,
        "loss_mask": torch.tensor([0, 0] + [int(at % 3 < 2) for at in range(len(ids) - 2)]),
        "old_log_probs": torch.arange(len(ids) - 2) / -8,
        "task_id": "t",
    }
    return AgentTrajectory(**values | more)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    alike = "x" * 3000
    rollouts = [
        rollout(["a", f"{alike}4", "end"], [1, 2, 3, 4, 5, 6, 7, 8], policy_version=3, reward=Reward(outcome=1.0)),
        rollout(["a", f"{alike}5", "more", "end"], [1, 2, 3, 4, 5, 9, 7, 8, 8], metadata={"seed": 1}),
        rollout(["a"], [1, 2, 3], task_id="other"),
    ]
    path = stored(tmp_path / "rank_0", rollouts, each=True)
    annotate(path, 0, {"judge": 0.5, "tag": HOSTILE})
    annotate(path, 1, {"judge": 0.5})
    return path


def report(run: Run, path: Path, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = run.json("diff", path, *words)
    return found


def test_facts_messages_and_tokens_of_two_rollouts(store: Path, run: Run) -> None:
    found = report(run, store, 0, 1)
    assert (found["same_task"], found["equal"]) == (True, False)
    facts = {one["name"]: (one["left"], one["right"]) for one in found["facts"]}
    assert facts["policy_version"] == (3, None)
    assert facts["reward.outcome"] == (1.0, None)
    assert facts["metadata.seed"] == (None, 1)
    assert facts["late.tag"] == (HOSTILE, None)
    assert facts["tokens"] == (8, 9)
    assert not {"late.judge", "task_id", "response_start"} & facts.keys()
    messages = found["messages"]
    assert (messages["counts"], messages["same"]) == ([4, 5], 2)
    assert [(one["same"], one["left"], one["right"]) for one in messages["turns"]] == [
        (True, [0, 1], [0, 1]),
        (False, [2], [2, 3]),
        (True, [3], [4]),
    ]
    (changed,) = messages["changed"][0]["fields"]
    assert (changed["name"], changed["same"]) == ("content", 3000)
    tokens = found["tokens"]
    assert (tokens["counts"], tokens["same"]) == ([8, 9], 5)
    parts = [
        (one["same"], *([part["part"] for part in one[side]] for side in ("left", "right"))) for one in tokens["turns"]
    ]
    assert parts == [
        (True, ["prompt", "model", "told"], ["prompt", "model", "told"]),
        (False, ["model"], ["model"]),
        (True, ["told"], ["told"]),
        (False, [], ["model"]),
    ]
    assert [(at["token"], at["id"]) for at in tokens["at"]] == [(5, 6), (5, 9)]
    assert not any(one["differs"] for one in found["columns"]), "over the five tokens that are equal"


def test_what_people_see_of_two_rollouts(store: Path, run: Run) -> None:
    out = run.out("diff", store, 0, 1)
    assert "rollout 0 and rollout 1 of task t" in out
    assert "messages: the first 2 of 4 and 5 are equal" in out
    assert "message 2 of 0, content, from character 2,920 on:" in out, "not the 2,000 characters that are equal"
    assert "xxx4\n" in out
    assert "xxx5\n" in out
    assert "tokens: the first 5 of 8 and 9 are equal" in out
    assert "token 5 of 1: id 9 (the model wrote)" in out
    assert "\x1b" not in out
    assert "\\x1b[2Jlook" in out
    assert ", of different tasks: t and other" in run("diff", store, 0, 2)[1]
    assert "2 ends before token 3" in run("diff", store, 0, 2)[1]
    assert "one and the same trajectory" in run("diff", store, 1, 1)[1]


def test_rewards_are_those_in_force_and_what_was_recorded_stands_beside(tmp_path: Path, run: Run) -> None:
    said = Reward(outcome=1.0, metadata={"judge": 0.25})
    store = stored(tmp_path / "store", [rollout(["a"], [1, 2, 3], reward=said)] * 2, each=True)
    annotate(store, 0, {"outcome": 0.5, "reward_judge": 0.75, "success_rate": 0.5})
    annotate(store, 0, {"outcome": 0.0})
    facts = {one["name"]: (one["left"], one["right"]) for one in report(run, store, 0, 1)["facts"]}
    assert (facts["reward.outcome"], facts["recorded.outcome"]) == ((0.0, 1.0), (1.0, None))
    assert (facts["reward.metadata.judge"], facts["recorded.reward_judge"]) == ((0.75, 0.25), (0.25, None))
    assert facts["reward.success_rate"] == (0.5, None)
    assert not any("trajstore." in name for name in facts)
    _, out, _ = run("inspect", store, "--trajectory", 0)
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert {"outcome 0.0 (recorded: 1.0)", "success rate 0.5 (recorded: none)", "judge 0.75 (recorded: 0.25)"} <= {
        *rows
    }
    found = run.json("inspect", store, "--trajectory", 0)
    assert (found["reward"]["outcome"], found["recorded"]["outcome"]) == (0.0, 1.0)
    annotate(store, 0, {"outcome": None, "reward_judge": None, "success_rate": None})
    assert "recorded" not in run("inspect", store, "--trajectory", 0)[1]


def test_columns_of_rollouts_are_compared_over_tokens_that_are_equal(tmp_path: Path, run: Run) -> None:
    """Scored anew, one with a longer prompt: values of one token stand beside each other."""
    ids = [1, 2, 3, 4, 5, 6]
    longer = rollout([], ids, response_start=3, old_log_probs=torch.arange(1, 4) / -8 - 0.25)
    longer.loss_mask = rollout([], ids).loss_mask
    path = stored(tmp_path / "store", [rollout([], ids), longer, rollout([], ids)], each=True)
    found = report(run, path, 0, 1)
    apart = {one["name"]: one for one in found["columns"] if one["differs"]}
    assert apart.keys() == {"old_log_probs"}
    assert (apart["old_log_probs"]["differing"], apart["old_log_probs"]["largest"]) == (3, 0.25)
    assert found["tokens"]["at"] == [None, None]
    assert report(run, path, 0, 2)["equal"]
    assert "nothing differs" in run("diff", path, 0, 2)[1]


def block(steps: int, step: float, nan: bool = False) -> Trajectory:
    rewards = torch.zeros(steps, 2, 1)
    rewards[1, 1] = step
    rewards[0, 0] = float("nan") if nan else 0.0
    image = torch.full((steps, 2, 3), 250 if step else 0, dtype=torch.uint8)
    return Trajectory(rewards=rewards, curr_obs={"image": image, "place": [step]})


def test_blocks_are_compared_by_column(tmp_path: Path, run: Run) -> None:
    nan = [block(4, 0.0, nan=True), block(4, 0.5, nan=True)]
    path = stored(tmp_path / "store", [*nan, block(5, 0.0), block(4, 0.0), block(4, 0.0)], each=True)
    found = report(run, path, 0, 1)
    assert found["messages"] is found["tokens"] is found["same_task"] is None
    columns = {one["name"]: one for one in found["columns"] if one["differs"]}
    assert columns["rewards"]["first"] == [1, 1], "NaN in both is no difference"
    assert (columns["rewards"]["differing"], columns["rewards"]["largest"]) == (1, 0.5)
    assert columns["curr_obs.image"]["largest"] == 250
    assert [one["name"] for one in found["facts"]] == ["curr_obs.place"]
    columns = {one["name"]: one for one in report(run, path, 0, 3)["columns"]}
    assert (columns["rewards"]["not_finite"], columns["rewards"]["largest"]) == (1, None)
    shapes = {one["name"]: one for one in report(run, path, 0, 2)["columns"]}["rewards"]
    assert (shapes["left"]["shape"], shapes["right"]["shape"]) == ([4, 2, 1], [5, 2, 1])
    assert "differing" not in shapes
    assert "nothing differs" in run("diff", path, 3, 4)[1]


def test_ids_of_a_run_and_a_block_beside_a_rollout(store: Path, run: Run) -> None:
    stored(store.parent / "rank_1", [block(4, 0.5)])
    found = report(run, store.parent, "0/1", "1/0")
    assert [found[side]["kind"] for side in ("left", "right")] == ["agent", "step"]
    assert {"name": "kind", "left": "agent", "right": "step"} in found["facts"]
    assert {"rewards", "input_ids"} <= {one["name"] for one in found["columns"] if one["differs"]}
    assert "rollout 1 and block 1/0" in run("diff", store.parent, 1, "1/0")[1]
    assert "no trajectory has the id 1/99" in run("diff", store.parent, 1, "1/99")[2]


def test_what_cannot_be_compared_is_said(store: Path, run: Run) -> None:
    shard = sorted((store / "shards").iterdir())[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    code, out, errors = run("diff", store, 0, 1)
    assert (code, out) == (DAMAGED, "")
    assert "trajectory 1 cannot be compared: " in errors
    assert shard.name in errors
    assert run("diff", store, 0, 2)[0] == 0


def test_text_from_the_first_token_that_differs(store: Path, run: Run, tmp_path: Path, of_numbers: None) -> None:
    out = run.out("diff", store, 0, 1, "--tokenizer", tmp_path)
    assert "1 from token 5 on (the model wrote), after '<1\\x1b>" in out
    assert "  | <9\\x1b><7\\x1b>" in out
    assert "--tokenizer" not in out


def test_thousands_of_turns_take_no_longer_than_they_must(tmp_path: Path, run: Run) -> None:
    def many(first: int) -> AgentTrajectory:
        mask = torch.arange(20_000) % 2
        return AgentTrajectory(
            input_ids=mask.clone().index_fill_(0, torch.tensor([100, 19_000]), first), loss_mask=mask, response_start=1
        )

    found = report(run, stored(tmp_path / "store", [many(7), many(8)], each=True), 0, 1)["tokens"]
    assert [(one["same"], len(one["left"])) for one in found["turns"]] == [(True, 100), (False, 18_901), (True, 999)]

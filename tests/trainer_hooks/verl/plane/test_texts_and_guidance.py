"""Texts of rollouts that are recorded, and rollouts that were guided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.trainer_hooks.verl.builders import VOCABULARY, fresh_row
from tests.trainer_hooks.verl.plane import sessions as plane
from tests.trainer_hooks.verl.plane.sessions import TASKS, MakeSession, N, rollouts
from trainer_hooks.guidance_config import GuidanceConfig
from trainer_hooks.verl.loss import EXP_MASK
from trainer_hooks.verl.offers import OFFER
from trajstore.guidance import Guidance

# ---- texts ----


class Words:
    """A tokenizer."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, one)) for one in ids]


def test_rollouts_are_recorded_with_their_text_and_pooled_without(make_session: MakeSession, tmp_path: Path) -> None:
    """The text comes later than the pool decides."""
    session = make_session(store={"path": str(tmp_path / "pool")}, decoder=Words())
    plane.fill(session)
    session.save(tmp_path / "global_step_1", 1)
    pooled = [one for held in session._hook.manager.task2trajectories.values() for one in held]
    assert {len(one.messages) for one in pooled} == {1}
    recorded = {one.rollout_id: one for one in plane.recorded(tmp_path)}
    assert {one.messages[-1]["author"] for one in recorded.values()} == {"llm"}
    for one in pooled:
        other = recorded[one.rollout_id]
        assert torch.equal(one.input_ids, other.input_ids)


class SmallVocabulary(Words):
    """Fails for tokens that a model with a padded vocabulary may sample."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        if any(token >= VOCABULARY for one in ids for token in one):
            raise OverflowError("out of range")
        return super().batch_decode(ids, skip_special_tokens)


def test_a_task_that_nobody_here_wrote(make_session: MakeSession, tmp_path: Path) -> None:
    """Rewards between -1 and 1, some NaN; responses without a token of the model's; tokens that the tokenizer lacks."""
    session = make_session(store={"path": str(tmp_path / "pool")}, decoder=SmallVocabulary())
    scores = [1.0, -1.0, float("nan"), 1.0]
    for step in range(1, 4):
        session.plan(TASKS, 0.5, step)
        rows = []
        for index in range(len(TASKS)):
            for number, score in enumerate(scores):
                uid = f"s{step}i{index}"
                rows.append(fresh_row(uid, number, response=2 + number, score=score, index=index, seed=10 * step))
                if number == 3 and index < 2:
                    for name in ("response_mask", "loss_mask"):
                        rows[-1].columns[name][:] = 0
        rows[0].columns["raw_prompt"] = [{"role": "user", "content": "half a pair: \ud800"}]
        rows[1].columns["extra_fields"]["odd"] = 2**70
        rows[4].columns["responses"][1] = VOCABULARY + 7
        rows[4].columns["input_ids"][-1] = VOCABULARY + 7
        _, figures = plane.train(session, rows, step)
    session.save(tmp_path / "global_step_3", 3)
    figures |= session.scored(plane.batch_of([]), 3)
    assert figures["recording/lost"] == 0
    assert figures["recording/without_text"] == 3
    found = plane.recorded(tmp_path)
    assert len(found) == 3 * len(TASKS) * N
    outcomes = Counter(one.reward.outcome for one in found)
    assert outcomes[None] >= 3 * len(TASKS)


# ---- guided rollouts ----


@pytest.mark.parametrize("replay", [False, True])
def test_rows_whose_experience_was_taken_out_are_marked_and_others_are_not(
    make_session: MakeSession, tmp_path: Path, replay: bool
) -> None:
    guidance = GuidanceConfig(enable_context_generator=True, rollout_expratio=0.5, updated_freq=0)
    session = make_session(guidance=guidance, enable=replay)
    if replay:
        plane.fill(session)
        session.expect({"a": plane.planned(session)[TASKS[0]][:1]})
    plain, kept, taken = rollouts("a", 3)
    plane.put_prompts("a")
    joined = session.join(plane.put([plain, plane.shown(kept, "keep"), plane.shown(taken, "discard")]))
    masks = {key: mask.tolist() for key, mask in plane.column(joined, EXP_MASK).items()}
    assert masks["a_0_0"] == [0, 0]
    assert masks["a_1_0"] == [0, 0, 0]
    assert masks["a_2_0"] == [1, 1, 1, 1], "the whole response, what the environment said in it too"
    assert len(masks) == 3 + replay
    plane.rate(joined)
    figures = session.scored(joined, 2)
    assert figures["guidance/guided_rollouts"] == 2.0
    engine = plane.column(joined, "rollout_log_probs")
    assert torch.equal(engine["a_1_0"], kept.columns["rollout_log_probs"])
    assert torch.equal(engine["a_2_0"], plane.column(joined, "old_log_probs")["a_2_0"]), (
        "the engine's are of another prompt"
    )
    session.close()
    by_id = {one.rollout_id: one for one in plane.recorded(tmp_path)}
    assert Guidance.of(by_id["a_0_0"]) is None
    assert by_id["a_1_0"].messages[0]["content"] == "tip: task 0"
    assert by_id["a_2_0"].messages[0]["content"] == "task 0"
    assert by_id["a_1_0"].rollout_log_probs is not None
    assert by_id["a_2_0"].rollout_log_probs is None
    assert "extra_fields" not in by_id["a_2_0"].metadata
    if replay:
        history = joined.keys[-1]
        assert masks[history] == plane.column(joined, "response_mask")[history].tolist()
        assert plane.column(joined, "extra_fields")[history].get(OFFER) is None, (
            "what the group was shown is not the history's"
        )

"""Guided rollouts in the reference trainer: trained tokens, masks, records, replay beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.grpo.config import TrainerConfig
from examples.grpo.environments import SortEnvironment
from examples.grpo.trainer import ReferenceTrainer
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.guidance import Guidance
from trainer_hooks.guidance.config import GuidanceConfig
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

GUIDANCE: dict[str, Any] = {
    "enable_summarizer": True,
    "enable_context_generator": True,
    "updated_freq": 1,
    "retrieve_top_k": 1,
    "rollout_expratio": 0.5,
    "experience_template": "hint {} now ",
}


def make_trainer(*, replay: bool = False, **guidance: Any) -> ReferenceTrainer:
    config = TrainerConfig(
        steps=4,
        tasks_per_step=4,
        n_rollout=4,
        warm_start_steps=20,
        guidance=GuidanceConfig(**{**GUIDANCE, **guidance}),
        replay=ExperienceReplayConfig(enable=replay),
    )
    trainer = ReferenceTrainer(config, SortEnvironment(lengths=(2,), tasks_per_length=6))
    trainer.warm_start()
    return trainer


class Seen:
    """Records each step's rows and batch."""

    def __init__(self, trainer: ReferenceTrainer) -> None:
        self.rows: list[Any] = []
        self.batches: list[Any] = []
        self.prompts: list[list[str]] = []
        build, run = trainer._batch, trainer.worker.run

        def batch(rows: Any) -> Any:
            made = build(rows)
            self.rows.append(rows)
            self.batches.append(made)
            return made

        def roll_out(tasks: Any, generator: Any, openings: Any = None) -> list[AgentTrajectory]:
            if openings:
                self.prompts.append(list(openings))
            return run(tasks, generator, openings)

        trainer._batch = batch  # type: ignore[method-assign]
        trainer.worker.run = roll_out  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["alldiscard", "allkeep"])
def test_discarded_rows_hold_no_experience_and_kept_rows_train_on_it(mode: str) -> None:
    with make_trainer(replay=True, train_sample_expmode=mode) as trainer:
        seen = Seen(trainer)
        points = trainer.train()
        assert all(torch.tensor(point.loss).isfinite() for point in points)
        hint = trainer.tokenizer.encode("hint")[0]
        shown = [prompt for prompts in seen.prompts for prompt in prompts if "hint" in prompt]
        assert shown, "rollouts were guided"
        guided = replayed = 0
        for rows, batch in zip(seen.rows, seen.batches, strict=True):
            for place, row in enumerate(rows):
                tensors = {name: tensor[place] for name, tensor in batch.tensors.items()}
                guidance = Guidance.of(row.trajectory)
                has_hint = bool((tensors["prompts"] == hint).any())
                exp_mask, attention = tensors["exp_mask"], tensors["attention_mask"]
                if row.is_experience_replay:
                    replayed += 1
                    assert torch.equal(exp_mask, tensors["loss_mask"])
                    assert has_hint == (guidance is not None and mode == "allkeep")
                elif guidance is None:
                    assert not exp_mask.any()
                    assert not has_hint
                else:
                    guided += 1
                    assert guidance.insertions[0].text.startswith("hint ")
                    assert guidance.experiences, "the record says which experience was shown"
                    assert has_hint == (mode == "allkeep")
                    assert torch.equal(exp_mask, attention if mode == "alldiscard" else torch.zeros_like(attention))
                    assert not tensors["recorded_mask"].any() or mode == "allkeep"
        assert guided == len(shown)
        assert replayed > 0
        assert trainer.metrics["guidance/retrieve/guided"] == guided
        assert "guidance/outcome/unguided" in trainer.metrics


FILLED: dict[str, Any] = {"init_experience_before_training": True, "updated_freq": 0}


def test_evaluations_are_guided_and_become_experience_where_configured() -> None:
    with make_trainer(**FILLED) as trainer:
        trainer.train(1)
        made = trainer.guidance.metrics()["guidance/update/made"]
        assert made > 0, "filled before the first step"
        assert trainer.metrics["guidance/guided_rollouts"] > 0
    with make_trainer(val_rollout_expmode="all", val_summarizer_save=True, updated_freq=0) as trainer:
        seen = Seen(trainer)
        draws = trainer.guidance.state_dict()
        assert [trainer.evaluate() for _ in range(2)]
        assert trainer.guidance.metrics()["guidance/update/made"] == made
        assert trainer.guidance.state_dict() == draws, "an evaluation leaves the draws of training as they are"
        assert ["hint" in " ".join(prompts) for prompts in seen.prompts] == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experience_template": "hint<EXP>{}</EXP>"}, "the reference trainer reads words"),
        ({"base_url": "http://127.0.0.1:1"}, "keeps experience in memory"),
    ],
)
def test_what_the_word_worlds_cannot_do_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(**change)

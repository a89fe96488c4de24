"""Choice of guided prompts and their experience in the trainer, also with a failing service."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.guidance.reme import FakeReMe
from tests.trainer_hooks.verl.conftest import Compose
from tests.verl_plugin.assets import make_tokenizer
from trainer_hooks.guidance import Guidance, Insertion, with_guidance
from trainer_hooks.verl.config import ReplayBlock
from trainer_hooks.verl.guided import GuidedRollouts
from trainer_hooks.verl.offers import GUIDED_LOOP, OFFER, Offer
from trainer_hooks.verl.tasks import ROLLOUTS_WANTED
from trajstore.errors import ConfigurationError, StoreLockedError
from trajstore.trajectory import AgentTrajectory, Reward

N = 4
BASE = ("algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={N}", "actor_rollout_ref.rollout.val_kwargs.n=2")
SHOWS = ("+experience_maker.enable_context_generator=true", "+exp_manager.rollout_expratio=0.5")
MAKES = ("+experience_maker.enable_summarizer=true", "+experience_maker.updated_freq=1")
HYBRID = ("+exp_manager.train_sample_expmode=hybrid", "+exp_manager.train_sample_keepratio=0.4")

Opened = Callable[..., GuidedRollouts]


@pytest.fixture
def opened(override_verl: Compose, tmp_path: Path) -> Iterator[Opened]:
    """Return what opens guidance with overrides; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_with(*overrides: str) -> GuidedRollouts:
            config = override_verl([*BASE, f"trainer.default_local_dir={tmp_path}", *overrides])
            guided = GuidedRollouts(ReplayBlock.from_config(config), make_tokenizer())
            stack.callback(guided.close)
            return guided

        yield open_with


def prompts_of(count: int = 3, **columns: list[Any]) -> TensorDict:
    rows: dict[str, Any] = {
        "uid": [f"u{index}" for index in range(count)],
        "index": list(range(count)),
        "data_source": ["house"] * count,
        "raw_prompt": [[{"role": "user", "content": f"find cup {index}"}] for index in range(count)],
        **columns,
    }
    result = tu.get_tensordict({name: as_objects(values) for name, values in rows.items()})
    tu.assign_non_tensor_data(result, "global_steps", 1)
    return result


def as_objects(values: list[Any]) -> np.ndarray:
    held = np.empty(len(values), dtype=object)
    held[:] = values
    return held


def rollout(task: int, outcome: float, number: int = 0, step: int = 1) -> AgentTrajectory:
    return AgentTrajectory(
        messages=[
            {"role": "user", "content": f"find cup {task}"},
            {"role": "assistant", "content": "kitchen" if outcome == 1.0 else "attic", "author": "llm"},
        ],
        reward=Reward(outcome=outcome),
        task_id=f"house:{task}",
        rollout_id=f"{step}_{number}",
        policy_version=step,
    )


def learnt(guided: GuidedRollouts, step: int = 1) -> dict[str, float]:
    """Let a success and a failure of each of three tasks become experience."""
    made = [rollout(task, float(number), number, step) for task in range(3) for number in (0, 1)]
    guided.finished(made)
    figures = guided.step_done(made, step)
    assert guided.hook.wait(600)
    return figures


def offers_of(prompts: TensorDict) -> list[Offer | None]:
    return [Offer.of_text(text) if text else None for text in prompts[OFFER]] if OFFER in prompts else []


def test_the_loops_of_the_data_and_the_rollouts_of_replay_are_respected(opened: Opened) -> None:
    guided = opened(*SHOWS, *MAKES)
    learnt(guided)
    result = guided.offered(prompts_of(agent_name=["tools", "tools", "search"], **{ROLLOUTS_WANTED: [4, 2, 1]}))
    offers = offers_of(result)
    assert [None if offer is None else len(offer.sessions) for offer in offers] == [2, 1, None], "half of 1 is 0"
    assert [None if offer is None else offer.loop for offer in offers] == ["tools", "tools", None]
    assert list(result["agent_name"]) == [GUIDED_LOOP, GUIDED_LOOP, "search"]
    assert list(result[OFFER])[2] == "", "a column that one row lacks is lost for all"


def test_columns_are_read_in_every_form_that_verl_gives_them(opened: Opened) -> None:
    """Prompts that are issued again after a resume come out of the data plane."""
    guided = opened(*SHOWS, *MAKES)
    learnt(guided)
    prompts = prompts_of().exclude("index", "data_source")
    prompts["index"] = torch.arange(3)
    tu.assign_non_tensor_data(prompts, "data_source", "house")
    tu.assign_non_tensor_data(prompts, "agent_name", "tools")
    prompts[ROLLOUTS_WANTED] = torch.tensor([2, 2, 2])
    offers = offers_of(guided.offered(prompts))
    assert [None if offer is None else (offer.loop, len(offer.sessions)) for offer in offers] == [("tools", 1)] * 3


def test_validation_is_shown_nothing_unless_configured(opened: Opened) -> None:
    guided = opened(*SHOWS, *MAKES)
    learnt(guided)
    prompts = prompts_of()
    tu.assign_non_tensor_data(prompts, "validate", True)
    assert guided.offered(prompts) is prompts
    guided.close()
    guided = opened(*SHOWS, *MAKES, "+exp_manager.val_rollout_expmode=all")
    assert [offer.sessions for offer in offers_of(guided.offered(prompts)) if offer] == [(0, 1)] * 3


def test_off_is_off(opened: Opened) -> None:
    guided, prompts = opened(), prompts_of()
    assert guided.offered(prompts) is prompts
    assert guided.step_done([rollout(0, 1.0)], 1) == {}
    assert not guided.wants_validation


def test_the_same_state_gives_the_same_choices(opened: Opened) -> None:
    guided = opened(*SHOWS, *MAKES, *HYBRID)
    learnt(guided)
    guided.offered(prompts_of())
    state = json.loads(json.dumps(guided.hook.state_dict()))
    first = [list(guided.offered(prompts_of())[OFFER]) for _ in range(3)]
    assert len({tuple(offer) for offer in first}) > 1
    guided.hook.load_state_dict(state)
    validation = prompts_of()
    tu.assign_non_tensor_data(validation, "validate", True)
    guided.offered(validation)  # of which a resumed run makes one more
    assert [list(guided.offered(prompts_of())[OFFER]) for _ in range(3)] == first


def test_rollouts_of_dropped_groups_count_too(opened: Opened) -> None:
    guided = opened(*SHOWS, *MAKES)
    learnt(guided)
    shown = Guidance("discard", ("0",), (Insertion(0, "tip"),), taken_out=True)
    guided.finished([with_guidance(rollout(0, 1.0, step=2), shown)], trained=False)  # of a group that was filtered
    figures = guided.step_done([rollout(0, 0.0, 1, step=2)], 2)
    assert figures["guidance/guided_rollouts"] == 1.0
    assert figures["guidance/outcome/guided"] == 1.0
    assert figures["guidance/outcome/unguided"] == 0.0
    guided.close()
    guided.close()


def test_what_was_not_shown_is_counted_and_told_once(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    guided = opened(*SHOWS, *MAKES)
    made = [rollout(0, 1.0, number) for number in range(3)]
    for row in made[:2]:
        row.metadata["not_guided"] = "too_long"
    guided.finished(made)
    assert guided.step_done(made, 1)["guidance/rollouts/too_long"] == 2.0
    assert caplog.text.count("raise it, or lower") == 1


def test_a_store_that_is_another_runs_names_the_option(opened: Opened) -> None:
    opened(*SHOWS, *MAKES)
    with pytest.raises(StoreLockedError) as caught:
        opened(*SHOWS, *MAKES)
    assert "experience_maker.store.path" in caught.value.__notes__[0]


def test_prompts_without_messages_are_an_error(opened: Opened) -> None:
    with pytest.raises(ConfigurationError, match="prompts have no raw_prompt"):
        opened(*SHOWS, *MAKES).offered(prompts_of().exclude("raw_prompt"))


def test_an_empty_store_that_nothing_fills_is_told(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    opened(*SHOWS)
    assert "nothing will be shown" in caplog.text


def test_validations_before_training_become_experience_once(opened: Opened) -> None:
    guided = opened(*SHOWS, *MAKES, "+exp_manager.init_experience_before_training=true")
    assert guided.wants_validation
    guided.validated([rollout(0, 1.0)])
    guided.validated([rollout(1, 1.0)])
    guided.validation_done(0)
    assert len([offer for offer in offers_of(guided.offered(prompts_of())) if offer is not None]) >= 2
    assert not guided.wants_validation, "val_summarizer_save is not set"


# ---- a service ----


def asking(opened: Opened, url: str, seconds: float, *more: str) -> GuidedRollouts:
    """Open guidance that queries a service with this timeout per answer."""
    maker = ["dialect='0.2'", "enable_summarizer=true", "updated_freq=1", f"base_url={url}"]
    maker += [f"{name}={seconds}" for name in ("retrieve_timeout", "summary_timeout")]
    return opened(*SHOWS, *(f"+experience_maker.{option}" for option in maker), *more)


@pytest.mark.parametrize(("mode", "kind", "seconds"), [("hang", "timeout", 0.3), ("503", "server", 60.0)])
def test_a_service_in_trouble_is_counted_and_told_once(
    opened: Opened, caplog: pytest.LogCaptureFixture, mode: str, kind: str, seconds: float
) -> None:
    """Sixty prompts per step: sequential queries to a hanging service would add up sixty timeouts."""
    caplog.set_level(logging.WARNING)
    with FakeReMe(mode=mode) as service:
        guided = asking(opened, service.url, seconds)
        prompts = prompts_of(60)
        for _ in range(3):
            assert OFFER not in guided.offered(prompts)
        guided.step_done([rollout(0, 1.0)], 1)
        assert guided.hook.wait(600)
        while (figures := guided.step_done([], 2)).get(f"guidance/retrieve/failed/{kind}", 0.0) == 0.0:
            time.sleep(0.05)  # calls that the step abandoned end by themselves
        failed = {name: value for name, value in figures.items() if name.startswith("guidance/retrieve/failed/")}
        assert sum(failed.values()) + figures["guidance/rollouts/late"] >= 3 * 60
        assert sum(figures[name] for name in figures if name.startswith("guidance/update/failed/")) == 1.0
        warnings = [record.getMessage() for record in caplog.records if "retrieving experience" in record.getMessage()]
        assert len(warnings) == 1


def test_a_service_that_answers_slowly_holds_a_step_no_longer_than_said(opened: Opened) -> None:
    """Each answer is in time, but there are too many questions; late answers are counted and not shown."""

    class Slow:
        def __init__(self) -> None:
            self.asked = 0

        def context(self, messages: Any, config: Any) -> Any:
            self.asked += 1
            time.sleep(0.2)
            return messages

    guided = asking(opened, "http://127.0.0.1:9", 0.2)
    slow = Slow()
    guided.hook.context = slow.context  # type: ignore[method-assign]
    guided.offered(prompts_of(2000))
    assert slow.asked < 2000
    assert guided.step_done([], 1)["guidance/rollouts/late"] >= 2000 - slow.asked


def test_a_service_is_asked_once_for_each_prompt(opened: Opened) -> None:
    with FakeReMe() as service:
        guided = asking(opened, service.url, 60, "+exp_manager.train_rollout_expmode=all")
        offers = offers_of(guided.offered(prompts_of()))
        assert [offer.sessions for offer in offers if offer is not None] == [tuple(range(N))] * 3
        assert all(offer is not None and offer.names == ("m1", "m2") for offer in offers)
        assert len(service.calls) == 3

"""The guided agent loop around loops that build prompts in several ways, with verl's tokenization."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.workers.rollout.replica import TokenOutput

from tests.trainer_hooks.verl.conftest import Compose
from tests.verl_plugin.assets import make_tokenizer
from trainer_hooks.guidance import Guidance, Insertion
from trainer_hooks.guidance.context import TrainMode
from trainer_hooks.verl.guided_loop import GuidedAgentLoop
from trainer_hooks.verl.offers import OFFER, Offer, Report

TOKENIZER = make_tokenizer()
PLAIN = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say 1"}]
TIP = "tip: say 1 first. "
ROLLED: list[list[int]] = []
"""Prompts used for sampling."""


class Loop(AgentLoopBase):  # type: ignore[misc]  # verl is not typed
    """Like verl's single-turn loop, without an engine."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        return self.answer(await self.ct_build_initial_tokens(list(named["raw_prompt"])))

    def answer(self, prompt: list[int], **more: Any) -> AgentLoopOutput:
        ROLLED.append(list(prompt))
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[7, 8, 1],
            response_mask=[1, 1, 1],
            response_logprobs=[-1.0, -2.0, -3.0],
            metrics=AgentLoopMetrics(),
            extra_fields={"of the loop": 1},
            **more,
        )


class Twice(Loop):
    """Two outputs; the second continues the first one's prompt and answer (growing context)."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        first = await super().run(sampling_params, **named)
        return [first, self.answer([*first.prompt_ids, *first.response_ids, 9])]


class Cut(Loop):
    """Two outputs; the second one's context was cut and lacks the experience."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        first = await super().run(sampling_params, **named)
        again = await self.ct_build_initial_tokens([{"role": "user", "content": "again"}])
        return [first, self.answer(again)]


class Wrapping(Loop):
    """Wraps the given message in its own and mutates its list afterwards."""

    form = "task: {}"

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        messages = [dict(message) for message in named["raw_prompt"]]
        messages[-1]["content"] = self.form.format(messages[-1]["content"])
        prompt = await self.ct_build_initial_tokens(messages)
        messages.clear()
        return self.answer(prompt)


class Adding(Wrapping):
    """Appends to the given message."""

    form = "{}. go"


class Unheard(Loop):
    """Tokenizes by itself."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        return self.answer(tokens(list(named["raw_prompt"])))


class Deaf(Loop):
    """Reads the task from another column."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        return self.answer(await self.ct_build_initial_tokens([{"role": "user", "content": "other"}]))


class Routed(Loop):
    """Returns routed experts for each token, including the prompt."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        return self.answer(await self.ct_build_initial_tokens(list(named["raw_prompt"])), routed_experts=[[0]])


def tokens(messages: list[dict[str, Any]]) -> list[int]:
    return list(TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


@pytest.fixture(autouse=True)
def _no_prompts() -> None:
    ROLLED.clear()


def loop_of(config: Any, engine: Any = None) -> GuidedAgentLoop:
    return GuidedAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=engine,
        tokenizer=TOKENIZER,
        processor=None,
        hf_model_type="llama",
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap([]),
    )


def rolled_out(
    kind: type[Loop],
    mode: TrainMode,
    *,
    text: str = TIP,
    plain: list[dict[str, Any]] = PLAIN,
    session: int = 1,
    most: int = 4000,
) -> list[AgentLoopOutput]:
    """Return a session's outputs; session 1 is guided."""
    _agent_loop_registry["under_test"] = {"_target_": f"{__name__}.{kind.__name__}"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"prompt_length": most}}, "data": {}})
    offer = Offer("under_test", (1,), mode, Insertion(len(plain) - 1, text), ("4", "2"))
    before = [dict(row) for row in plain]
    named = {"raw_prompt": plain, "session_id": session, OFFER: offer.to_text(), "index": 3}

    async def go() -> Any:
        return await loop_of(config).run({}, **named)

    made = asyncio.run(go())
    assert plain == before
    return made if isinstance(made, list) else [made]


def guided(plain: list[dict[str, Any]] = PLAIN, text: str = TIP) -> list[dict[str, Any]]:
    return [*plain[:-1], {**plain[-1], "content": text + plain[-1]["content"]}]


def report_of(output: AgentLoopOutput) -> Report:
    return Report.of(output.extra_fields)


@pytest.mark.parametrize("kind", [Loop, Wrapping, Unheard])
def test_kept_rows_are_as_sampled(kind: type[Loop]) -> None:
    (row,) = rolled_out(kind, "keep")
    assert [row.prompt_ids] == ROLLED
    assert TIP in TOKENIZER.decode(row.prompt_ids)
    report = report_of(row)
    assert not report.exchanged
    assert not report.guidance.taken_out


def test_other_sessions_of_the_prompt_are_left_alone() -> None:
    (row,) = rolled_out(Loop, "discard", session=0)
    assert row.prompt_ids == tokens(PLAIN)
    assert OFFER not in row.extra_fields


def test_every_output_is_looked_at_by_itself() -> None:
    first, second = rolled_out(Twice, "discard")
    assert first.prompt_ids == tokens(PLAIN)
    assert second.prompt_ids == [*tokens(PLAIN), 7, 8, 1, 9]
    assert first.extra_fields["of the loop"] == 1
    assert report_of(first).exchanged
    assert report_of(second).exchanged
    first, second = rolled_out(Cut, "discard")
    assert first.prompt_ids == tokens(PLAIN)
    assert second.prompt_ids == tokens([{"role": "user", "content": "again"}])
    assert report_of(first).exchanged
    assert not report_of(second).exchanged, "it was sampled with the prompt that it has"
    assert report_of(second).guidance is not None


def test_what_a_loop_adds_behind_stays() -> None:
    (row,) = rolled_out(Adding, "discard")
    assert row.prompt_ids == tokens([PLAIN[0], {"role": "user", "content": "say 1. go"}])
    assert report_of(row).exchanged


@pytest.mark.parametrize("kind", [Wrapping, Unheard, Routed])
def test_what_cannot_be_taken_out_is_rolled_out_again_without(kind: type[Loop]) -> None:
    (row,) = rolled_out(kind, "discard")
    assert len(ROLLED) == 2
    assert report_of(row) == Report(trouble="not_taken_out")
    assert row.prompt_ids == ROLLED[-1]
    assert TIP not in TOKENIZER.decode(row.prompt_ids)


class Engine:
    """A rollout engine without a model that records prompts."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **more: Any) -> TokenOutput:
        ROLLED.append(list(prompt_ids))
        return TokenOutput(token_ids=[7, 8, 1], log_probs=[-1.0, -2.0, -3.0], extra_fields={"global_steps": 2})


@pytest.mark.parametrize("name", ["single_turn_agent", "tool_agent"])
def test_the_loops_of_verl(name: str, override_verl: Compose) -> None:
    config = override_verl(["data.max_prompt_length=200"])
    offer = Offer(name, (0,), "discard", Insertion(1, TIP), ("4",))
    plain = [dict(item) for item in PLAIN]

    async def go() -> Any:
        return await loop_of(config, Engine()).run({}, raw_prompt=plain, session_id=0, **{OFFER: offer.to_text()})

    item = asyncio.run(go())
    assert plain == PLAIN
    assert [tokens(guided())] == ROLLED
    assert item.prompt_ids == tokens(PLAIN)
    assert item.response_ids == [7, 8, 1]
    assert report_of(item) == Report(Guidance("discard", ("4",), (Insertion(1, TIP),), taken_out=True), exchanged=True)


@pytest.mark.parametrize("mode", ["keep", "discard"])
def test_a_loop_that_reads_the_task_elsewhere_was_shown_nothing(mode: TrainMode) -> None:
    (row,) = rolled_out(Deaf, mode)
    assert report_of(row) == Report(trouble="not_seen")


@pytest.mark.parametrize("mode", ["keep", "discard"])
def test_a_prompt_without_room_is_rolled_out_without(mode: TrainMode) -> None:
    (row,) = rolled_out(Loop, mode, most=len(tokens(guided())))
    assert report_of(row) == Report(trouble="too_long")
    assert ROLLED == [tokens(PLAIN)] == [row.prompt_ids]
    (row,) = rolled_out(Loop, mode, most=len(tokens(guided())) + 1)
    assert report_of(row).guidance is not None


TEXT = st.text(alphabet=" :.say1{}<>EXP\n", max_size=12)


@settings(max_examples=40, deadline=None)
@given(experience=TEXT, task=TEXT)
def test_put_in_and_taken_out_gives_the_tokens_of_the_prompt(experience: str, task: str) -> None:
    """Also for experience that the task contains, and for experience made of spaces."""
    ROLLED.clear()
    plain: list[dict[str, Any]] = [{"role": "user", "content": task}]
    text = f"<EXP>{experience}</EXP>"
    (row,) = rolled_out(Loop, "discard", plain=plain, text=text)
    assert row.prompt_ids == tokens(plain)
    assert report_of(row).exchanged
    (row,) = rolled_out(Loop, "discard", plain=guided(plain, text), text=text)
    assert row.prompt_ids == tokens(guided(plain, text)), "a task that looks as if experience had been put in"


def test_offers_and_reports_are_text_and_json() -> None:
    offer = Offer("loop", (0, 3), "keep", Insertion(2, "odd \ud800 \x00 {}"), ("a", ""))
    assert Offer.of_text(offer.to_text()) == offer
    assert Report.of(None) is None
    assert Report.of({"guidance": "of the loop"}) is None

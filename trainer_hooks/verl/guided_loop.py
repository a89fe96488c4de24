"""The agent loop of guided rollouts: any other loop, with experience in its prompt; verl runs it in its workers.

It hands the prompt with the experience to the loop that was configured. Where training discards the experience, it
makes the prompt's tokens again as the loop made them, of the messages without it; the response stays as sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry, register

from trainer_hooks.guidance import Guidance, put_in
from trainer_hooks.guidance.context import Message
from trainer_hooks.verl.offers import GUIDED_LOOP, OFFER, Offer, Report
from trajstore.errors import TrajstoreError


class PromptTooLongError(TrajstoreError):
    """With the experience in it the prompt has no room; verl would cut off its beginning."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt that a loop has made tokens of."""

    messages: list[dict[str, Any]]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    ids: list[int]


class PromptListener:
    """Hears how an agent loop makes the tokens of its prompts, so that they can be made without what was put in.

    Args:
        loop: an ``AgentLoopBase``; its ``ct_build_initial_tokens`` is replaced. A loop that has none is not heard.
        plain: the message as the data set has it.
        guided: the same with experience in front.
        text: what was put in.
        most: tokens of a prompt.
    """

    def __init__(self, loop: Any, plain: Message, guided: Message, text: str, most: int) -> None:
        self.heard: list[_Prompt] = []
        self._plain, self._guided, self._text, self._most = plain["content"], guided["content"], text, most
        self._build: Any = getattr(loop, "ct_build_initial_tokens", None)
        if self._build is not None:
            loop.ct_build_initial_tokens = self._listen

    async def _listen(self, messages: Sequence[Message], *arguments: Any, **named: Any) -> list[int]:
        kept = [dict(one) for one in messages]  # the loop goes on with its own
        ids = list(await self._build(kept, *arguments, **named))
        if self.shows(kept) and len(ids) >= self._most:
            raise PromptTooLongError(f"{len(ids)} tokens or more")
        self.heard.append(_Prompt(kept, arguments, named, ids))
        return ids

    def shows(self, messages: Sequence[Message]) -> bool:
        """Return whether messages hold what was put in, anywhere."""
        return any(_holds(one.get("content"), self._text) for one in messages)

    async def without(self, ids: Sequence[int]) -> list[int] | None:
        """Return a prompt's tokens without what was put in; ``None`` if it cannot be told how.

        Args:
            ids: of the prompt; may be more than what the loop began with.
        """
        for prompt in sorted(self.heard, key=lambda one: len(one.ids), reverse=True):
            length = len(prompt.ids)
            if list(ids[:length]) != prompt.ids:
                continue
            if not self.shows(prompt.messages):
                return list(ids)
            messages = [{**one, "content": self._restored(one.get("content"))} for one in prompt.messages]
            if self.shows([one for one in messages if one["content"] != self._plain]):
                return None  # the loop has made something else of the message
            named = {name: {} if name == "mm_inputs_out" else value for name, value in prompt.named.items()}
            return [*await self._build(messages, *prompt.arguments, **named), *ids[length:]]
        return None

    def _restored(self, content: Any) -> Any:
        """Return a message's content without what was put in, whatever the loop has added behind."""
        guided = self._guided
        if type(content) is type(guided) and content[: len(guided)] == guided:
            return self._plain + content[len(guided) :]
        return content


@register(GUIDED_LOOP)
class GuidedAgentLoop:
    """Runs the loop that the offer names; see the module. Has the constructor and ``run`` of verl's ``AgentLoopBase``.

    A rollout whose prompt has no room for the experience, or out of which it cannot be taken again, is made without;
    the report says so.
    """

    def __init__(self, **given: Any) -> None:
        self._given = given
        self._most = int(given["trainer_config"].config.actor_rollout_ref.rollout.prompt_length)

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        """Return the outputs of one session, as the loop gives them, each with a :class:`Report`."""
        offer = Offer.of_text(named.pop(OFFER))
        if int(named["session_id"]) not in offer.sessions:
            return await self._loop(offer.loop).run(sampling_params, **named)
        plain, place = list(named["raw_prompt"]), offer.insertion.message
        guided, _ = put_in(plain[: place + 1], offer.insertion.text)
        loop = self._loop(offer.loop)
        listener = PromptListener(loop, plain[place], guided[place], offer.insertion.text, self._most)
        try:
            made = await loop.run(sampling_params, **{**named, "raw_prompt": [*guided, *plain[place + 1 :]]})
        except PromptTooLongError:
            return await self._unguided(sampling_params, named, offer, "too_long")
        if offer.train_mode == "keep":
            # A loop that is not heard makes its tokens by itself, of the messages that it was handed.
            shown = not listener.heard or any(listener.shows(one.messages) for one in listener.heard)
            return _reporting(made, _report(offer) if shown else Report(trouble="not_seen"))
        prompts = [await listener.without(one.prompt_ids) for one in _outputs(made)]
        routed = any(one.routed_experts is not None for one in _outputs(made))  # a row for each token of the prompt
        if routed or any(one is None for one in prompts):
            return await self._unguided(sampling_params, named, offer, "not_taken_out")
        if all(new == list(one.prompt_ids) for new, one in zip(prompts, _outputs(made), strict=True)):
            return _reporting(made, Report(trouble="not_seen"))
        for one, new in zip(_outputs(made), prompts, strict=True):
            exchanged = new != list(one.prompt_ids)
            one.prompt_ids = new
            _reporting(one, _report(offer, taken_out=True, exchanged=exchanged))
        return made

    async def _unguided(self, sampling_params: dict[str, Any], named: dict[str, Any], offer: Offer, why: str) -> Any:
        made = await self._loop(offer.loop).run(sampling_params, **named)
        return _reporting(made, Report(trouble=why))

    def _loop(self, name: str) -> Any:
        """Return a new loop, as verl makes one for each rollout."""
        return hydra.utils.instantiate(config=_agent_loop_registry[name], **self._given)


def _report(offer: Offer, *, taken_out: bool = False, exchanged: bool = False) -> Report:
    return Report(Guidance(offer.train_mode, offer.names, (offer.insertion,), taken_out), exchanged)


def _reporting(made: Any, report: Report) -> Any:
    for one in _outputs(made):
        one.extra_fields[OFFER] = report.to_json()
    return made


def _outputs(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def _holds(content: Any, text: str) -> bool:
    if isinstance(content, str):
        return text in content
    if isinstance(content, list):
        return any(_holds(one.get("text") if isinstance(one, Mapping) else one, text) for one in content)
    return False

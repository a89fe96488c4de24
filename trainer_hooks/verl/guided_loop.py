"""The agent loop of guided rollouts, in verl's workers: runs another loop with experience in the prompt.

Where training discards the experience, the prompt's tokens are built again from the messages without it, in the same
way as the loop built them; the response is kept as sampled.
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
    """The prompt with experience is too long; verl would truncate its beginning."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt that a loop has tokenized."""

    messages: list[dict[str, Any]]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    ids: list[int]


class PromptListener:
    """Records how an agent loop tokenizes its prompts, to tokenize them again without the experience.

    Args:
        loop: an ``AgentLoopBase``; its ``ct_build_initial_tokens`` is replaced. Loops without this method are left
            untouched.
        plain: the message of the data set.
        guided: the same message with experience in front.
        text: the inserted text.
        most: maximum number of tokens of a prompt.
    """

    def __init__(self, loop: Any, plain: Message, guided: Message, text: str, most: int) -> None:
        self.heard: list[_Prompt] = []
        self._plain, self._guided, self._text, self._most = plain["content"], guided["content"], text, most
        self._build: Any = getattr(loop, "ct_build_initial_tokens", None)
        if self._build is not None:
            loop.ct_build_initial_tokens = self._listen

    async def _listen(self, messages: Sequence[Message], *arguments: Any, **named: Any) -> list[int]:
        kept = [dict(message) for message in messages]  # copies, as the loop may change its messages
        ids = list(await self._build(kept, *arguments, **named))
        if self.shows(kept) and len(ids) >= self._most:
            raise PromptTooLongError(f"{len(ids)} tokens or more")
        self.heard.append(_Prompt(kept, arguments, named, ids))
        return ids

    def shows(self, messages: Sequence[Message]) -> bool:
        """Return whether any message contains the inserted text."""
        return any(_holds(message.get("content"), self._text) for message in messages)

    async def without(self, ids: Sequence[int]) -> list[int] | None:
        """Return the prompt's tokens without the experience, or ``None`` if that is impossible.

        Args:
            ids: token ids of the prompt; may continue after the initial prompt of the loop.
        """
        for prompt in sorted(self.heard, key=lambda prompt: len(prompt.ids), reverse=True):
            length = len(prompt.ids)
            if list(ids[:length]) != prompt.ids:
                continue
            if not self.shows(prompt.messages):
                return list(ids)
            messages = [{**message, "content": self._restored(message.get("content"))} for message in prompt.messages]
            if self.shows([message for message in messages if message["content"] != self._plain]):
                return None  # the loop has made something else of the message
            named = {name: {} if name == "mm_inputs_out" else value for name, value in prompt.named.items()}
            return [*await self._build(messages, *prompt.arguments, **named), *ids[length:]]
        return None

    def _restored(self, content: Any) -> Any:
        """Return a message's content without the experience, keeping text that the loop appended."""
        guided = self._guided
        if type(content) is type(guided) and content[: len(guided)] == guided:
            return self._plain + content[len(guided) :]
        return content


@register(GUIDED_LOOP)
class GuidedAgentLoop:
    """Runs the loop named by the offer. Has the constructor and ``run`` of verl's ``AgentLoopBase``.

    If the prompt with experience is too long, or the experience cannot be removed again, the rollout is made without
    it; the report gives the reason.
    """

    def __init__(self, **given: Any) -> None:
        self._given = given
        self._most = int(given["trainer_config"].config.actor_rollout_ref.rollout.prompt_length)

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        """Return the loop's outputs of one session, each with a :class:`Report`."""
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
            # A loop without recorded prompts tokenizes the messages that it was given by itself.
            shown = not listener.heard or any(listener.shows(prompt.messages) for prompt in listener.heard)
            return _reporting(made, _report(offer) if shown else Report(trouble="not_seen"))
        prompts = [await listener.without(output.prompt_ids) for output in _outputs(made)]
        routed = any(
            output.routed_experts is not None for output in _outputs(made)
        )  # a row for each token of the prompt
        if routed or any(prompt is None for prompt in prompts):
            return await self._unguided(sampling_params, named, offer, "not_taken_out")
        if all(new == list(output.prompt_ids) for new, output in zip(prompts, _outputs(made), strict=True)):
            return _reporting(made, Report(trouble="not_seen"))
        for output, new in zip(_outputs(made), prompts, strict=True):
            exchanged = new != list(output.prompt_ids)
            output.prompt_ids = new
            _reporting(output, _report(offer, taken_out=True, exchanged=exchanged))
        return made

    async def _unguided(self, sampling_params: dict[str, Any], named: dict[str, Any], offer: Offer, why: str) -> Any:
        made = await self._loop(offer.loop).run(sampling_params, **named)
        return _reporting(made, Report(trouble=why))

    def _loop(self, name: str) -> Any:
        """Return a new loop; verl also creates one per rollout."""
        return hydra.utils.instantiate(config=_agent_loop_registry[name], **self._given)


def _report(offer: Offer, *, taken_out: bool = False, exchanged: bool = False) -> Report:
    return Report(Guidance(offer.train_mode, offer.names, (offer.insertion,), taken_out), exchanged)


def _reporting(made: Any, report: Report) -> Any:
    for output in _outputs(made):
        output.extra_fields[OFFER] = report.to_json()
    return made


def _outputs(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def _holds(content: Any, text: str) -> bool:
    if isinstance(content, str):
        return text in content
    if isinstance(content, list):
        return any(_holds(part.get("text") if isinstance(part, Mapping) else part, text) for part in content)
    return False

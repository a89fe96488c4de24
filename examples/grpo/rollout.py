"""Batched episodes of one policy with a shared key-value cache.

Rows are aligned by *columns*, not by tokens: in each column a row has a token or a hole. Holes are masked and have no
position, so that every row attends to exactly its own conversation, whatever the length of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from examples.grpo.environments import Environment, Episode, TextTask
from examples.grpo.tokenizer import WordTokenizer
from trainer_hooks.replay.rows import pack_rows
from trajstore.errors import InvalidTrajectoryError
from trajstore.trajectory import RESPONSE_COLUMNS, AgentTrajectory, Reward

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(slots=True)
class _Row:
    """One running episode and its messages so far."""

    episode: Episode
    ids: list[int]
    response_start: int
    messages: list[dict[str, Any]]
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    outcome: float = 0.0
    done: bool = False
    read: int = 0
    """Number of ``ids`` that the policy has read."""

    def take_unread(self) -> list[int]:
        """Return the ids that the policy has not read yet, and count them as read."""
        unread = self.ids[self.read :]
        self.read = len(self.ids)
        return unread

    def append(self, ids: Sequence[int], log_probs: Sequence[float] | None) -> None:
        """Add tokens: the model's with their log-probabilities, or the environment's."""
        self.ids += ids
        self.loss_mask += [int(log_probs is not None)] * len(ids)
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(ids)


class _Columns:
    """The key-value cache of B rows, and the mask of tokens in its columns."""

    def __init__(self, model: LlamaForCausalLM, pad_id: int, rows: int, capacity: int) -> None:
        from transformers import DynamicCache

        self._model = model
        self._pad_id = pad_id
        self._cache = DynamicCache(config=model.config)
        self._device = model.device
        self._filled = torch.zeros(rows, capacity, dtype=torch.bool, device=self._device)
        self._width = 0

    def feed(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens (a row may have none; filled from the right) and return the logits after the last, [B, V]."""
        width = max(map(len, tokens))
        ids = torch.tensor([[self._pad_id] * (width - len(row)) + list(row) for row in tokens], device=self._device)
        filled = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in tokens], device=self._device)
        start, stop = self._width, self._width + width
        self._filled[:, start:stop] = filled.bool()
        self._width = stop
        positions = self._filled[:, :stop].cumsum(-1).sub_(1).clamp_(min=0)[:, start:]
        # A hole attends only to itself, to avoid an empty softmax; no other token attends to it.
        order = torch.arange(stop, device=self._device)
        causal = order[None, :] <= order[start:, None]
        itself = order[None, :] == order[start:, None]
        visible = (causal & self._filled[:, None, :stop]) | itself
        output = self._model(
            input_ids=ids,
            attention_mask=visible[:, None],
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


class RolloutWorker:
    """Makes trajectories with a policy. Keeps no state of its own: randomness is passed in."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: WordTokenizer, environment: Environment) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._environment = environment

    @torch.no_grad()
    def run(
        self, tasks: Sequence[TextTask], generator: torch.Generator, openings: Sequence[str] | None = None
    ) -> list[AgentTrajectory]:
        """Return one trajectory per entry of ``tasks``, in order; tasks may repeat.

        Tokens are sampled from the policy's distribution (temperature 1, no truncation). ``old_log_probs`` are those of
        the sampled tokens, and 0 on the environment's tokens. ``rollout_id`` is left empty for the caller.

        Args:
            tasks: tasks to attempt.
            generator: random generator on the model's device.
            openings: first message of each task, as shown to the model; ``None`` = the environment's message.
        """
        if not tasks:
            return []
        rows = [self._begin(task, openings[place] if openings else None) for place, task in enumerate(tasks)]
        environment = self._environment
        longest = max(len(row.ids) for row in rows)
        turn_room = environment.max_reply_tokens + longest
        columns = _Columns(self._model, self._tokenizer.pad_id, len(rows), longest + environment.max_turns * turn_room)
        while not all(row.done for row in rows):
            replies = self._reply(columns, rows, generator)
            for row, reply in zip(rows, replies, strict=True):
                if not row.done:
                    self._answer(row, reply)
        return [self._finish(task, row) for task, row in zip(tasks, rows, strict=True)]

    def _begin(self, task: TextTask, opening: str | None) -> _Row:
        episode = self._environment.begin(task)
        content = episode.first_message if opening is None else opening
        ids = self._tokenizer.opening(content)
        message = {"role": "user", "content": content, "author": "env"}
        return _Row(episode, ids, len(ids), [message])

    def _reply(self, columns: _Columns, rows: Sequence[_Row], generator: torch.Generator) -> list[list[int]]:
        """Sample one reply in each unfinished row; return the sampled ids per row."""
        writing = [not row.done for row in rows]
        replies: list[list[int]] = [[] for _ in rows]
        for _ in range(self._environment.max_reply_tokens):
            logits = columns.feed([row.take_unread() if on else [] for row, on in zip(rows, writing, strict=True)])
            scores = logits.log_softmax(dim=-1)
            draw = torch.multinomial(scores.exp(), 1, generator=generator)
            drawn, chances = draw[:, 0].tolist(), scores.gather(-1, draw)[:, 0].tolist()
            for index, row in enumerate(rows):
                if writing[index]:
                    replies[index].append(drawn[index])
                    row.append([drawn[index]], [chances[index]])
                    writing[index] = drawn[index] != self._tokenizer.end_id
            if not any(writing):
                break
        return replies

    def _answer(self, row: _Row, reply: list[int]) -> None:
        """Pass a reply to the environment, and append its answer to the row."""
        text = self._tokenizer.reply_text(reply)
        row.messages.append({"role": "assistant", "content": text, "author": "llm"})
        answer = row.episode.answer(text)
        row.outcome, row.done = answer.reward, answer.done
        if not row.done:
            row.messages.append({"role": "user", "content": answer.observation, "author": "env"})
            row.append(self._tokenizer.turn(answer.observation), None)

    def _finish(self, task: TextTask, row: _Row) -> AgentTrajectory:
        prompt = row.response_start
        response_mask = torch.tensor(row.loss_mask, dtype=torch.int64)
        return AgentTrajectory(
            messages=row.messages,
            input_ids=torch.tensor(row.ids, dtype=torch.int64),
            attention_mask=torch.ones(len(row.ids), dtype=torch.int64),
            loss_mask=torch.cat([torch.zeros(prompt, dtype=torch.int64), response_mask]),
            response_start=prompt,
            old_log_probs=torch.tensor(row.log_probs, dtype=torch.float32),
            response_mask=response_mask,
            reward=Reward(outcome=row.outcome),
            task_id=task.task_id,
            query=row.episode.first_message,
            is_terminated=True,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
        )


def turns_as_rows(trajectory: AgentTrajectory) -> AgentTrajectory:
    """Return a rollout with one row for each of the model's turns: the conversation so far, and that turn trained on.

    These are the rows of ``linear_think`` if no turn has thoughts.
    """
    ids, mask, before = trajectory.input_ids, trajectory.loss_mask, trajectory.response_start
    if ids is None or mask is None or before is None:
        raise InvalidTrajectoryError(f"rollout {trajectory.rollout_id!r}: lacks input_ids, loss_mask or response_start")
    written = (mask != 0).tolist()
    starts = [
        place for place, is_written in enumerate(written) if is_written and (place == 0 or not written[place - 1])
    ]
    rows = []
    for start in starts:
        end = next((place for place in range(start, len(written)) if not written[place]), len(written))
        row = replace(trajectory, response_start=start, input_ids=ids[:end], attention_mask=None)
        row.loss_mask = torch.cat([torch.zeros_like(mask[:start]), mask[start:end]])
        for name in RESPONSE_COLUMNS:
            if (column := getattr(trajectory, name)) is not None:
                setattr(row, name, column[start - before : end - before])
        rows.append(row)
    return pack_rows(rows) if rows else trajectory

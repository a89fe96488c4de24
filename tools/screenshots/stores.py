"""Small believable stores: rollouts of an agent that learns to use a terminal, and blocks with pictures of a robot."""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer

VERSIONS, SIBLINGS = 16, 8
SYSTEM = "You work in a terminal. Call it as often as you need, then answer in one sentence."
END = "<|end|>"

Message = dict[str, Any]
Step = tuple[str, str, str]
"""A call of the terminal: what is thought before it, the command, what it prints."""


@dataclass(frozen=True)
class Task:
    """A task of ``tasks.toml``."""

    name: str
    question: str
    hard: float
    steps: list[Step]
    answer: str
    slip: Step
    wrong: str


_TOLD = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text())
DETOURS: list[Step] = _TOLD["detours"]
TASKS = [Task(**values) for values in _TOLD["tasks"]]


def write_rollouts(path: Path) -> None:
    """Write a store of rollouts, and the tokenizer that they name beside it."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, seed=1) as writer:
        for rollout in _rollouts(path.parent / "tokenizer"):
            writer.add_trajectories([rollout])


def write_sessions(path: Path) -> None:
    """Write a store with a session of an agent and two helpers, and one that is still open."""
    folder, numbers = path.parent / "tokenizer_of_sessions", np.random.default_rng(5)
    agents = {"main": TASKS[0], "logs": TASKS[1], "config": TASKS[2]}
    said = {name: _conversation(task, 9, random.Random(5))[1] for name, task in agents.items()}
    tokenizer = _tokenizer([text for messages in said.values() for text, _ in _said(messages)], folder)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as writer:
        for rollout_id in ("0", "1"):
            session = writer.session(TASKS[0].name, rollout_id, metadata={"tokenizer": str(folder)})
            for call in ("main-0", "logs-0", "config-0", "logs-1", "config-1", "main-1", "main-1-again", "main-2"):
                name, number, *again = call.split("-")
                messages = said[name][: 3 + 2 * int(number)]
                *pieces, answer, _ = (tokenizer.encode(text, add_special_tokens=False) for text, _ in _said(messages))
                sampled = answer[: len(answer) // 2] if again else answer
                log_probs = -numbers.gamma(0.4, 0.5, len(sampled))
                said_again = None if again else messages
                session.add_call(
                    [*chain(*pieces)], sampled, log_probs, call_id=call, messages=said_again, policy_version=9
                )
            session.incomplete("logs-2", "no answer within 600 s")
            if rollout_id == "0":
                session.finish(Reward(outcome=1.0))


def _rollouts(folder: Path) -> Iterator[AgentTrajectory]:
    """Yield rollouts, version by version and task by task; their tokenizer is written into a folder."""
    chance = random.Random(5)
    made = [
        (task, version, *_conversation(task, version, chance))
        for version in range(VERSIONS)
        for task in TASKS
        for _ in range(SIBLINGS)
    ]
    texts = dict.fromkeys(text for *_, messages in made for text, _ in _said(messages))
    tokenizer = _tokenizer(list(texts), folder)
    tokens = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    numbers = np.random.default_rng(5)
    for task, version, is_solved, messages in made:
        yield _rollout(task, version, is_solved, messages, tokens, numbers, folder)


def _conversation(task: Task, version: float, chance: random.Random) -> tuple[bool, list[Message]]:
    """Return whether a task was solved, and the messages; later versions solve more, with fewer detours."""
    skill = 2.6 * (1 - math.exp(-version / 6))
    is_solved = chance.random() < 1 / (1 + math.exp(task.hard - skill))
    detours = [step for step in DETOURS if chance.random() < 0.55 * math.exp(-version / 7)]
    steps = [*detours, *task.steps[:-1], task.steps[-1] if is_solved else task.slip]
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.question}]
    for step in steps:
        messages += _called(step)
    return is_solved, [*messages, {"role": "assistant", "content": task.answer if is_solved else task.wrong}]


def _called(step: Step) -> list[Message]:
    thought, command, output = step
    call = {"function": {"name": "terminal", "arguments": json.dumps({"command": command})}}
    return [{"role": "assistant", "content": thought, "tool_calls": [call]}, {"role": "tool", "content": output}]


def _said(messages: list[Message]) -> Iterator[tuple[str, bool]]:
    """Yield the text of a conversation in pieces, each with whether the model wrote it."""
    for message in messages:
        yield f"<|{message['role']}|>\n", False
        calls = "".join(json.dumps({"call": call["function"]}) for call in message.get("tool_calls", ()))
        text = "\n".join(part for part in (message["content"], calls) if part)
        yield f"{text}{END}", message["role"] == "assistant"
        yield "\n", False


def _tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [END, *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    return fast


def _rollout(
    task: Task,
    version: int,
    is_solved: bool,
    messages: list[Message],
    tokens: Mapping[str, list[int]],
    numbers: np.random.Generator,
    tokenizer: Path,
) -> AgentTrajectory:
    ids: list[int] = []
    wrote: list[int] = []
    for text, is_models in _said(messages):
        ids += tokens[text]
        wrote += [int(is_models)] * len(tokens[text])
    start = wrote.index(1)
    mask = np.array(wrote[start:])
    entropy, old = _log_probs(mask, version, is_solved, numbers)
    engine = old + mask * numbers.normal(0, 0.02, len(mask)) * (1 + 4 * (numbers.random(len(mask)) < 0.02))
    calls = sum(message["role"] == "tool" for message in messages)
    return AgentTrajectory(
        messages=messages,
        input_ids=torch.tensor(ids),
        attention_mask=torch.ones(len(ids), dtype=torch.int64),
        loss_mask=torch.tensor(wrote),
        response_start=start,
        response_mask=torch.tensor(wrote[start:]),
        old_log_probs=torch.tensor(old, dtype=torch.float32),
        rollout_log_probs=torch.tensor(np.minimum(engine, 0), dtype=torch.float32),
        entropys=torch.tensor(entropy, dtype=torch.float32),
        reward=Reward(outcome=float(is_solved), metadata={"calls": calls}),
        task_id=task.name,
        policy_version=version,
        metadata={"tokenizer": str(tokenizer)},
    )


def _log_probs(
    mask: npt.NDArray[np.int64], version: int, is_solved: bool, numbers: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return entropies and log-probs, 0 where the model was told: it is surer later, less so where a turn begins."""
    turns = np.concatenate(([0], np.diff(mask))) == 1
    since = np.arange(len(mask)) - np.maximum.accumulate(np.where(turns, np.arange(len(mask)), 0))
    sure = 0.12 + 0.25 * math.exp(-version / 6) + 0.5 * np.exp(-since / 3) + (0 if is_solved else 0.1)
    entropy = np.minimum(sure * numbers.lognormal(-0.6, 1.0, len(mask)), 3)
    sampled = mask.astype(np.float64)
    return sampled * entropy, -sampled * np.minimum(entropy * numbers.exponential(1.2, len(mask)), 9)


# -- blocks -------------------------------------------------------------------------------------------

STEPS, ENVIRONMENTS, SIDE, BLOCKS = 48, 4, 72, 12
SPEED = 0.022


def write_blocks(path: Path) -> None:
    """Write a store of blocks in which a gripper pushes a cube onto a mark, seen from above."""
    numbers = np.random.default_rng(2)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, seed=1) as writer:
        for version in range(BLOCKS):
            writer.add_trajectories([_block(version, numbers)])


def _block(version: int, numbers: np.random.Generator) -> Trajectory:
    episodes = [_pushed(numbers, 0.25 * math.exp(-version / 5)) for _ in range(ENVIRONMENTS)]
    pictures, actions, rewards, values = (
        torch.from_numpy(np.stack(parts, axis=1)) for parts in zip(*episodes, strict=True)
    )
    dones = torch.zeros(STEPS + 1, ENVIRONMENTS, 1, dtype=torch.bool)
    dones[-1] = True
    return Trajectory(
        max_episode_length=STEPS,
        actions=actions.float(),
        rewards=rewards.float()[..., None],
        prev_values=values.float()[..., None],
        dones=dones,
        versions=torch.full((STEPS, ENVIRONMENTS, 1), float(version)),
        curr_obs={"camera": pictures},
    )


def _pushed(numbers: np.random.Generator, shake: float) -> tuple[npt.NDArray[Any], ...]:
    """Return pictures, actions, rewards and values of one episode: to the cube first, then with it to the mark."""
    mark, cube, hand = (
        numbers.uniform((0.15, 0.6), (0.85, 0.85)),
        numbers.uniform(0.3, 0.5, 2),
        numbers.uniform(0.1, 0.9, 2),
    )
    pictures, actions, rewards, values = [], [], [], []
    for step in range(STEPS):
        pictures.append(_picture(hand, cube, mark))
        is_held = float(np.hypot(*(hand - cube))) < 0.09
        way = mark - cube if is_held else cube - hand
        move = SPEED * way / max(SPEED, float(np.hypot(*way))) + numbers.normal(0, 0.03 * shake + 0.001, 2)
        before = float(np.hypot(*(cube - mark)))
        hand = np.clip(hand + move, 0.05, 0.95)
        cube = np.clip(cube + move, 0.08, 0.92) if is_held else cube
        after = float(np.hypot(*(cube - mark)))
        actions.append(move * 20)
        rewards.append((before - after) * 10 + (after < 0.05) * 0.2)
        values.append((1 - after) * (0.6 + 0.4 * is_held) * (1 + 0.04 * numbers.normal()) * (STEPS - step) / STEPS * 6)
    return np.stack(pictures), np.stack(actions), np.array(rewards), np.array([*values, 0.0])


def _picture(hand: npt.NDArray[Any], cube: npt.NDArray[Any], mark: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    down, right = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    picture = np.empty((SIDE, SIDE, 3), np.uint8)
    picture[:] = (196, 178, 150)
    picture[(down * 8 % 1 < 0.06)] = (184, 165, 137)

    def away(thing: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = np.hypot(right - thing[0], down - thing[1])
        return found

    picture[(away(mark) < 0.11) & (away(mark) > 0.08)] = (46, 120, 80)
    picture[np.maximum(abs(right - cube[0]), abs(down - cube[1])) < 0.06] = (188, 62, 48)
    picture[(abs(right - hand[0]) < 0.015) & (down < hand[1])] = (96, 102, 110)
    picture[away(hand) < 0.045] = (52, 58, 66)
    return picture


WRITERS = {"terminal": write_rollouts, "pusher": write_blocks, "sessions": write_sessions}
"""Writers of the stores by name."""

"""Readable parts of a recorded rollout (messages, query, tokenizer) and its bytes per token on disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_hooks.verl.builders import fresh_row
from tests.verl_plugin.assets import make_tokenizer
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.arrival import VerlRollouts
from trainer_hooks.verl.config import OutcomeRule, RecordingConfig
from trainer_hooks.verl.reading import RunTokenizer, name_of
from trajstore import TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory


def conversation(tokenizer: Any) -> Row:
    """Return a row of two model turns with an environment message in between."""
    parts = [("say 1<eos>", 1), ("<user>go on<eos><assistant>", 0), ("1<eos>", 1)]
    spoken = [(tokenizer.encode(text, add_special_tokens=False), mask) for text, mask in parts]
    response = torch.tensor([part for ids, _ in spoken for part in ids])
    mask = torch.tensor([mask for ids, mask in spoken for _ in ids])
    row = fresh_row("u1", response=len(response), index=17)
    columns = {**row.columns, "responses": response, "response_mask": mask, "loss_mask": mask}
    return Row(row.key, row.tag, columns)


def made_of(rows: list[Row], tokenizer: RunTokenizer, *, text: bool = True) -> tuple[list[AgentTrajectory], int]:
    """Return rollouts as they are recorded, and how many lack their text."""
    form = VerlRollouts(OutcomeRule(), tokenizer, "run-a", text=text)
    made = [rollout for rollout, _ in form.rollouts(rows)]
    form.finish(made)
    return made, form.problems["without_text"]


def test_inspect_shows_what_an_agent_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = make_tokenizer()
    decoder.save_pretrained(tmp_path / "model")
    (rollout,), _ = made_of([conversation(decoder)], RunTokenizer("f1", str(tmp_path / "model"), decoder))
    assert [(message["role"], message["content"]) for message in rollout.messages] == [
        ("user", "task 17"),
        ("assistant", "say 1"),
        ("environment", "<user>go on<eos><assistant>"),
        ("assistant", "1"),
    ]
    assert [message.get("author") for message in rollout.messages] == [None, "llm", "env", "llm"]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        (number,) = buffer.add_trajectories([rollout])
    assert main(["inspect", str(tmp_path / "store"), "--trajectory", str(number)]) == 0
    shown = capsys.readouterr().out
    for expected in ("sums:17", "task 17", "outcome", "step", "assistant (llm)", "say 1", "go on", "ground_truth"):
        assert expected in shown, expected
    assert "model, tokens 3 to 8" in shown, "the tokenizer is found where the rollout says"


def test_text_can_be_left_out(tmp_path: Path) -> None:
    decoder = make_tokenizer()
    (rollout,), _ = made_of([conversation(decoder)], RunTokenizer("f1", "hub/model", decoder), text=False)
    assert rollout.messages == [{"role": "user", "content": "task 17"}]
    assert (rollout.query, rollout.metadata["tokenizer"]) == ("task 17", "hub/model")
    with pytest.raises(ConfigurationError, match=r"recording: text: 'no' is a str, must be true or false"):
        RecordingConfig(text="no")  # type: ignore[arg-type]


class GaveUpError(BaseException):
    """Panic of compiled code: not an ``Exception``."""


class Broken:
    """Fails for some tokens, like a tokenizer with a smaller vocabulary than the model's."""

    def __init__(self, bad: int, error: BaseException) -> None:
        self._bad = bad
        self._error = error

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        if any(self._bad in row_ids for row_ids in ids):
            raise self._error
        return [" ".join(map(str, row_ids)) for row_ids in ids]


@pytest.mark.parametrize("error", [IndexError("token 99"), GaveUpError("token 99")], ids=["Exception", "panic"])
def test_a_tokenizer_that_fails_costs_the_text_of_that_rollout_only(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [fresh_row("u1", number, response=4, seed=number) for number in range(3)]
    rows[1].columns["responses"][2] = 99
    with caplog.at_level(logging.WARNING):
        made, without_text = made_of(rows, RunTokenizer("f1", decoder=Broken(99, error)))
    assert [message for message in caplog.messages if "u1_1_0 is recorded without text" in message] == caplog.messages
    assert (len(caplog.messages), without_text) == (1, 1)
    assert [len(rollout.messages) for rollout in made] == [4, 1, 4]


def test_names_of_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        name_or_path = "model"

    assert name_of(Named()) == "model"
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert name_of(Named()) == str(tmp_path / "model")
    assert name_of(object()) == ""


def bytes_of_a_rollout(folder: Path, prompt: int, response: int, rollouts: int = 32) -> float:
    rows = [fresh_row(f"{number:032x}", prompt=prompt, response=response, seed=number) for number in range(rollouts)]
    made, _ = made_of(rows, RunTokenizer("f" * 16, "/models/some-model-7b"), text=False)
    drawn = torch.Generator().manual_seed(0)
    for rollout in made:
        rollout.input_ids = torch.randint(0, 151_000, rollout.input_ids.shape, dtype=torch.int32, generator=drawn)
        for name in ("old_log_probs", "rollout_log_probs", "entropys"):
            setattr(rollout, name, -torch.rand(rollout.response_mask.shape, generator=drawn))
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as buffer:
        buffer.add_trajectories(made)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / rollouts


def test_what_a_token_costs_on_disk(tmp_path: Path) -> None:
    """Checks the how-to's figures."""
    size = bytes_of_a_rollout(tmp_path / "a", 300, 700)
    assert bytes_of_a_rollout(tmp_path / "b", 1300, 700) - size == pytest.approx(3 * 1000, rel=0.02)
    assert bytes_of_a_rollout(tmp_path / "c", 300, 1700) - size == pytest.approx(15 * 1000, rel=0.02)
    assert size - 3 * 300 - 15 * 700 < 1300

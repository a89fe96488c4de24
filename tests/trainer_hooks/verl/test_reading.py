"""Readable parts of a recorded rollout (messages, query, tokenizer) and its bytes per token on disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_hooks.verl.builders import fresh_row, recorded_of
from tests.verl_plugin.assets import make_tokenizer
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.config import RecordingConfig
from trainer_hooks.verl.reading import RunTokenizer, Scribe, name_of
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


def made_of(row: Row, tokenizer: RunTokenizer, *, text: bool = True) -> AgentTrajectory:
    made = recorded_of([row], fingerprint=tokenizer.fingerprint)
    Scribe(tokenizer, text=text).finish(made)
    return made[0]


def test_inspect_shows_what_an_agent_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = make_tokenizer()
    decoder.save_pretrained(tmp_path / "model")
    rollout = made_of(conversation(decoder), RunTokenizer("f1", str(tmp_path / "model"), decoder))
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
    rollout = made_of(conversation(decoder), RunTokenizer("f1", "hub/model", decoder), text=False)
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
    scribe = Scribe(RunTokenizer("f1", decoder=Broken(99, error)), text=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = recorded_of(rows)
            scribe.write(made)
    assert [message for message in caplog.messages if "u1_1_0 is recorded without text" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert scribe.without_text == 2
    assert [len(rollout.messages) for rollout in made] == [4, 1, 4]


def test_a_tokenizer_is_not_used_by_two_threads() -> None:
    """Fast tokenizers are not thread-safe, so the scribe has its own."""
    used: list[object] = []

    class Noting(Broken):
        def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
            used.append(self)
            return super().batch_decode(ids, skip_special_tokens)

        def __deepcopy__(self, memo: Any) -> Noting:
            return Noting(self._bad, self._error)

    trainers = Noting(99, IndexError())
    assert len(made_of(conversation(make_tokenizer()), RunTokenizer("f1", decoder=trainers)).messages) == 4
    assert used
    assert trainers not in used


def test_text_is_what_the_tokenizer_makes_whichever_way_it_is_decoded() -> None:
    """Fast tokenizers decode without the GIL; subclasses that override decoding use their own."""

    class Loud(type(make_tokenizer())):  # type: ignore[misc]
        def _decode(self, *given: Any, **named: Any) -> str:
            return str(super()._decode(*given, **named)).upper()

    decoder, loud = make_tokenizer(), make_tokenizer()
    loud.__class__ = Loud
    row = conversation(decoder)
    texts = [
        [message["content"] for message in made_of(row, RunTokenizer("f1", decoder=tokenizer)).messages[1:]]
        for tokenizer in (decoder, loud)
    ]
    assert texts[0] == ["say 1", "<user>go on<eos><assistant>", "1"]
    assert texts[1] == [text.upper() for text in texts[0]]
    decoder.clean_up_tokenization_spaces = True
    assert made_of(row, RunTokenizer("f1", decoder=decoder)).messages[1]["content"] == "say 1"


def test_a_tokenizer_that_cannot_be_copied_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Single(Broken):
        def __deepcopy__(self, memo: Any) -> Single:
            raise TypeError("cannot pickle")

    rollout = made_of(conversation(make_tokenizer()), RunTokenizer("f1", decoder=Single(99, IndexError())))
    assert rollout.messages == [{"role": "user", "content": "task 17"}]
    assert "the tokenizer cannot be copied" in caplog.text


def test_names_of_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        name_or_path = "model"

    assert name_of(Named()) == "model"
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert name_of(Named()) == str(tmp_path / "model")
    assert name_of(object()) == ""


def bytes_of_a_rollout(folder: Path, prompt: int, response: int, rollouts: int = 32) -> float:
    rows = []
    for number in range(rollouts):
        row = fresh_row(f"{number:032x}", prompt=prompt, response=response, seed=number)
        rows.append(Row(row.key, row.tag, row.columns))
    made = recorded_of(rows, fingerprint="f" * 16)
    drawn = torch.Generator().manual_seed(0)
    for rollout in made:
        rollout.input_ids = torch.randint(0, 151_000, rollout.input_ids.shape, dtype=torch.int32, generator=drawn)
        for name in ("old_log_probs", "rollout_log_probs", "entropys"):
            setattr(rollout, name, -torch.rand(rollout.response_mask.shape, generator=drawn))
    Scribe(RunTokenizer("f" * 16, "/models/some-model-7b"), text=False).finish(made)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder) as buffer:
        buffer.add_trajectories(made)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / rollouts


def test_what_a_token_costs_on_disk(tmp_path: Path) -> None:
    """Checks the how-to's figures."""
    size = bytes_of_a_rollout(tmp_path / "a", 300, 700)
    assert bytes_of_a_rollout(tmp_path / "b", 1300, 700) - size == pytest.approx(3 * 1000, rel=0.02)
    assert bytes_of_a_rollout(tmp_path / "c", 300, 1700) - size == pytest.approx(15 * 1000, rel=0.02)
    assert size - 3 * 300 - 15 * 700 < 1300

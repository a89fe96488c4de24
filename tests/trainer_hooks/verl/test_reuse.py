"""After a crash, prompts are matched with the finished rollouts of the interrupted step."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from tensordict.tensorclass import NonTensorStack

from tests.trainer_hooks.verl.builders import fresh_row, new_prompts
from trainer_hooks.transfer_queue import Row
from trainer_hooks.verl.arrival import VerlRollouts
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.reading import RunTokenizer
from trainer_hooks.verl.reuse import REUSE_LOOP, Finished, Reuse
from trainer_hooks.verl.reused_loop import outputs_of
from trainer_hooks.verl.rows import REUSE
from trajstore import TrajectoryReplayBuffer
from trajstore._core.buffer.reader import Reader
from trajstore.errors import CorruptStoreError
from trajstore.trajectory import AnyTrajectory

STEP = 4
"""Step of the checkpoint."""


def sampled(uid: str, session: int, *, index: int = 0, weights: tuple[int, int] = (STEP, STEP), output: int = 0) -> Row:
    """Return a row with an extra field of its agent loop."""
    row = fresh_row(uid, session, index=index, seed=index, response=3 + session, output=output, weights=weights)
    extra = {**row.columns["extra_fields"], "own": 1, "seen": torch.arange(2, dtype=torch.int8)}
    routes = torch.arange(row.tag["seq_len"] * 4).reshape(-1, 2, 2).to(torch.int16)
    return Row(row.key, row.tag, {**row.columns, "routed_experts": routes, "extra_fields": extra})


def with_image(row: Row) -> Row:
    return Row(row.key, row.tag, {**row.columns, "multi_modal_inputs": {"pixel_values": torch.zeros(2)}})


def test_prompts_get_the_finished_rollouts_of_their_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def records(run: str, sampling: str = "options", tokenizer: str = "tokens") -> VerlRollouts:
        return VerlRollouts(OutcomeRule(), RunTokenizer(tokenizer), run, text=False, sampling=sampling)

    two = [sampled("u1", 0, index=1), sampled("u1", 0, index=1, output=1)]
    rows = [[sampled("u0", 0)], [sampled("u0", 2)], two, [sampled("u2", 0, index=2)]]
    finished = [rollout for put in rows for rollout, _ in records("run-a").rollouts(put)]
    others = [
        *records("run-b").rollouts([sampled("u3", 0, index=3)]),
        *records("run-a", "other").rollouts([sampled("u4", 0, index=3)]),
        *records("run-a", tokenizer="edited").rollouts([sampled("u8", 0, index=3)]),
        *records("run-a").rollouts([sampled("u5", 0, index=3, weights=(STEP, STEP + 1))]),
        *records("run-a").rollouts([sampled("u6", 0, index=3, weights=(STEP + 1, STEP + 1))]),
        *records("run-a").rollouts([with_image(sampled("u7", 0, index=3))]),
    ]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, trajectory_format="pt") as buffer:
        ids = buffer.add_trajectories([*finished, *(rollout for rollout, _ in others)])

    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        reuse = Reuse("options", "usual", "tokens")
        reuse.find(reader, STEP, {"run-a"})
        with caplog.at_level(logging.INFO):
            named = reuse.named(new_prompts(3, 0, 1, 0), STEP + 1)
        assert list(named["uid"]) == ["new0", "u0", "u1", "new3"], "a group has one prompt"
        message = caplog.messages[-1]
        assert message.startswith("step 5: 3 finished rollouts of 2 prompts are in the store")
        for reason in (
            "1 with images",
            "newer weights",
            "another run",
            "other options",
            "1 sampled with other tokenizer or chat template",
            "several steps",
            "prompts that are not in the",
        ):
            assert reason in message

        offered = reuse.offered(named)
        assert list(offered["agent_name"]) == ["usual", REUSE_LOOP, REUSE_LOOP, "usual"]
        texts = [Finished.of_text(text) for text in list(offered[REUSE]) if text]
        assert texts == [Finished("usual", {0: ids[0], 2: ids[1]}), Finished("usual", {0: ids[2]})]
        again = new_prompts(2)
        assert reuse.offered(again) is again
        caplog.clear()
        assert list(reuse.named(new_prompts(2, content="changed"), STEP + 1)["uid"]) == ["new0"]
        assert "1 sampled with other prompt (sums:2)" in caplog.text, "a warning"
        reuse.find(reader, STEP, {"run-a"})
        for truth, kept in (("corrected", "new0"), ("1", "u2")):
            prompts = new_prompts(2)
            prompts["reward_model"] = NonTensorStack({"style": "rule", "ground_truth": truth})
            again_named = reuse.named(prompts, STEP + 1)
            assert list(again_named["uid"]) == [kept]
            reuse.offered(again_named)
        assert "1 sampled with other ground truth (sums:2)" in caplog.text
        assert list(reuse.named(again, STEP + 2)["uid"]) == ["new0"], "of a later step"

        changed = Reuse("corrected", "usual", "tokens")
        changed.find(reader, STEP, {"run-a"})
        caplog.clear()
        assert list(changed.named(new_prompts(0), STEP + 1)["uid"]) == ["new0"]
        assert [record.levelname for record in caplog.records] == ["WARNING"], "also if none is left to reuse"

        get = Reader.get

        def damaged(self: Reader, number: int) -> AnyTrajectory:
            if number == ids[0]:
                raise CorruptStoreError("shard_00000000.pt: is damaged")
            return get(self, number)

        with mock.patch.object(Reader, "get", damaged), caplog.at_level(logging.INFO):
            reuse.find(reader, STEP, {"run-a"})
            reuse.named(new_prompts(0), STEP + 1)
        assert f"rollout {ids[0]} is generated again, it cannot be read: shard_00000000.pt" in caplog.text
        assert "1 unreadable" in caplog.messages[-1]
        assert [group.sessions for group in reuse._offers.values()] == [{2: ids[1]}]

        # The agent loop's outputs are those of the first time, bit by bit.
        for put, number in zip(rows, ids, strict=False):
            outputs = outputs_of(reader.get(number))
            for row, output in zip(put, outputs, strict=True):
                columns = output.as_dict()
                assert columns["extra_fields"].pop(REUSE)
                seen = columns["extra_fields"].pop("seen")
                names = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "routed_experts")
                assert torch.equal(seen, row.columns["extra_fields"].pop("seen"))
                for name in names:
                    assert torch.equal(columns[name], row.columns[name]), name
                    assert columns[name].dtype == row.columns[name].dtype
                extra = {"turn_scores": [], "tool_rewards": [], **row.columns["extra_fields"]}
                assert columns["extra_fields"] == extra
        assert outputs_of(dataclasses.replace(reader.get(ids[0]), reward=None))[0].reward_score is None

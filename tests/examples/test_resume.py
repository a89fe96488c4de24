"""A resumed run equals the uninterrupted one; a run stopped anywhere leaves its pool files."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.grpo.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from examples.grpo.config import TrainerConfig
from examples.grpo.model import ModelConfig
from tests.examples.runs import HOUSEHOLD, SORT, Train
from tests.replay.conftest import view
from tests.support.ledgers import first_unlike
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreNotFoundError
from trajstore.ledger import audit, read
from trajstore.operations.training import audit_path


@pytest.mark.parametrize(
    ("config", "where"),
    [pytest.param(SORT, "memory", marks=pytest.mark.campaign), (HOUSEHOLD, "pool"), (SORT, "rollouts")],
    ids=["sort-memory", "household-disk", "sort-rollouts"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    make: Train, tmp_path: Path, config: TrainerConfig, where: str
) -> None:
    """Also if the first run continued after the checkpoint, so that its store has later data."""
    options = {"experience_rbound": None, "offpolicy_trajectories_per_task": 2, "exp_select_mode": "random"}
    on_disk, folders = where == "pool", [tmp_path / name for name in ("whole", "parts")]
    places = [{"store": {"path": str(folder)}} if on_disk else {} for folder in folders]
    configs = [replace(config, rollouts=str(folder) if where == "rollouts" else None) for folder in folders]
    whole, first = (make(one, **options, **place) for one, place in zip(configs, places, strict=True))
    whole.train()
    half = config.steps // 2
    first.train(until=half)
    saved = save_checkpoint(first, tmp_path / "checkpoints")
    assert ("trajectories" in torch.load(saved, weights_only=True)["replay"]) == (where == "memory")
    first.train(until=half + 2)
    first.close()

    second = make(configs[1], **options, **places[1])
    assert newest_checkpoint(tmp_path / "checkpoints") == saved
    replaces = pytest.warns(UserWarning, match=f"2 steps after step {half} will be replaced")
    with nullcontext() if where == "memory" else replaces:
        load_checkpoint(second, saved)
    assert second.step == half
    assert second.train() == whole.curve
    assert all(whole.model.state_dict()[name].equal(value) for name, value in second.model.state_dict().items())
    assert view(second.hook.manager) == view(whole.hook.manager)
    if on_disk:
        ledgers = [read(tmp_path / name / "ledger") for name in ("whole", "parts")]
        assert first_unlike(*ledgers) is None
        assert [audit(ledger).problems for ledger in ledgers] == [(), ()]
        for name in ("whole", "parts"):
            [of_store] = audit_path(tmp_path / name).values()
            assert (of_store.problems, of_store.untrained) == ((), 0)
        assert [ledger.replaced for ledger in ledgers] == [(), (half + 1, half + 2)]
        newest = ledgers[0].steps[config.steps]
        assert [len(newest.rows), newest.loss["pg_loss"]] == [24, whole.curve[-1].loss]
        assert int(newest.rows["replayed"].sum()) == whole.metrics["experience_replay/replayed_rows"] > 0
    if where == "rollouts":
        for trainer, folder, again in ((whole, folders[0], 0), (second, folders[1], 2)):
            chosen = {entry.trajectory_id for entry in trainer.hook.manager._state.all_entries()}
            trainer.close()
            with TrajectoryReplayBuffer.open(folder) as reader:
                recorded = [reader.get(number) for number in reader.trajectory_ids.tolist()]
                assert chosen <= set(reader.trajectory_ids.tolist())
            ledger = read(folder / "ledger")
            fresh = sum(int((step.rows["replayed"] == 0).sum()) for step in ledger.steps.values())
            repeated = [one for one in recorded if half < one.policy_version <= half + again]  # type: ignore[union-attr]
            assert len(recorded) == fresh + len(repeated) // 2, "each rollout once; those of repeated steps twice"
            assert audit(ledger).problems == ()
    replayed = "experience_replay/replayed_rows"
    assert second.metrics[replayed] == whole.metrics[replayed]


def test_checkpoints_of_another_run_and_damaged_ones_are_refused(make: Train, tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    trainer = make(SORT)
    path = save_checkpoint(trainer, tmp_path)
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        load_checkpoint(make(HOUSEHOLD), path)
    with pytest.raises(ConfigurationError, match="another size of model"):
        load_checkpoint(make(replace(SORT, warm_start_steps=0, model=ModelConfig(16, 1, 2))), path)
    with pytest.raises(StoreNotFoundError, match="step_9"):
        load_checkpoint(trainer, tmp_path / "step_9.pt")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CorruptStoreError, match=path.name):
        load_checkpoint(trainer, path)
    torch.save({"version": 1, "model": {}}, path)
    with pytest.raises(CorruptStoreError, match="lacks tokenizer_fingerprint, optimizer"):
        load_checkpoint(trainer, path)
    torch.save({"version": 99}, path)
    with pytest.raises(CorruptStoreError, match="version 99"):
        load_checkpoint(trainer, path)

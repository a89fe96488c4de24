"""A pool whose file a disk changed under a training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import transfer_queue as tq

from tests.trainer_hooks.verl.plane import sessions as plane
from tests.trainer_hooks.verl.plane.sessions import TASKS, MakeSession, N, rollouts
from trainer_hooks.verl.histories import TRAINING
from trainer_hooks.verl.loss import EXP_MASK
from trajstore import TrajectoryReplayBuffer


@pytest.mark.parametrize("resumed", [False, True])
def test_one_damaged_history_costs_one_and_the_step_goes_on(
    resumed: bool, make_session: MakeSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = tmp_path / "pool"
    options = {"store": {"path": str(pool)}, "offpolicy_trajectories_per_task": 2}
    session = make_session(**options)
    plane.fill(session)
    session._hook.flush()
    with TrajectoryReplayBuffer.open(pool) as reader:
        held = [one for one in map(reader.get, map(int, reader.trajectory_ids)) if one.task_id == TASKS[1]]
    needle = f'"rollout_id":"{held[0].rollout_id}"'.encode()
    files = [one for one in sorted(pool.glob("shards/*.pt")) if needle in one.read_bytes()]
    at = files[0].read_bytes().index(needle)
    if resumed:
        session.close()
    content = bytearray(files[0].read_bytes())
    content[at] ^= 8  # the document is no JSON then
    files[0].write_bytes(content)
    if resumed:
        session = make_session(**options)

    histories = plane.planned(session)
    assert {task: len(one) for task, one in histories.items()} == {task: 2 - (task == TASKS[1]) for task in TASKS}
    uids = {f"second{index}": histories[task] for index, task in enumerate(TASKS)}
    joining = session.expect(uids)
    rows = [row for index, uid in enumerate(uids) for row in rollouts(uid, N - joining[uid], index)]
    joined = session.join(plane.put(rows))
    assert plane.sessions(joined) == Counter(dict.fromkeys(uids, N)), "a fresh rollout stands where the history was"
    plane.rate(joined)
    figures = session.scored(joined, 2)
    assert figures["experience_replay/unreadable"] == 1.0
    assert (
        figures["experience_replay/replayed_rows"]
        == 7.0
        == sum(mask.any() for mask in plane.column(joined, EXP_MASK).values())
    )
    assert "cannot be read" in caplog.text
    tq.kv_clear(keys=joined.keys, partition_id=TRAINING)

"""The page over a handle whose stores are actors of a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.witness import witness
from tests.view.rollouts import clicked, opened, rollout, text_of
from tests.view.test_page import ROWS
from tools.browser import Page
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError
from trajstore.view import serving

ray = pytest.importorskip("ray")

from trajstore.distributed import DistributedReplayBuffer  # noqa: E402


@pytest.fixture
def handle(small_ray: None, tmp_path: Path) -> Iterator[DistributedReplayBuffer]:
    with DistributedReplayBuffer.create(
        "seen", tmp_path / "run", stores=2, actor_options={"num_cpus": 0.1}, deadline=600.0, patience=600.0
    ) as found:
        yield found
        found.stop()


def test_a_handle_shows_the_rollouts_of_all_stores(handle: DistributedReplayBuffer, page: Page) -> None:
    block = witness(7)
    assert block.rewards is not None
    steps, batch = block.rewards.shape[:2]
    receipts = [handle.add_trajectories([rollout(number)]) for number in range(16)]
    ids = [number for receipt in receipts for number in receipt.committed(120)]
    (of_block,) = handle.add_trajectories([block]).committed(120)
    with serving(handle, port=0) as address:
        opened(page, f"{address}#/overview", "document.querySelector('.figures dd')?.textContent === '17'")
        assert "handle of stores" in text_of(page, ".lacking")
        assert text_of(page, "#path") == "stores 'seen' of Ray"
        opened(page, f"{address}#/table?where=outcome%20%3E%200&order=trajectory_id", f"{ROWS}.length === 8")
        assert page.run(f"return {ROWS}") == sorted((str(ids[number]) for number in range(1, 16, 2)), key=int)
        page.open(f"{address}#/trajectory/{ids[5]}")
        page.until("document.querySelectorAll('.token').length === 24 && document.querySelector('.facts .outcome')")
        page.until("document.querySelector('.late .note')?.textContent.includes('run `trajstore view`')")
        clicked(page, ".facts a", "document.querySelectorAll('.sibling .message').length === 4")
        page.open(f"{address}#/trajectory/{of_block}?environment={batch - 1}&step={steps - 1}")
        page.until("document.querySelector('[data-curve=rewards] canvas')")
        page.expected_errors.append("willReadFrequently")  # this test looks at pixels
        color = ",".join(str(value) for value in block.curr_obs["image"][steps - 1, batch - 1, 1, 2].tolist())
        pixel = "document.querySelector('.large').getContext('2d').getImageData(2, 1, 1, 1).data"
        page.until(f"[...{pixel}].slice(0, 3).join() === arguments[0]", color)
        opened(page, f"{address}#/table", f"{ROWS}.length === 17")
        (new,) = handle.add_trajectories([rollout(16)]).committed(120)
        page.until(f"{ROWS}.includes('{new}')")  # appears without a reload
        page.expected_errors.append("status of 404")
        page.run("location.hash = '#/trajectory/999'")  # belongs to a nonexistent store
        page.until("document.querySelector('main .trouble')?.textContent.includes('does not exist')")
        ray.kill(ray.get_actor(f"seen/rank_{new % 1024}", namespace="trajstore"))  # like a lost node
        page.until("document.querySelector('#trouble').textContent.includes(arguments[0])", f"from rank_{new % 1024}")
        page.run("location.hash = '#/table'")
        page.until(f"{ROWS}.length > 0 && {ROWS}.every(id => id % 1024 !== {new % 1024})")  # those of the other store
    handle.refresh()  # still usable by its owner


def test_what_is_no_handle_is_refused() -> None:
    asking = pytest.raises(ConfigurationError, match=r"handle: .*TrajectoryReplayBuffer")
    with asking, serving(TrajectoryReplayBuffer(), port=0):  # type: ignore[arg-type]
        pass

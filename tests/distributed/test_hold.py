"""A store that is held while all stores of a run are saved: who waits, who is let through, who is told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trajstore import TrajectoryReplayBuffer
from trajstore.distributed.hold import Hold
from trajstore.distributed.server import StoreServer
from trajstore.errors import ConfigurationError, StoreWriteError


def test_changes_wait_until_they_are_let_through() -> None:
    hold, done = Hold(), threading.Event()

    def change() -> None:
        with hold.changing():
            done.set()

    hold.begin("a", 600.0)
    hold.begin("a", 600.0)  # a caller that got no answer asks again
    thread = threading.Thread(target=change)
    thread.start()
    with hold.keeping("a"):
        assert not done.is_set()
    hold.end("b")  # not its own
    assert not done.is_set()
    hold.end("a")
    thread.join()
    assert done.is_set()


def test_a_holder_that_says_nothing_more_is_forgotten() -> None:
    hold = Hold()
    hold.begin("a", 0.05)
    with hold.changing():  # after that time
        pass
    with pytest.raises(StoreWriteError, match="let go before it was saved"), hold.keeping("a"):
        pass
    hold.begin("a", 0.05)
    hold.begin("b", 600.0)  # waits for it
    with pytest.raises(StoreWriteError, match="let go before it was saved"), hold.keeping("a"):
        pass
    with pytest.raises(StoreWriteError, match="another handle"):
        hold.begin("c", 0.01)
    hold.end("b")
    with hold.changing(), pytest.raises(StoreWriteError, match="has not ended"):
        hold.begin("d", 0.01)
    with hold.changing():
        pass


def test_what_is_held_is_saved_and_nothing_else(tmp_path: Path) -> None:
    store = StoreServer(str(tmp_path / "run"), 0, {}, ("host", "node", "first"))
    for save in (
        lambda: store.save_point("a", 1, {}, 1),
        lambda: store.prepare_checkpoint("a", str(tmp_path / "saved")),
        lambda: store.pin("a", "name"),
        lambda: store.rollback("a", 1, True),
    ):
        with pytest.raises(StoreWriteError, match="let go before it was saved"):
            save()
    store.hold("a", 600.0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rank_0").mkdir()
    (tmp_path / "other" / "rank_0" / "text").write_text("of somebody")
    with pytest.raises(ConfigurationError, match="holds other files"):
        store.prepare_checkpoint("a", str(tmp_path / "other"))
    link = tmp_path / "link"
    (tmp_path / "far").mkdir()
    link.symlink_to(tmp_path / "far")
    for _ in range(2):  # a second one takes the place of the first
        for target in (tmp_path / "saved", link):
            store.prepare_checkpoint("a", str(target))
            store.prepare_checkpoint("a", str(target))
            store.publish_checkpoint("a", str(target))
            store.publish_checkpoint("a", str(target))
    store.release("a")
    store.close()
    for folder in (tmp_path / "saved", tmp_path / "far"):
        assert [path.name for path in folder.iterdir()] == ["rank_0"]
        with TrajectoryReplayBuffer.open(folder) as reader:
            assert len(reader) == 0

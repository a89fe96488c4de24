"""Loaders that mix several buffers, against plain draws from each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.feeding.test_loader import block, reader, rewards, waits_for
from tests.stores import in_memory, stored
from tests.support.ledgers import first_unlike
from trajstore import TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, StoreClosedError
from trajstore.ledger import Ledger, read
from trajstore.loader import ReplayLoader, Share
from trajstore.samplers import EpochSampler

KEYS = {"online": range(7), "demos": range(100, 103), "old": range(200, 205)}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return {name: stored(folder / name, [block(key) for key in keys]) for name, keys in KEYS.items()}


@settings(max_examples=8, deadline=None)
@given(
    st.permutations([(1.0,), (1.0, 3), (2, 1.5, 0.7), (0.2, 2.0), (3, 4, 1.0)]).map(lambda some: [*some[0]]),
    st.integers(8, 30),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_a_mixed_batch_has_the_draws_of_its_buffers(
    stores: dict[str, Path], parts: list[float], size: int, ranks: int, reuse: bool, data: st.DataObject
) -> None:
    """Integers are counts, floats weights; any number of ranks, and a resume after any batch."""
    counts = [part for part in parts if isinstance(part, int)]
    weights = sum(part for part in parts if isinstance(part, float))
    rest = size - sum(counts)
    exact = [part if isinstance(part, int) else max(rest, 0) * part / weights for part in parts]
    names = list(KEYS)[: len(parts)]

    def loader(rank: int) -> ReplayLoader:
        shares = {
            name: Share(reader(stores[name]), **{"count" if isinstance(part, int) else "weight": part})  # type: ignore[arg-type]
            for name, part in zip(names, parts, strict=True)
        }
        return ReplayLoader(shares, size, rank=(rank, ranks), reuse=reuse, prefetch=2)

    try:
        loader(0)
    except ConfigurationError:
        assert rest < 0 or (rest and not weights) or min(exact) < 1
        return
    stop, many = data.draw(st.integers(0, 4)), range(ranks)
    batches: list[list[Any]] = [[] for _ in range(5)]
    state = None
    for begin, end in ((0, stop), (stop, 5)):
        loaders = [loader(rank) for rank in many]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
            for number in range(begin, end):
                batch = next(each)
                batches[number].append((rewards(batch), batch.sources.tolist()))
        state = loaders[-1].state_dict() if end == stop else None
        for each in loaders:
            each.close()
    plain = {name: reader(stores[name]) for name in names}
    for number, by_rank in enumerate(batches):
        mixed = [[row for rows, of in by_rank for row, source in zip(rows, of, strict=True) if source == place]
                 for place in range(len(names))]  # fmt: skip
        got = [len(rows) for rows in mixed]
        for place in range(len(names)):
            shares = [of.count(place) for _, of in by_rank]
            assert max(shares) - min(shares) <= 1, "even parts"
        assert sum(got) == size
        assert all(abs(count - wanted) < 1 for count, wanted in zip(got, exact, strict=True))
        assert {len(rows) for rows, _ in by_rank} <= {size // ranks, -(-size // ranks)}
        expected = [rewards(plain[name].sample(count)) for name, count in zip(names, got, strict=True)]
        assert mixed == expected, number


def test_a_store_that_has_too_few_rows_or_none_is_named(caplog: pytest.LogCaptureFixture) -> None:
    online, empty = in_memory([block(key) for key in range(4)]), TrajectoryReplayBuffer(seed=0)
    shares = {"online": Share(online, count=6), "demos": Share(empty, count=2, sampler=EpochSampler(epochs=1))}
    with ReplayLoader(shares, 8) as loader:
        waits_for(loader, "demos has 0 of 1 trajectory")
        empty.add_trajectories([block(100)])
        assert len([rewards(batch) for batch in loader]) == 4  # 8 rows of demos: the end of its epoch ends all
    assert "demos" not in caplog.text
    with pytest.raises(ConfigurationError, match="rank's part has no rows of demos"):
        ReplayLoader({"online": Share(online), "demos": Share(empty, count=1)}, 8, rank=(1, 8), stores="per_rank")
    with pytest.raises(ConfigurationError, match=r"where: has no effect.*Share"):
        ReplayLoader(shares, 8, where="task = 'a'")
    with pytest.raises(ConfigurationError, match="count: 3, 4 rows do not add up to 8"):
        ReplayLoader({"online": Share(online, count=3), "demos": Share(empty, count=4)}, 8)
    with pytest.raises(ConfigurationError, match=r"demos: .*weight, 0\.1.* batch of 4"):
        ReplayLoader({"online": Share(online, weight=2), "demos": Share(empty, weight=0.1)}, 4)
    huge = {"online": Share(online, weight=1.5e308), "demos": Share(online, weight=0.5e308)}
    with ReplayLoader(huge, 8) as loader:
        assert next(loader).sources.tolist() == [0] * 6 + [1] * 2
    with pytest.raises(ConfigurationError, match="demos: has a weight and a count"):
        ReplayLoader({"demos": Share(online, weight=1, count=2)}, 8)


def test_each_buffer_has_the_rows_of_its_ledger(stores: dict[str, Path], tmp_path: Path) -> None:
    """Killed after the records of one buffer and before those of the other, and resumed."""

    def run(folder: Path, state: Any, batches: int, lost: bool = False) -> tuple[Any, list[Any]]:
        ledgers = {name: Ledger(folder / name) for name in ("online", "demos")}
        shares = {name: Share(reader(stores[name]), ledger=ledger) for name, ledger in ledgers.items()}
        with ReplayLoader(shares, 10) as loader:
            if state is not None:
                loader.load_state_dict(state)
            drawn = [{name: part.ids.tolist() for name, part in next(loader).parts.items()} for _ in range(batches)]
            state = loader.state_dict()
            if lost:
                ledgers["demos"].close()
                with pytest.raises(StoreClosedError, match=r"called after close\(\)"):
                    next(loader)
        for ledger in ledgers.values():
            ledger.close()
        return state, drawn

    _, drawn = run(tmp_path / "whole", None, 6)
    state, _ = run(tmp_path / "killed", None, 2, lost=True)
    with pytest.warns(UserWarning, match="1 step after step 2 will be replaced"):
        run(tmp_path / "killed", state, 4)
    for name in ("online", "demos"):
        whole = read(tmp_path / "whole" / name)
        assert [step.rows["trajectory"].tolist() for step in whole.steps.values()] == [ids[name] for ids in drawn]
        assert first_unlike(whole, read(tmp_path / "killed" / name)) is None

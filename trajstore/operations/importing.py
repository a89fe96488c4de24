"""Make a store of exported rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from trajstore.core.base.arguments import one_of
from trajstore.core.buffer.annotating import annotate
from trajstore.core.buffer.replay_buffer import TrajectoryReplayBuffer
from trajstore.core.columns.portions import portions
from trajstore.core.files.opening import local_target
from trajstore.core.formats import FORMATS
from trajstore.errors import ConfigurationError, InvalidTrajectoryError, StoreNotFoundError, written
from trajstore.operations.export import appearing
from trajstore.operations.rollout_rows import Imported, Row, from_parquet, rollout_of
from trajstore.query.engine import polars

_TOGETHER = 256
"""Rollouts per commit."""


def import_rollouts(source: str | Path, target: str | Path, trajectory_format: str = "pt") -> int:
    """Make a store of the rollouts of an export; return their number.

    Rollouts have their dtypes and latest late values again. Ids, UUIDs, commit times, and authors and former values of
    late values are not in an export. The store appears once complete.

    Args:
        source: file of JSON lines or Parquet, or a folder of Parquet files.
        target: folder; must not exist.
        trajectory_format: format of the shards.

    Raises:
        StoreNotFoundError: there is no such file or folder, or it is empty.
        ConfigurationError: the target exists or is a URL, or a row is none of an export; names row and field.
        MissingDependencyError: Polars is not installed (extra ``query``), for Parquet.
        StoreWriteError: the target cannot be written.
    """
    one_of("trajectory_format", trajectory_format, list(FORMATS))
    source, target = Path(source), local_target("import", target)
    if target.is_symlink() or target.exists():
        raise ConfigurationError(f"import: {target} exists already; name another target, or delete it")
    if not source.exists():
        raise StoreNotFoundError(f"{source}: no such file or folder")
    done = 0
    with (
        written(f": the import {target} was not written"),
        appearing(target) as folder,
        TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=folder / target.name, trajectory_format=trajectory_format
        ) as writer,
    ):
        rollouts = (rollout_of(row, place) for place, row in _rows(source))
        for portion, _ in portions(rollouts, 1 << 62, lambda _: 1, most=_TOGETHER):
            _add(writer, portion, f"{source}: rollout {done}")
            done += len(portion)
        if not done:
            raise StoreNotFoundError(f"{source}: has no rollouts")
    return done


def _rows(source: Path) -> Iterator[tuple[str, Row]]:
    """Yield the place and the fields of each rollout."""
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    for file in files:
        if source.is_dir() or file.suffix == ".parquet":
            pl = polars()
            try:
                table = pl.read_parquet(file)
            except pl.exceptions.PolarsError as error:
                raise ConfigurationError(f"{file}: is not a Parquet file: {error}") from error
            for number, row in enumerate(table.iter_rows(named=True)):
                yield f"{file}: row {number}", from_parquet(row)
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                place = f"{file}: line {number}"
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ConfigurationError(f"{place}: is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ConfigurationError(f"{place}: is not a JSON object")
                yield place, row


def _add(writer: TrajectoryReplayBuffer, rollouts: Sequence[Imported], place: str) -> None:
    try:
        ids = writer.add_trajectories([item.rollout for item in rollouts])
    except InvalidTrajectoryError as error:
        raise ConfigurationError(f"{place} and the following: {error}") from error
    names = dict.fromkeys(name for item in rollouts for name in (*item.late, *item.rows))
    for name in names:
        for values in ("late", "rows"):
            having = [at for at, item in enumerate(rollouts) if name in getattr(item, values)]
            if having:
                given = [getattr(rollouts[at], values)[name] for at in having]
                annotate(writer, [ids[at] for at in having], {name: given})

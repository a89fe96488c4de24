"""Reading trajectories: a store, a checkpoint, a run of ranks, or the contents of a buffer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, overload

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import (
    check_instance,
    check_kind,
    columns_or_none,
    one_of,
    path_or_url,
    rank_of_ranks,
    text,
    transitions,
    truth,
    whole,
    whole_or_none,
)
from trajstore._core.base.closing import Closing
from trajstore._core.buffer.checkpoint import CheckpointState, Layout, check_target, save_checkpoint
from trajstore._core.buffer.loading import Loaded, LoadRequest
from trajstore._core.buffer.retention import Retention
from trajstore._core.buffer.sampling import Batch, Sampling, check_sampler, check_unit
from trajstore._core.buffer.view import View
from trajstore._core.columns.fields import nest
from trajstore._core.columns.limits import shown
from trajstore._core.files.opening import check_options, directories_above, open_directory
from trajstore._core.formats import get_format
from trajstore._core.reading.contents import Contents
from trajstore._core.reading.plan import RowPlan
from trajstore._core.reading.read_snapshot import ReadSnapshot
from trajstore._core.reading.sources import StoreSource
from trajstore._core.sampling.base import Drawn, Ids, Sampler, Unit
from trajstore._core.sampling.draws import Draws, Window
from trajstore._core.sampling.selection import Selection, selected
from trajstore._core.sampling.weighted import WeightedSampler
from trajstore._core.sessions.sessions import warn_of_open
from trajstore._core.store.run_ids import id_from
from trajstore.errors import ConfigurationError, StoreNotFoundError, listed
from trajstore.trajectory import AnyTrajectory

if TYPE_CHECKING:
    from trajstore.query import Query


class Reader(Closing):
    """Trajectories that can be drawn, read and queried. ``TrajectoryReplayBuffer.open(path)`` returns one.

    Args:
        live: the trajectories shown; for other packages of trajstore.
        draws: the generator.
        sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
        storage_options: passed on to the fsspec file system.
    """

    def __init__(self, live: View, draws: Draws, sample_window_size: int, storage_options: Mapping[str, Any]) -> None:
        self._live = live
        self._sampling = Sampling(live, draws)
        self._uniform: dict[Any, Selection] = {}
        self.sample_window_size = sample_window_size
        self._trajectory_format = "pt"
        self._left_out = 0
        self._draws = draws
        self._format = get_format(self._trajectory_format)
        self._storage_options = storage_options
        self._counter = 0

    @staticmethod
    def open(
        path: str | Path,
        *,
        pin: str | None = None,
        share: tuple[int, int] | None = None,
        strict: bool | None = None,
        seed: int | None = None,
        sample_window_size: int = 0,
        verify_shards: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Reader:
        """Open a path for reading, also while another process writes there.

        A store, a checkpoint, a directory of RLinf, or a run with one folder per rank. Where a writer has begun, a
        lease is written into ``readers/``; elsewhere nothing. The reader shows the
        trajectories of this moment; :meth:`refresh` shows later commits.

        Args:
            path: directory or URL.
            pin: name of a pin, whose trajectories are shown instead of the newest ones.
            share: (rank, number of ranks): show only this rank's contiguous share.
            strict: as for ``TrajectoryReplayBuffer.load_checkpoint``.
            seed: of the generator. None: the seed of the store, and of a checkpoint also the state of
                its generator. With another number of ranks than at saving: the store's seed and the rank.
            sample_window_size: samples are drawn from this many newest trajectories; 0 = from all.
            verify_shards: compare the checksums of each shard when it is read for the first time.
            storage_options: passed on to the fsspec file system.

        Raises:
            StoreNotFoundError: there is nothing to read; describes the path.
            IncompleteCheckpointError, CorruptStoreError, UnsafeContentError, UnsupportedVersionError: as for
                ``load_checkpoint``.
        """
        share = None if share is None else rank_of_ranks("share", share)
        strict = None if strict is None else truth("strict", strict)
        pin = None if pin is None else text("pin", pin)
        check_kind("storage_options", storage_options, Mapping, "a dict")
        options = dict(storage_options or {})
        check_options(path_or_url("path", path), options)
        seed = whole_or_none("seed", seed, -(1 << 63), (1 << 64) - 1)
        window, verify = whole("sample_window_size", sample_window_size, 0), truth("verify_shards", verify_shards)
        request = LoadRequest(open_directory(path, **options), share, strict, pin)
        return load_reader(request, seed, window, verify_shards=verify, storage_options=options)

    @property
    def sample_window_size(self) -> int:
        """Samples are drawn from this many newest trajectories; 0 = from all."""
        return self._sample_window_size

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        self._sample_window_size = whole("sample_window_size", value, 0)

    # -- sampling ---------------------------------------------------------------------------------

    @overload
    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler,
        where: str | None = None,
        ids: Ids | None = None,
    ) -> Batch: ...
    @overload
    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler | None = None,
        where: str | None = None,
        ids: Ids | None = None,
    ) -> dict[str, Any]: ...
    def sample(
        self,
        num_chunks: int = 0,
        *,
        columns: Sequence[str] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        sampler: Sampler | None = None,
        where: str | None = None,
        ids: Ids | None = None,
    ) -> dict[str, Any]:
        """Draw transitions from the window of the newest trajectories, uniformly with replacement or by a sampler.

        Args:
            num_chunks: number of transitions, at least 1. Without a sampler it is cut to the size of the window, as in
                RLinf's buffer, with a warning once; a sampler that draws with replacement
                (:class:`~trajstore.samplers.WeightedSampler`) always returns this many.
            columns: dotted names of the columns wanted, or of dicts of them (``curr_obs``); None = all. Texts, and
                values without a row for each step, are in no batch: :meth:`get` returns them.
            out: tensors to fill, by dotted name; ``[>= num_chunks, ...]``, of the column's dtype.
            sampler: chooses the transitions; pass the same object each time, since it tracks additions and evictions.
            where: draw only trajectories that match this condition on facts, as for ``query().where``; evaluated before
                each draw, so that new trajectories that match join and those that match no longer leave. Draws are then
                with replacement, and not cut to the window.
            ids: draw only these trajectories.

        Returns:
            A nested dict of tensors ``[num_chunks, ...]`` with keys and dtypes as they were added. With a sampler it
            is a :class:`trajstore.loader.Batch`, which also has the rows drawn and their weights.

        Raises:
            ConfigurationError: an argument is out of range; names it.
            EmptyBufferError: there is nothing to sample from.
            SchemaMismatchError: a column is absent; trajectories of the window differ in theirs, or are agent ones,
                which :meth:`sample_trajectories` draws whole.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        num_chunks, columns = transitions(num_chunks), columns_or_none(columns)
        _check_out(out)
        if sampler is not None or where is not None or ids is not None:
            sampler = self._selected(sampler, where, ids)
        if sampler is not None:
            check_unit(sampler, "sample", "this sampler draws whole trajectories; call sample_trajectories with it")

            def choose(contents: Contents) -> tuple[Drawn, RowPlan]:
                drawn, positions = self._sampling.choose(contents, num_chunks, self.sample_window_size, sampler)
                rows = contents.rows_of(positions, drawn.samples)
                return drawn, contents.plan(positions, rows, contents.index.first, columns)

            drawn, plan = self._sampling.together(sampler, choose)
            return Batch(nest(plan.read(out)), drawn)

        def draw(contents: Contents) -> RowPlan:
            window = Window.newest(contents.index, self.sample_window_size, contents.unavailable, contents.start)
            samples = self._draws.samples(window, num_chunks)
            positions, places = contents.index.find_rows(samples, window.first, window.end)
            return contents.plan(positions, contents.rows_of(positions, places), window.first, columns)

        return nest(self._live.locked(draw).read(out))

    def _selected(
        self, sampler: Sampler | None, where: str | None, ids: Ids | None, unit: Unit = "sample"
    ) -> Sampler | None:
        """Return the sampler for draws with these arguments of :meth:`sample`; None for plain uniform draws.

        Raises:
            ConfigurationError: the sampler has drawn with other ones, or one is invalid.
        """
        return selected(sampler, where, ids, unit, self._uniform)

    def sample_trajectories(
        self, count: int, *, sampler: Sampler | None = None, where: str | None = None, ids: Ids | None = None
    ) -> list[AnyTrajectory]:
        """Draw whole trajectories uniformly, without repetition, from the window; all if ``count`` is larger.

        Args:
            count: how many, at least 1; with a :class:`~trajstore.samplers.GroupSampler` how many tasks.
            sampler: chooses instead; one that draws whole trajectories.
            where: draw only trajectories that match, see :meth:`sample`.
            ids: draw only these trajectories.

        Raises:
            EmptyBufferError: there is nothing to sample from.
            ConfigurationError: ``count`` is less than 1, or the sampler draws transitions.
        """
        count = whole("count", count, 1)
        sampler = self._selected(sampler, where, ids, "trajectory")
        if sampler is not None:
            check_unit(
                sampler, "trajectory", "this sampler draws transitions; make it with unit='trajectory', or call sample"
            )

        def draw(contents: Contents) -> list[AnyTrajectory]:
            if sampler is not None:
                _, positions = self._sampling.choose(contents, count, self.sample_window_size, sampler)
                return [contents.get(position) for position in positions.tolist()]
            window = Window.newest(contents.index, self.sample_window_size, contents.unavailable, contents.start)
            return [contents.get(position) for position in self._draws.trajectories(window, count)]

        return self._sampling.together(sampler, draw)

    def draw(
        self, num_chunks: int, *, sampler: Sampler | None = None, where: str | None = None, ids: Ids | None = None
    ) -> Drawn:
        """Choose rows as :meth:`sample` does, without reading them; :meth:`read` reads them, also in another process.

        Raises:
            ConfigurationError: an argument is out of range; names it.
            EmptyBufferError: there is nothing to sample from.
        """
        sampler = self._selected(sampler, where, ids)
        return self._sampling.draw(transitions(num_chunks), self.sample_window_size, sampler)

    def read(
        self, drawn: Drawn, *, columns: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return transitions that :meth:`draw` chose, as :meth:`sample` returns them.

        Raises:
            TrajectoryUnavailableError: one of their trajectories has been evicted since.
            SchemaMismatchError: their trajectories differ in their columns.
        """
        _check_drawn(drawn)
        _check_out(out)
        columns = columns_or_none(columns)
        return nest(self._live.locked(lambda contents: self._sampling.plan(contents, drawn, columns)).read(out))

    def _update(self, sampler: Sampler, where: str | None, ids: Ids | None) -> None:
        """See :meth:`Sampler.follow`."""
        check_sampler(sampler)
        follower = self._selected(sampler, where, ids, sampler.unit)
        self._sampling.together(
            follower, lambda contents: follower.apply() if isinstance(follower, Selection) else None
        )

    def update_priorities(self, sampler: WeightedSampler, drawn: Drawn, priorities: npt.ArrayLike) -> int:
        """Set new priorities for rows that a sampler drew; return how many of them have been evicted since.

        Args:
            sampler: the one that drew them.
            drawn: of the batch (``batch.drawn``).
            priorities: one per row, at least 0: usually the absolute TD error. A tensor may be on any device and
                require grad.

        Raises:
            ConfigurationError: the sampler has no priorities, or one is negative, not finite or so large that its power
                exceeds 1e100, or the rows were drawn from another buffer; nothing was changed.
        """
        check_instance("sampler", sampler, WeightedSampler, "the WeightedSampler that drew them")
        _check_drawn(drawn)

        def update(contents: Contents) -> int:
            names = self._sampling.names()
            if drawn.buffer is not None and drawn.buffer not in names:
                raise ConfigurationError(
                    f"drawn: its rows are of another buffer ({drawn.buffer}) than this one ({listed(names)}); update "
                    "the buffer that they were drawn from"
                )
            return sampler.update(drawn.ids, drawn.samples, priorities)

        return self._sampling.together(sampler, update)

    def get(self, trajectory_id: int | str) -> AnyTrajectory:
        """Return a copy of a trajectory, by id. Changes to it do not reach the store.

        Use :func:`trajstore.annotate` to store scores, corrections and tags.

        Args:
            trajectory_id: a number, or the text shown for it: ``"3/17"`` of a run's rank 3.

        Raises:
            TrajectoryUnavailableError: it does not exist, or has left memory.
            CorruptStoreError: a file is missing or damaged.
            UnsafeContentError: a pickle would run code; nothing of it was run.
        """
        number = id_from("trajectory_id", trajectory_id)
        return self._live.locked(lambda contents: contents.get(contents.index.position_of(number)))

    # -- looking ----------------------------------------------------------------------------------

    def query(self, relation: str = "trajectories") -> Query:
        """Query the trajectories: ``query().where("task = 't3' and outcome > 0").ids()``.

        The index holds the facts of rollouts.
        Messages, tokens and steps are read only from trajectories that match the conditions on facts.
        Needs Polars (extra ``query``).

        Args:
            relation: the kind of rows: ``"trajectories"``; messages or tokens of rollouts (``"messages"``,
                ``"tokens"``); steps of an environment of a block (``"steps"``); rows of optimizer steps in the training
                ledger (``"trained"``), the folder ``ledger`` of the store.

        Raises:
            ConfigurationError: there is no such relation.
        """
        return self._sampling.query(relation)

    @property
    def _closed(self) -> bool:
        """True after :meth:`close`: loaders stop yielding its batches."""
        return self._live.released

    @property
    def _grows(self) -> bool:
        """False if no more trajectories can come: after ``open(pin=...)``."""
        return self._live.request is None or self._live.request.pin is None

    @property
    def _share(self) -> tuple[int, int] | None:
        """(rank, number of ranks) if one rank's share of a directory is shown, else None."""
        return None if self._live.request is None else self._live.request.share

    @property
    def _store_ids(self) -> list[str]:
        """UUIDs of the stores that are shown."""
        return self._live.store_ids

    @property
    def _trajectory_counter(self) -> int:
        """One more than the newest id."""
        return self._counter

    @property
    def _uuids(self) -> npt.NDArray[np.void]:
        """UUIDs of all trajectories, in the order of :attr:`trajectory_ids`, 16 bytes each."""
        with self._live.contents.lock:
            return np.array(self._live.contents.index["uuid"])

    @property
    def seed(self) -> int | None:
        """Seed of the generator; that of the checkpoint after ``load_checkpoint``."""
        return self._draws.seed

    def __len__(self) -> int:
        return len(self._live.contents.index)

    @property
    def total_samples(self) -> int:
        """Number of valid samples, T·B summed over the trajectories."""
        with self._live.contents.lock:
            return self._live.contents.index.total_samples

    @property
    def trajectory_ids(self) -> npt.NDArray[np.int64]:
        """Ids of all trajectories, as an int64 array, in commit order, the oldest first.

        Those of a run directory are ordered by commit time over all ranks.
        """
        with self._live.contents.lock:
            return np.array(self._live.contents.index["trajectory_id"], np.int64)

    def is_ready(self, min_size: int) -> bool:
        """Return whether there are at least ``min_size`` trajectories."""
        return len(self) >= whole("min_size", min_size, 0)

    def get_stats(self) -> dict[str, float]:
        """Return flat numbers: trajectories, samples, cached trajectories and bytes, mapped shards, fetched rows.

        ``cache_size`` and ``cache_bytes`` are of the cache in memory, not of the local copies of an object store;
        ``fetched_bytes`` are of rows fetched from there with ``range_reads``, in ``fetched_ranges`` requests, for
        ``fetched_batches`` batches or trajectories. ``left_out`` counts the trajectories that the last load left out,
        because files are absent or damaged.
        """
        contents = self._live.contents
        with contents.lock:
            fetched_bytes, fetched_ranges, fetched_batches = contents.addresses.fetched
            return {
                "num_trajectories": len(self),
                "total_samples": contents.index.total_samples,
                "cache_size": 0 if contents.cache is None else len(contents.cache),
                "cache_bytes": 0 if contents.cache is None else contents.cache.nbytes,
                "mapped_shards": contents.addresses.mapped,
                "fetched_bytes": fetched_bytes,
                "fetched_ranges": fetched_ranges,
                "fetched_batches": fetched_batches,
                "left_out": self._left_out,
            }

    def clear_cache(self) -> None:
        """Empty the cache; trajectories that exist in memory only stay."""
        self._live.contents.clear_cache()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state for :meth:`load_state_dict`."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draws from :meth:`state_dict`.

        A state belongs to the generator alone: it fits any buffer, and names no trajectories.

        Raises:
            ConfigurationError: the state is malformed; nothing was changed.
        """
        self._draws.load_state_dict(state)

    def save_checkpoint(self, save_path: str | Path, *, layout: Layout = "trajstore") -> None:
        """Save the trajectories shown now to their own directory; trajectories may be added meanwhile.

        Files are hard-linked where the file system supports it, else copied; the directory appears atomically.
        Trajectories of a buffer in memory that have left it are not saved. Late values that another process has put
        into a store's inbox are saved by the buffer that writes the store, and by ``trajstore copy``.

        Args:
            save_path: directory or URL; absent, empty, or an earlier checkpoint, which is replaced.
            layout: ``"trajstore"``, or ``"rlinf"`` for a directory that RLinf reads.

        Raises:
            ConfigurationError: the directory is a store, lies within one, or holds other files; nothing was written.
            StoreWriteError: it could not be written; an earlier checkpoint is still there.
        """
        target = open_directory(path_or_url("save_path", save_path), **self._storage_options)
        one_of("layout", layout, get_args(Layout))
        check_target(target, directories_above(target, **self._storage_options))

        with self._live.steady, self._keeping_files():
            state, snapshot = self._live.locked(lambda contents: (self._state(), contents.snapshot()))
            save_checkpoint(target, snapshot, state, self._format, layout)
            for source in self._live.contents.sources:
                if isinstance(source, StoreSource):
                    warn_of_open(source.directory.url, f"the checkpoint {target.url} lacks")

    def _snapshot(self) -> ReadSnapshot:
        return self._live.locked(lambda contents: contents.snapshot())

    def _state(self, trajectory_format: str | None = None) -> CheckpointState:
        """Return the buffer's own state, with another format if given."""
        draws, form = self._draws, trajectory_format or self._trajectory_format
        request = self._live.request
        ranks = None if request is None or request.share is None else request.share[1]
        return CheckpointState(form, self._trajectory_counter, draws.seed, draws.rng_state, ranks)

    def _keeping_files(self) -> AbstractContextManager[object]:
        """Keep the files to be linked or copied."""
        return nullcontext()

    # -- refreshing and loading -------------------------------------------------------------------

    def refresh(self) -> bool:
        """Show a live writer's new commits to the loaded directory; return whether there were any.

        They may change nothing visible: rewritten shards, or commits outside a pin.

        For a store or a run that is shown whole this takes time in proportion to the news, in a run at most with a copy
        of the index besides; maps and cache stay. Loaded again are a share, a pin, a store whose log has been merged
        into its index since, and a run in which that happened to a rank, a rank joined, or a trajectory was sent to two
        ranks.

        Raises:
            StoreNotFoundError: the directory or the pin is gone.
            CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; nothing changed.
            OSError: the same, or the writer cannot be notified that newer files are needed.
        """
        with self._live.steady:
            before = self._live.generations
            request = self._live.request_if_changed()
            if request is None:
                return False
            if not self._follow(request):
                self._show(request)
            return self._live.generations != before

    def _follow(self, request: LoadRequest) -> bool:
        """Show new commits without loading again; return False if that is impossible. ``View.steady`` is held."""
        next_id = self._live.follow()
        self._counter = self._counter if next_id is None else next_id
        return next_id is not None

    def _show(self, request: LoadRequest) -> Loaded:
        """Replace the contents by those for a request. ``View.steady`` is held."""
        contents, loaded = self._live.open(request)
        self._live.replace(request, contents, loaded)
        self._counter = loaded.counter
        return loaded

    def _load(self, request: LoadRequest) -> None:
        """Show the contents for a request; adopt its generator and format."""
        with self._live.steady:
            loaded = self._show(request)
        self._left_out = loaded.skipped
        self._take_up(loaded)

    def _take_up(self, loaded: Loaded) -> None:
        """Adopt the format and the generator of a load."""
        state = loaded.state
        if state.trajectory_format != self._trajectory_format:
            self._format = get_format(state.trajectory_format)
            self._trajectory_format = state.trajectory_format
        if loaded.new_rank is None:
            self._draws.take_up(state.seed, state.rng_state)
        else:
            self._draws.begin_for_rank(state.seed, *loaded.new_rank)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the reader's lease and stop loaders. Closing again does nothing.

        Trajectories can be sampled afterwards only as long as the writer keeps their files.
        """
        self._live.release()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Send the reader to another process, which opens the same path (made absolute).

        Its draws there differ from those here, see :class:`~trajstore._core.sampling.draws.Draws`.
        Unpickling raises StoreNotFoundError if another store is at the path by then.
        """
        options = self.sample_window_size, self._live.verify_shards, True, self._storage_options
        # As bytes: torch would send a tensor as an open file, and the number of open files is limited.
        state = pickle.dumps(self.state_dict())
        return unpickled, (partial(_unloaded, None, *options), self._live.request, self._live.store_ids, state)


def load_reader(
    request: LoadRequest,
    seed: int | None = None,
    sample_window_size: int = 0,
    *,
    verify_shards: bool = False,
    cache: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    """Return a reader of a request's directories.

    Args:
        request: what to load.
        seed: as for :meth:`Reader.open`.
        sample_window_size: as for :meth:`Reader.open`.
        verify_shards: as for :meth:`Reader.open`.
        cache: keep decoded trajectories in memory.
        storage_options: passed on to the fsspec file system.
    """
    reader = _unloaded(seed, sample_window_size, verify_shards, cache, dict(storage_options or {}))
    state = reader.state_dict()
    reader._load(request)
    if seed is not None:
        reader._draws.take_up(**state)
    return reader


def _unloaded(
    seed: int | None, sample_window_size: int, verify_shards: bool, cache: bool, storage_options: Mapping[str, Any]
) -> Reader:
    """Return an empty reader."""
    live = View((sample_window_size or None, None) if cache else None, Retention(), verify_shards)
    return Reader(live, Draws(seed), sample_window_size, storage_options)


def unpickled(
    make: Callable[[], Reader], request: LoadRequest | None, store_ids: Sequence[str], state: bytes
) -> Reader:
    """Return a reader or buffer with the contents that another process had loaded.

    Raises:
        StoreNotFoundError: another store is there now.
    """
    reader = make()
    if request is not None:
        reader._load(request)
        gone = set(store_ids) - set(reader._store_ids)
        if gone:
            raise StoreNotFoundError(
                f"{request.directory.url}: the pickled buffer reads the store {listed(sorted(gone))}, which is "
                f"no longer at this path; now there is {listed(sorted(reader._store_ids)) or 'no store'}"
            )
    reader._draws.take_up(**pickle.loads(state))
    reader._draws.copied()
    return reader


def _check_drawn(drawn: Drawn) -> None:
    check_instance("drawn", drawn, Drawn, "what draw() returned, or a batch's .drawn")
    for name, rows in (("ids", drawn.ids), ("samples", drawn.samples)):
        if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind != "i":
            raise ConfigurationError(
                f"drawn.{name}: {shown(rows)}, must be an array of whole numbers, one for each row"
            )
    if len(drawn.ids) != len(drawn.samples):
        raise ConfigurationError(f"drawn: {len(drawn.ids)} ids and {len(drawn.samples)} samples, must be as many")


def _check_out(out: Mapping[str, torch.Tensor] | None) -> None:
    check_kind("out", out, Mapping, "a dict of tensors by dotted name")

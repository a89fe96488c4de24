"""``LocalMaker``: experiences in a trajectory store, retrieved by BM25. Needs no service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from trainer_hooks.guidance.maker import NOTHING, Experience, MakerError, Retrieved
from trainer_hooks.guidance.summary import ExtractiveSummarizer, Summarizer, by_task
from trainer_hooks.replay import BufferStore
from trainer_hooks.retrieval import RetrievalIndex
from trajstore._core.base import locks
from trajstore._core.base.arguments import whole
from trajstore._core.base.closing import Closing
from trajstore.errors import InvalidTrajectoryError, StoreError, TrajectoryUnavailableError, counted, listed
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


def as_text(experiences: Sequence[Experience]) -> str:
    """Return experiences as text for the template, best first."""
    return "\n\n".join(
        f"Experience {number}:\n{experience.when_to_use}\n{experience.content}"
        for number, experience in enumerate(experiences, 1)
    )


class LocalMaker:
    """Experiences in a trajectory store, or in memory. Thread-safe.

    Each experience is one trajectory, named by its id. Existing experiences of the store are available at once.

    Args:
        store: where experiences are kept; in memory if ``None``. Other trajectories in it are ignored.
        summarizer: makes experiences of the rollouts of one task.
        present: formats retrieved experiences for the template.
    """

    def __init__(
        self,
        store: BufferStore | None = None,
        *,
        summarizer: Summarizer | None = None,
        present: Callable[[Sequence[Experience]], str] = as_text,
    ) -> None:
        self._store = BufferStore() if store is None else store
        self._summarizer: Summarizer = summarizer or ExtractiveSummarizer()
        self._present = present
        self._index = RetrievalIndex()
        self._digests: set[str] = set()
        self._adding = locks.lock("LocalMaker._adding")
        self._closed = False
        self._open()

    def __len__(self) -> int:
        return len(self._index)

    def get(self, name: str) -> Experience | None:
        """Return an experience by its name; ``None`` if it is not kept or cannot be read."""
        try:
            return Experience.of_trajectory(self._store.get(int(name)))
        except (TrajectoryUnavailableError, ValueError):
            return None
        except StoreError as error:  # one damaged trajectory does not hide the others
            logger.warning("experience %s cannot be read, and is left out: %s", name, error)
            return None

    def retrieve(self, query: str, k: int) -> Retrieved:
        """Return up to ``k`` experiences most related to a query; see :class:`ExperienceMaker`."""
        whole("k", k, 0)
        if self._closed:
            raise MakerError("closed", "the maker of experience was closed")
        hits = self._index.search(query, k)
        candidates = [(str(hit.key), self.get(str(hit.key))) for hit in hits]
        kept = [(name, experience) for name, experience in candidates if experience is not None]
        if not kept:
            return NOTHING
        return Retrieved(self._present([experience for _, experience in kept]), tuple(name for name, _ in kept))

    def summarize(self, rollouts: Sequence[AgentTrajectory]) -> int:
        """Make experiences of rollouts, task by task; return the number of new ones. See :class:`ExperienceMaker`.

        If some tasks fail, the experiences of the others are stored, then the error is raised.
        """
        made: list[Experience] = []
        problems: list[str] = []
        for held in by_task(rollouts):
            try:
                made += self._summarizer(held)
            except Exception as error:  # summarizers are user code, and may call a service
                problems.append(f"task {held[0].task_id!r}: {error!r}")
        new = self.add(made, step=max((rollout.policy_version or 0 for rollout in rollouts), default=0))
        if problems:
            raise MakerError("failed", f"{counted(len(problems), 'task')} without a summary: {listed(problems, 3)}")
        return new

    def add(self, experiences: Sequence[Experience], step: int | None = None) -> int:
        """Store experiences and return the number of new ones. Duplicates are skipped.

        Args:
            experiences: in the order of their arrival.
            step: training step at which they were made.

        Raises:
            MakerError: the store could not write, or refuses an experience; all others are stored.
        """
        problems: list[str] = []
        with self._adding:
            if self._closed:
                raise MakerError("closed", "the maker of experience was closed")
            ids: list[int] = []
            kept: list[Experience] = []
            for experience in experiences:
                if experience.digest in self._digests:
                    continue
                try:
                    ids += self._store.add_trajectories([experience.to_trajectory(step)])
                except (InvalidTrajectoryError, StoreError) as error:
                    problems.append(f"task {experience.task_id!r}: {error}")
                    continue
                self._digests.add(experience.digest)
                kept.append(experience)
            self._index.add(ids, [experience.index_text for experience in kept])
            try:
                self._store.flush()
            except StoreError as error:
                problems.append(str(error))
        if problems:
            raise MakerError("store", f"experiences were not stored: {listed(problems, 3)}")
        return len(kept)

    def close(self) -> None:
        """Refuse new calls, and close the summarizer if possible. The caller closes the store."""
        if isinstance(self._summarizer, Closing):
            self._summarizer.close()
        with self._adding:
            self._closed = True

    def _open(self) -> None:
        """Read the store's experiences. Unreadable ones are left out, with a warning."""
        keys, texts = [], []
        for number in self._store.ids():
            experience = self.get(str(number))
            if experience is not None and experience.digest not in self._digests:
                self._digests.add(experience.digest)
                keys.append(number)
                texts.append(experience.index_text)
        self._index.add(keys, texts)

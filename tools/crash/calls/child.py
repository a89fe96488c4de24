"""A process with several open sessions, each in a thread, that notes every call that was acknowledged."""

from __future__ import annotations

import random
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tools.crash.journal import Journal
from trajstore import Call, Reward, Session, Sessions, TrajectoryReplayBuffer

SESSIONS = 4
"""Open sessions of a process."""


def checksum(call: Call) -> int:
    """Return a number of the tokens and log-probs of a call."""
    log_probs = b"" if call.log_probs is None else call.log_probs.tobytes()
    return zlib.crc32(call.tokens.tobytes() + log_probs)


def work(folder: str, slot: int, begun: int, seed: int) -> None:
    """Record sessions until killed. Slot 0 writes the store.

    Args:
        folder: of the campaign.
        slot: of the process; its sessions are named by it.
        begun: number of processes that were in this slot before.
        seed: of the campaign.
    """
    import tools.crash.warm  # noqa: F401  # the fork server may lack it

    store = str(Path(folder) / "store")
    opener: Any
    if slot:
        opener = Sessions(store)
    else:
        opener = TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, sample_window_size=0)
    notes = Journal(Path(folder) / f"notes_{slot}_{begun:06d}")
    notes.note("begun")
    chance = random.Random(f"{seed}/{slot}/{begun}")
    threads = [
        threading.Thread(target=_record, args=(opener, notes, slot, lane, random.Random(chance.random()), folder))
        for lane in range(SESSIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _record(opener: Any, notes: Journal, slot: int, lane: int, chance: random.Random, folder: str) -> None:
    """Record one session after the other, the first of which may have been begun by a killed process."""
    mark = Path(folder) / f"at_{slot}_{lane}"
    number = int(mark.read_text()) if mark.exists() else 0
    while True:
        name = f"{slot}/{lane}/{number}"
        session: Session = opener.session("task", name)
        notes.note("opened", session=name, calls={call.id: checksum(call) for call in session.calls()})
        for _ in range(chance.randint(1, 20)):
            call = add_call(session, chance)
            notes.note("call", session=name, id=call.id, checksum=checksum(call))
        number += 1
        mark.with_suffix(".new").write_text(str(number))
        mark.with_suffix(".new").rename(mark)  # a session that is being finished is not opened again
        notes.note("finishing", session=name)
        session.finish(Reward(outcome=1.0))
        notes.note("finished", session=name)


def add_call(session: Session, chance: random.Random, longest: int = 200) -> Call:
    """Add a call that continues one of the last calls, or a history that was rewritten; return it.

    Args:
        session: to add to.
        chance: decides about tokens.
        longest: most new tokens of a prompt.
    """
    calls = session.calls()
    tokens = chance.choice(calls[-3:]).tokens if calls else np.zeros(0, np.int32)
    if len(tokens) and chance.random() < 0.2:  # a history that was rewritten
        tokens = tokens[: chance.randrange(len(tokens))]
    prompt = [*tokens.tolist(), *(chance.randrange(150_000) for _ in range(chance.randint(1, longest)))]
    sampled = [chance.randrange(150_000) for _ in range(chance.randint(0, longest // 2))]
    call_id = f"{len(calls)}-{chance.randrange(1 << 60):x}"
    return session.add_call(prompt, sampled, np.full(len(sampled), -0.5), call_id=call_id)

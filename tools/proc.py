"""What the kernel tells of processes."""

from __future__ import annotations

from pathlib import Path


def status(process: int | str, field: str) -> int:
    """Return a number of ``/proc/PROCESS/status``; of sizes the bytes.

    Raises:
        OSError: there is none.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            number, *unit = line.split()[1:]
            return int(number) << (10 if unit == ["kB"] else 0)
    raise OSError(f"/proc/{process}/status has no {field}")


def stat(process: int | str) -> list[str]:
    """Return the fields of ``/proc/PROCESS/stat`` from the state on; none if it is gone, or another user's."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def processes() -> list[int]:
    """Return the numbers of all processes."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]

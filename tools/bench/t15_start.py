"""T15: how long ``trajstore --help`` takes, and ``import trajstore`` over ``import torch``; each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio

_HELP = "import sys; from trajstore.cli import main; sys.argv = ['trajstore', '--help']; main()"


def figures(options: Options) -> Iterator[Figure]:
    """Yield both figures."""
    show_help, store, torch, nothing = in_turn(
        [_python(_HELP), _python("import trajstore"), _python("import torch"), _python("pass")],
        options.repeats,
        warmup=min(1, options.repeats - 1),
    )
    yield Figure("T15", "trajstore --help", show_help.seconds, 0.1, "s", details={"python_alone": nothing.seconds})
    yield Figure("T15", "import trajstore over import torch", ratio(store, torch), 1.1)


def _python(code: str) -> Callable[[], object]:
    def run() -> object:
        return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

    return run

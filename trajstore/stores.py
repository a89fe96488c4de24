"""Functions on directories of stores and runs: inspect, verify, copy, repair, convert, prune, compact."""

from trajstore.operations.conversion import convert
from trajstore.operations.copying import Copied, copy_store, repair_store
from trajstore.operations.inspect import inspect
from trajstore.operations.mending import Compacted, Pruned, compact, prune
from trajstore.operations.verification import Problem, Verification
from trajstore.operations.verify import verify

__all__ = [
    "Compacted",
    "Copied",
    "Problem",
    "Pruned",
    "Verification",
    "compact",
    "convert",
    "copy_store",
    "inspect",
    "prune",
    "repair_store",
    "verify",
]

"""The training ledger: which rows each optimizer step trained on, durable with the step."""

from trajstore.ledger.audit import Audit, ColumnDifference, Difference, audit, config_difference, first_difference
from trajstore.ledger.contents import LEDGER_FOLDER, LedgerContents, read
from trajstore.ledger.step import ROW, TrainedStep
from trajstore.ledger.writer import Ledger

__all__ = [
    "LEDGER_FOLDER",
    "ROW",
    "Audit",
    "ColumnDifference",
    "Difference",
    "Ledger",
    "LedgerContents",
    "TrainedStep",
    "audit",
    "config_difference",
    "first_difference",
    "read",
]

"""The training ledger: which rows each optimizer step trained on, durable with the step."""

from trajstore.ledger.audit import Audit, audit
from trajstore.ledger.contents import LEDGER_FOLDER, LedgerContents, read
from trajstore.ledger.step import ROW, TrainedStep
from trajstore.ledger.writer import Ledger

__all__ = ["LEDGER_FOLDER", "ROW", "Audit", "Ledger", "LedgerContents", "TrainedStep", "audit", "read"]

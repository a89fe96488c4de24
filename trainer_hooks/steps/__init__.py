"""Rebuilds and recomputes recorded training steps (``trajstore replay-step``, ``docs/design/ledger.md``)."""

from trainer_hooks.steps.inputs import TOLERANCES, StepInputs, read_bundle, step_inputs, write_bundle
from trainer_hooks.steps.recompute import Check, Policy, Report, recompute, with_log_probs

__all__ = [
    "TOLERANCES",
    "Check",
    "Policy",
    "Report",
    "StepInputs",
    "read_bundle",
    "recompute",
    "step_inputs",
    "with_log_probs",
    "write_bundle",
]

"""Rebuilds and recomputes recorded training steps (``trajstore replay-step``, ``docs/design/ledger.md``)."""

from trainer_hooks.steps.inputs import TOLERANCES, StepInputs, step_inputs
from trainer_hooks.steps.recompute import Check, Policy, Report, recompute, with_log_probs

__all__ = ["TOLERANCES", "Check", "Policy", "Report", "StepInputs", "recompute", "step_inputs", "with_log_probs"]

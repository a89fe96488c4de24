"""Guidance in a verl configuration (``experience_maker``, ``exp_manager``), and what must agree with it elsewhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainer_hooks.guidance_config import MAKER, MANAGER, REME, TODAY, GuidanceConfig
from trajstore.settings import keys_of

KEYS = frozenset(field.name for field in dataclasses.fields(GuidanceConfig)) | {*TODAY, REME}
"""Keys that ``exp_manager`` may have for guidance; which of them belong elsewhere, :class:`GuidanceConfig` says."""

SWITCHES = ("enable_context_generator", "enable_summarizer")
"""Keys of ``experience_maker`` that switch guidance on."""


def guidance_of(config: Any, folder: Path) -> GuidanceConfig:
    """Return guidance as a whole configuration has it; experiences are kept below ``folder`` if it says nothing else.

    Raises:
        ConfigurationError: unknown keys, one option given twice, values out of range; the message lists all.
    """
    result = GuidanceConfig.from_config(config)
    if not result.is_on or "store" in _maker(config):
        return result
    # Elsewhere experiences without a path are in memory; a run that shall survive a crash needs another default.
    return dataclasses.replace(result, store={"path": str(folder / "experiences")})


def is_asked_for(config: Any) -> bool:
    """Return whether a configuration has options of guidance, right or wrong, and does not say that it is off."""
    maker = _maker(config)
    switches = [maker[name] for name in SWITCHES if name in maker]
    if switches and not any(switches):
        return False
    return bool(maker) or not KEYS.isdisjoint(keys_of(config.get(MANAGER), MANAGER))


def guides_training(guidance: GuidanceConfig, n_rollout: int | None = None) -> bool:
    """Return whether rollouts that are trained on are shown experience; ``n_rollout`` of a task, or any number."""
    return guidance.enable_context_generator and _guides(
        guidance.train_rollout_expmode, guidance.rollout_expratio, n_rollout
    )


def guidance_problems(config: Any, guidance: GuidanceConfig, n_rollout: int, *, text: bool) -> list[str]:
    """Return what of guidance cannot take effect, or cannot be wanted beside the rest, one sentence each.

    Args:
        config: verl's whole configuration.
        guidance: of it.
        n_rollout: rollouts of a task in training.
        text: whether rollouts are recorded with their turns as text.
    """
    if not guidance.is_on:
        if is_asked_for(config):
            return [
                f"{MAKER}: neither enable_context_generator nor enable_summarizer is true, so the options of guidance"
                " have no effect; set one of them, or leave the options out"
            ]
        return []
    trainer = config.trainer
    problems = []
    if guidance.enable_context_generator:
        problems += _problems_of_showing(config, guidance, n_rollout)
    validates = bool(trainer.get("val_before_train", True)) or float(trainer.get("test_freq", -1)) > 0
    if guidance.enable_summarizer and not text:
        problems.append(f"{MAKER}.enable_summarizer: true, needs {MANAGER}.recording.text=true, of which it is made")
    if guidance.val_summarizer_save and not (guidance.enable_summarizer and validates):
        problems.append(
            f"{MAKER}.val_summarizer_save: true, needs {MAKER}.enable_summarizer=true and a validation"
            " (trainer.val_before_train or trainer.test_freq)"
        )
    if guidance.init_experience_before_training:
        if not guidance.enable_summarizer or not trainer.get("val_before_train", True):
            problems.append(
                f"{MANAGER}.init_experience_before_training: true, needs {MAKER}.enable_summarizer=true and"
                " trainer.val_before_train=True, whose rollouts become experience"
            )
        if guidance.init_experience_only and not trainer.get("val_only", False):
            problems.append(f"{MANAGER}.init_experience_only: true, needs trainer.val_only=True, which ends the run")
    fills = guidance.updated_freq or guidance.val_summarizer_save or guidance.init_experience_before_training
    if guidance.enable_summarizer and not fills:
        problems.append(
            f"{MAKER}.enable_summarizer: true, but nothing becomes experience: set {MAKER}.updated_freq,"
            f" {MAKER}.val_summarizer_save or {MANAGER}.init_experience_before_training"
        )
    model = config.reward.reward_model
    if model.enable and not model.enable_resource_pool and (guidance.val_summarizer_save or not guidance.updated_freq):
        problems.append(
            "reward.reward_model.enable_resource_pool: false, so rollouts of a validation have no reward yet when they"
            " would become experience"
        )
    return problems


def _problems_of_showing(config: Any, guidance: GuidanceConfig, n_rollout: int) -> list[str]:
    problems = []
    n_validation = int(config.actor_rollout_ref.rollout.val_kwargs.n)
    validates = _guides(guidance.val_rollout_expmode, guidance.rollout_expratio, n_validation)
    if not guides_training(guidance, n_rollout) and not validates:
        problems.append(
            f"{MAKER}.enable_context_generator: true, but no rollout is guided: train_rollout_expmode is"
            f" {guidance.train_rollout_expmode}, val_rollout_expmode {guidance.val_rollout_expmode}, and"
            f" {MANAGER}.rollout_expratio {guidance.rollout_expratio:g} of the rollouts of a task are none"
        )
    if str(config.algorithm.adv_estimator) == "remax":
        problems.append("algorithm.adv_estimator: remax, but its baseline is a rollout that is shown nothing")
    return problems


def _maker(config: Any) -> dict[str, Any]:
    """Return the options of the maker, under whichever of its names they stand."""
    manager = keys_of(config.get(MANAGER), MANAGER)
    return keys_of(config.get(MAKER), MAKER) | keys_of(manager.get(REME), f"{MANAGER}.{REME}")


def _guides(mode: str, ratio: float, count: int | None) -> bool:
    return mode == "all" or (mode == "mixed" and (ratio > 0 if count is None else round(count * ratio) > 0))

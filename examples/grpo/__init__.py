"""A small GRPO trainer on torch and transformers that shows the whole loop of experience replay.

Imports run downward: ``demo`` → ``checkpoint`` → ``trainer`` → ``curves`` → ``config``, ``rollout``, ``warm_start`` →
``model``, ``environments``, ``tokenizer``. Needs the extra ``demo``. Uses public names alone.
"""

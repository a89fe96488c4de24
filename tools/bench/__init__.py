"""Benchmarks of the goals: ``python -m tools.bench``; what each figure means is in docs/benchmarks.md."""

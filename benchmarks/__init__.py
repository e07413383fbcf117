"""Benchmarks of the operators; run from the repository root as `python -m benchmarks.run`. Not installed."""

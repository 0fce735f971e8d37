"""Traces: what each chunk of a text read of its past, and what each token cost with and without (docs/trace.md)."""

"""The case study on mathematics: ``python benchmarks/case_study``."""

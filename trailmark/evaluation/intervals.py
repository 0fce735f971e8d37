"""The old name of :mod:`trailmark.statistics`."""

from trailmark.statistics import Floats, bootstrap_mean, bootstrap_ratio, student_quantile

__all__ = ["Floats", "bootstrap_mean", "bootstrap_ratio", "student_quantile"]

"""The old place of :func:`trailmark.statistics.wilson_interval`."""

from trailmark.statistics import wilson_interval

__all__ = ["wilson_interval"]

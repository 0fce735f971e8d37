"""Attention inside a sliding window."""

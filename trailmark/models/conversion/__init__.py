"""Pretrained models of other families as models of ours, and back (docs/convert.md)."""

"""Neighbours that are found before training: BM25, frozen encoders, tables."""

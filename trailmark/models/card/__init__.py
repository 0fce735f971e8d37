"""Model cards: what stands in them, and when they are written."""

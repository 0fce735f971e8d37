"""The model with a sliding window alone, or with full attention."""

"""The model with Landmark Attention."""

"""HiLS, MoBA and exact block-sparse attention: every token chooses chunks in every layer, beside a window."""

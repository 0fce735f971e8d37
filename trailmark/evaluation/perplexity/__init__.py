"""The suite that measures perplexity."""

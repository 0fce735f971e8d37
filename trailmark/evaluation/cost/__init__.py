"""The suite that measures what a text costs."""

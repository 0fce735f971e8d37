"""The page that shows what was read of a text."""

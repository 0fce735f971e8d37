"""Where keys and values of past chunks live: a tier is one class in one file."""

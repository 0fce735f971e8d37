"""The suite that says what retrieval is worth to a model, what it could be worth, and what its scores say."""

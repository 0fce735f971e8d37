"""The suite that summarises."""

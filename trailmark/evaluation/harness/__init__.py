"""The suite that asks the tasks of lm-eval."""

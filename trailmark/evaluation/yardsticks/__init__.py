"""The suite that asks published benchmarks of long texts, from their own files."""

"""HSA: every token chooses past chunks by learned scores, and reads them in layers of their own."""

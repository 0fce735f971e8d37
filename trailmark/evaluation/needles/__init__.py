"""The suite that asks for needles."""

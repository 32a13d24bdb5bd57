"""Stands in for the library `openai`."""

"""Robust estimation on its own: losses, Grams, weights, draws. Nothing here knows of queries or of modules."""

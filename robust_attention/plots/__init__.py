"""Stored numbers in, pictures out."""

"""Data that ships with the package, and ways to spoil it."""

"""Metrics, and how sure one may be of them."""

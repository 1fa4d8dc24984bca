"""Whole configurations, one module a paper: functions that return them, and nothing else."""

"""The training engine: one loop in plain torch for every kind of model, on one process or many."""

from robust_attention.training.fit import Examples, FitConfig, Fitted, Interrupted, Loss, Step, fit, schedule

__all__ = ["Examples", "FitConfig", "Fitted", "Interrupted", "Loss", "Step", "fit", "schedule"]

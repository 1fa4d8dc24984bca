"""Short training loops in plain torch."""

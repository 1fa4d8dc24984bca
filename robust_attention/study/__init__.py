"""Studies: grids of independent cells that can be run, interrupted, resumed, shared out, and made into tables."""

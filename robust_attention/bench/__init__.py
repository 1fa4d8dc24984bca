"""How fast, how much memory, against what: side by side in one run, and only after the numbers were checked."""

"""`python -m robust_attention`."""

from robust_attention.cli import main

main()

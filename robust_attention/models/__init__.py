"""Small models whose attention is one of the package's methods."""

"""Attacks on images, one a file."""

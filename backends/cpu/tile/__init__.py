"""Printing of tile programs."""

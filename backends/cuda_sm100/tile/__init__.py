"""Tile programs as Triton block operations."""

"""Tile programs as vector functions and scalar code."""

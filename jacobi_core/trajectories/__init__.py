"""Jacobi trajectories: what they are, and how they are collected for many answers at once."""

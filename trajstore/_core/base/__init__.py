"""Foundations without trajectories: arguments, locks, threads, machine code."""

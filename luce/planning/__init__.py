"""Decisions ahead of a run: a pure plan with a reason for each field, memory, threads."""

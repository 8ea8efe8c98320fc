"""Checkpoints of other libraries: read into a state, and written from one."""

"""Compile mode: the repeated blocks of a static program as compiled functions."""

"""Stages of a model: units, stubs for units of other stages, and hooks on own units."""

"""Schedules as data: actions, CSV files, simulation and pictures."""

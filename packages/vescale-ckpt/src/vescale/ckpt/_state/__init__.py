"""A nested state as names, boxes and JSON values."""

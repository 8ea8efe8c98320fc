"""Norms over distributed gradients that count every element once."""

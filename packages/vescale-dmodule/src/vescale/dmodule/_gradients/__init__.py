"""Gradients of DTensor parameters: received, reduced where they are partial sums, stored."""

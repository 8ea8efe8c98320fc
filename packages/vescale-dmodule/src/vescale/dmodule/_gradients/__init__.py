"""Gradients of DTensor parameters: received, summed over the ranks where they are partial, stored."""

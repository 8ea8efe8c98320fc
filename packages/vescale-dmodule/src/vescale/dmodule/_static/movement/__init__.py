"""Conversion of a local tensor from one layout to another: steps, their collectives, and their gradients."""

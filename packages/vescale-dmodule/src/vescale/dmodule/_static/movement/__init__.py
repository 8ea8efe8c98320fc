"""From one layout of a local tensor to another: steps, their collectives, and their gradients."""

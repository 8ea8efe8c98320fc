"""Groups of ranks: mesh axes, their collectives, and errors that name lost ranks."""

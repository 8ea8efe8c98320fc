"""Groups of ranks: mesh axes, their collectives, and what happens when a rank is lost."""

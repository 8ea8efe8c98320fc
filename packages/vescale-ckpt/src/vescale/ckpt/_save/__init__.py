"""Save: plan, balance and the rounds."""

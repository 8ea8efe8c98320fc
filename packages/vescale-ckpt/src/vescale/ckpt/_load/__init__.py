"""Load: plan and the rounds."""

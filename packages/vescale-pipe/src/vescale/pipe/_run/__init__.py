"""One micro-batch on one stage: events, recording, backward and transfers."""

"""A plan for people: text for a terminal, and one page of HTML."""

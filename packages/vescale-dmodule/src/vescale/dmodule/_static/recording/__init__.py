"""How a static program is made: observe a call in eager mode, learn its layouts, compare both runs."""

"""The recording of a static program: observe a call in eager mode, record its layouts, compare both dry runs."""

"""Every private torch name that ``vescale.dtensor`` uses, and what differs between torch versions."""

"""Every private torch name that ``vescale.dtensor`` uses, and the differences between torch versions."""

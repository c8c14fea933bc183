"""Training together: peers of unequal speed that come and go, as DeDLOC has them (Diskin et al., NeurIPS 2021)."""

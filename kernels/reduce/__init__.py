"""Mean and variance under a mask, and whitening. Sums have a fixed order."""

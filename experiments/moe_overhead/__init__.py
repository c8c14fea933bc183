"""Cost of a mixture of experts on one device, beside a dense layer of the same FLOPs."""

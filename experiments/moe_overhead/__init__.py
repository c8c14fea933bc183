"""What a mixture of experts on one device costs beside a dense layer of the same FLOPs."""

"""Cost of remote experts inside `jit`, beside the recording of `autodiff` and beside experts in the same program."""

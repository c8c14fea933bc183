"""The mixture of experts, twice: `local` in one jit, the oracle; `remote` over the network."""

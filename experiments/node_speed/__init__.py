"""Speed of an expert node beside bare jitted calls of its own programs, and beside hivemind."""

"""Position and retrieval tasks on made-up prompts, and stability of generation."""

"""Fine-tuning of converted checkpoints from job files; the conversion does not depend on it."""

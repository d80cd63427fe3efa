"""What leaves the trainer: generated text."""

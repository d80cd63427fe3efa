"""Checkpoints of a run: saved in the background, restored onto any mesh."""

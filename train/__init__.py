"""Training: objectives, the loop, checkpoints, tracking, launching and publishing."""

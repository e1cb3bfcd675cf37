"""What a training run will need, before anything is allocated."""

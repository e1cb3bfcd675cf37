"""Gradients before the step: clipping, accumulation, and steps in the backward pass."""

"""Pure tensor maths: advantages, losses, KL, reduction. Sees tensors, never configs or clusters."""

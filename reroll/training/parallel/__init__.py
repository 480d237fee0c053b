"""Models that several processes hold together: their groups, how layers are split, checkpoints for any number of them."""

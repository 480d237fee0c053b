"""Messages to ids, samples to packed batches."""

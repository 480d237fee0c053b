"""Whether a model does here what it does in Hugging Face's own code."""

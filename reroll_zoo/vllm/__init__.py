"""vLLM as an engine. Only this package imports vllm; whoever may need it imports it inside a function."""

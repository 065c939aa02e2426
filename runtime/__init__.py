"""What runs an engine: scheduling, KV cache, sampling, loading and the public `LLM`."""

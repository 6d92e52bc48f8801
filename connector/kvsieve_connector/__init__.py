"""What runs inside vLLM: the KV connector, its scheduler and worker halves, and the copy engines."""

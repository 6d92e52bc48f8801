"""Dense models' sparse tier on GPUs: hot blocks in vLLM's pool, one block table per request and KV head."""

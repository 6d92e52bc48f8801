"""`kvsieve demo`: a real engine is killed, and the next one finds its KV in the store."""

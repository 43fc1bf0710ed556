"""Ways for buckets to travel: shared memory, CUDA IPC, broadcast, files."""

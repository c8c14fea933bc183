"""Cost of latency to asynchronous trainers, and to naive model parallelism."""

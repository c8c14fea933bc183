"""What latency costs asynchronous trainers, and what it costs naive model parallelism."""

"""The machine that a process runs on: cores, threads, devices, memory, disk, signals, child processes."""

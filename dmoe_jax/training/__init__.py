"""One run, from its first step to its report, whatever trains and wherever.

`engine` says what trains: asynchronous trainers over a swarm (`swarm_engine`), or anything else that keeps to the
`Engine` protocol. `task` says on what. `run.train` is the loop around it: evaluations, checkpoints and averages beside
the training or in pauses, metrics, figure, report. `saving` finds a run again and goes on with it.
"""

"""One run, from its first step to its report, whatever trains (`Engine`) on whatever data (`Task`).

`run.train` is the loop: evaluations and checkpoints beside the training or in pauses, metrics, figure, report.
"""

"""The folder that a run leaves behind: config.json, metrics.jsonl, figure.png and report.md.

`metrics.jsonl` holds one JSON object a line, each of a "kind". `docs/how_to/results.md` lists the kinds and says what
their fields mean; more are welcome. `tables` reads them as columns.
"""

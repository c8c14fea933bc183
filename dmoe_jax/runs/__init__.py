"""The folder that a run leaves behind: config.json, metrics.jsonl, figure.png and report.md.

`metrics.jsonl` holds one JSON object a line. These are its kinds, with the fields that the figure and the report
read; more are welcome. `step` counts trunk updates, `time_s` is seconds since the run began. Records of a simulated run
may have `virtual_s` beside it, and any `train` record `staleness`.

    {"kind": "task", "name", "unit"}                                    the data, and what an item of it is
    {"kind": "train", "step", "trainer", "loss", "items", "time_s"}     one step; loss in nats per token
    {"kind": "eval", "step", "loss", "time_s", "split", "items",        one evaluation, of the "valid" or the
     "items_seen"}                                                      "test" data, after so many items; with
                                                                        "perplexity", "accuracy" and the like.
                                                                        Those of a run are over the same data
    {"kind": "final_eval", ...}                                         the same fields, at the end of a run and
                                                                        over more data: no part of its curve
    {"kind": "baseline", "unigram_perplexity"}                          of what was evaluated; the last counts
    {"kind": "calls", "step", "time_s", "ok", "failed",                 remote calls since the run began, and
     "failures": {reason: n}}                                           why they failed
    {"kind": "experts", "step", "load": {uid: n}, "peer": {uid: peer}}  samples sent to each expert since
                                                                        the run began, and who serves it
    {"kind": "balance", "step", "layer", "histogram", "cv", "entropy",  how even the load of a layer's experts
     "dead", "share_lost"}                                              was since the record before; see
                                                                        `dmoe_jax.training.balance`
    {"kind": "event", "name", "step", "time_s", "detail"}               anything worth a line in the report;
                                                                        "node_killed" also has "peer"
"""

"""What a router learnt, read from a finished run: `dmoe inspect RUN`.

`saved_run` says what a run folder holds, `saved_model` loads it, `reading` lets the model read a text and notes which
experts each layer chose. `word_classes` and `statistics` make figures of that, pure functions of arrays; `pictures`
draws them and `report` puts them into RUN/inspection. `examples/inspect_run.py` makes other pictures of the same parts.
"""

"""Pictures of the choices that a router learnt in a run: `dmoe inspect RUN`.

`reading` lets the model of a run (`trained.saved_model`) read a text and notes which experts each layer chose.
`word_classes` and `statistics` make figures of that, pure functions of arrays; `pictures` draws them and `report` puts
them into RUN/inspection. `examples/inspect_run.py` makes other pictures of the same parts.
"""

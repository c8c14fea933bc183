"""A model that was trained: taken up from its run folder, from its nodes' checkpoints or from a living swarm, and used.

`saved_run` looks into a run folder, and `saved_model` reads its parameters. `exporting` writes them as safetensors, in
the form of `export_files`; `imported` is the way back. `remote` copies what lies at a URL.
"""

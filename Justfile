# Every command the project has; `just` alone lists them.

default:
    @just --list

# train a DMoE Transformer-XL over a local swarm of real processes (about five minutes on two cores)
demo *ARGS:
    python -m dmoe_jax.cli demo {{ARGS}}

# the quick tests, a process for each core; those of a file share one, and with it what they compile
test *ARGS:
    python -m pytest -n auto --maxprocesses 8 --dist loadfile {{ARGS}}

# every test, the slow ones too
test-all *ARGS:
    python -m pytest -n auto --maxprocesses 8 --dist loadfile -m '' {{ARGS}}

# the networking package alone, without JAX: the loop for half of the code
test-net *ARGS:
    python -m pytest -n auto --maxprocesses 8 --dist loadfile tests/net {{ARGS}}

# the documentation as a site, in docs/_build/html; a warning is an error
docs *ARGS:
    python -m sphinx -W --keep-going -q -b html docs docs/_build/html {{ARGS}}

# style and types
lint:
    ruff check .
    ruff format --check .
    mypy

# rewrite files into the house style
format:
    ruff check --fix .
    ruff format .

# the measurements behind the README in turn, each in its own run folder; arguments such as --quick go to each
bench *ARGS:
    python -m experiments.transport_speed {{ARGS}}
    python -m experiments.sim_scale {{ARGS}}
    python -m experiments.moe_overhead {{ARGS}}
    python -m experiments.throughput_vs_latency {{ARGS}}

# the experiments behind the papers' figures, in one report beside the papers' numbers; --quick: under 15 minutes on two cores
paper *ARGS:
    python -m experiments.paper {{ARGS}}

# the same, and the report becomes the one in the repository
commit-paper *ARGS:
    python -m experiments.paper --copy-to experiments/report {{ARGS}}

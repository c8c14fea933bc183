"""The command line of `dmoe`: one clear line and a status for every mistake, and help for every flag."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.cli import main
from dmoe_jax.machine.environment import JOIN_VARIABLE
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.runs.endings import EXIT_AGAIN
from tests.dmoe_jax.training_rig import outcome

STRANGER = "ab" * 32
OWN_FILE = """
import flax.linen as nn, numpy as np, optax
from dmoe_jax.experts import as_expert

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(x)

def expert():
    return as_expert(Block(), np.zeros((2, 8), np.float32))

optimizer = optax.adamw(1e-3)
number = 3
"""
ROUTER_FILE = """
import jax.numpy as jnp
from dmoe_jax.routing.base import top_k_router

def init(key, d_model):
    return {"w": jnp.ones((d_model, 8))}

def scores(params, x, *, key=None, ids=None):
    return tuple(jnp.split(x @ params["w"], 2, axis=-1))

def router(name, scores):
    return lambda grid_size: top_k_router(name, grid_size, init, scores)

narrow = router("narrow", lambda params, x, **_: (x @ params["w"])[:, :3])
not_finite = router("not_finite", lambda params, x, **_: scores(params, x * jnp.nan))
small = router("small", scores)((2, 2))

def broken(grid_size):
    raise KeyError("gone")
"""


def check_one_line(args: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    got, error = outcome(args, capsys)
    assert got == status
    assert re.match(rf"dmoe: error: {line}", error), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "status", "line"),
    [
        ("", 2, "Expected one of {demo, up, dht, node, train, assist, status, watch, inspect, .*runs clean"),
        ("dht --bogus 3", 2, "Unrecognized options: --bogus, 3"),
        ("node --d-model x", 2, "Error parsing --d-model: .*'x'"),
        ("train --join 127.0.0.1:1 --compression zip", 2, "invalid choice 'zip'"),
        ("train --join 127.0.0.1:1 --k-min 9", 2, "--k-min must not exceed --k-best, got 9 and 4"),
        ("train --join 127.0.0.1:1 --steps 0", 2, "--steps must be at least 1, got 0"),
        ("train --join 127.0.0.1:1 --resume", 2, "--resume needs --out"),
        ("train --join 127.0.0.1:1 --weight-decay -1", 2, "--weight-decay must not be negative, got -1.0"),
        ("train --join 127.0.0.1:1 --staleness-power -1", 2, "--staleness-power must be .*, got -1.0"),
        ("train --join 127.0.0.1:1 --learning-rate-floor 2", 2, "--learning-rate-floor must be .*, got 2.0"),
        ("train --join 127.0.0.1:1 --eval-tokens 0 --d-ff 0", 2, "--d-ff must be .*, got 0"),
        ("train --join 127.0.0.1:1 --dropout 1", 2, "--dropout must be .* below 1, got 1.0"),
        ("train --join 127.0.0.1:1 --compute-dtype int8", 2, "--compute-dtype must be .*, got 'int8'"),
        ("train --join 127.0.0.1:1 --router best", 2, "unknown router 'best'; expected .*product_key"),
        ("train --join 127.0.0.1:1 --router /nowhere/r.py:mine", 2, "router '/nowhere/r.py:mine': .* no"),
        ("train --join 127.0.0.1:1", EXIT_AGAIN, "cannot join the swarm: cannot connect to 127.0.0.1:1: .*refused"),
        ("node --experts layer0.[4:2]", 2, r"expected \[START:STOP\] with START < STOP"),
        ("node --experts a.1 a.[0:2]", 2, "--experts must name no expert twice, got a.1"),
        ("node --weight-decay -0.1", 2, "--weight-decay must not be negative, got -0.1"),
        ("node --warmup-steps -1", 2, "--warmup-steps must not be negative, got -1"),
        ("node --announce-period-s -1", 2, "--announce-period-s must be positive, got -1.0"),
        ("node --claim 0 --of a.0", 2, "--claim must be at least 1, got 0"),
        ("node --claim 4", 2, "--claim needs --of PATTERN"),
        ("node --init x.safetensors", 2, "--init needs --checkpoint-dir"),
        ("node --init /nowhere/x.safetensors --checkpoint-dir /nowhere/y", 2, "there is no export /nowhere/x.safeten"),
        ("up --init x.safetensors --no-save-experts", 2, "--init needs the experts' folders"),
        ("train --join 127.0.0.1:1 --model m.py:m --init x.safetensors", 2, "--init is for the language model"),
        ("node --of a.0", 2, "--of would have no effect without --claim N"),
        ("node --claim 4 --of a.[", 2, r"bad grid pattern 'a.\['"),
        ("node --claim 4 --of a.[0:4] --experts a.3", 2, r"--of together must .*, got a.3 in a.3 and in a.\[0:4\]"),
        ("node --claim 4 --of a.[0:2050].[0:4]", 2, "257 groups of rows of their grids, at most 256"),
        ("status --join nowhere", 2, "expected an address as HOST:PORT, got 'nowhere'"),
        ("node --faults late", 2, "--faults: expected FAULT=RATE or late=RATE:MEAN_S, .* got 'late'"),
        ("node --faults late=0.6 die=0.6", 2, "--faults: .*together at most 1"),
        (f"status --join {STRANGER}@127.0.0.1:1", EXIT_AGAIN, "cannot join the swarm: cannot connect to .*refused"),
        ("status --join ab@127.0.0.1:1", 2, "expected a peer as PEERID@HOST:PORT, got 'ab@127.0.0.1:1'"),
        ("status --join 127.0.0.1:1 --insecure-loopback", EXIT_AGAIN, "cannot join the swarm over plain TCP: "),
        ("status --join a:1 --insecure-loopback --identity f --allow-list f", 2, "nothing: --identity and --allow-l"),
        ("dht --listen 203.0.113.1:0", 1, "cannot listen at 203.0.113.1:0: "),
        ("dht --listen 203.0.113.1:0 --insecure-loopback", 1, ".*loopback only"),
        ("dht --listen 203.0.113.1", 2, "expected an address as HOST:PORT, got '203.0.113.1'"),
        ("dht --listen 0.0.0.0:0", 2, "--listen 0.0.0.0:0 .*--announce must say"),
        ("node --listen [::]:0", 2, r"--listen \[::\]:0 .*--announce must say"),
        ("dht --announce host:4000", 2, "--announce must be .* without a port, got 'host:4000'"),
        ("inspect", 2, "Missing from dmoe inspect: RUN"),
        ("inspect /nowhere --tokens -1", 2, "--tokens must be at least 0, got -1"),
        ("runs /nowhere", 2, "there is no folder /nowhere"),
        ("runs clean /nowhere", 2, "there is no folder /nowhere"),
        ("runs compare FILE", 2, "expected two run folders or more to compare, got 1"),
        ("runs compare FILE /nowhere", 2, "there is no folder .*FILE.py"),
        ("runs --yes", 2, "Unrecognized options: --yes; --yes is a flag of dmoe runs clean"),
        ("identity", 2, "Missing from dmoe identity: FILE"),
        ("identity /nowhere/key", 1, "cannot write the identity /nowhere/key: No such file or directory"),
        ("NODE --expert FILE:number", 2, "expert .*: expected an Expert .*got int: 3"),
        ("NODE --expert FILE:nothing", 2, "expert .* defines no 'nothing'; it defines Block"),
        ("NODE --expert /nowhere/e.py:expert", 2, "expert .*: there is no file /nowhere/e.py"),
        ("NODE --expert convolution", 2, "expert 'convolution': expected one of feedforward, neuron, transformer_xl"),
        ("NODE --expert feedforward --seq-len 8", 2, "--seq-len would have no effect beside --expert feedforward"),
        ("NODE --expert FILE:expert --d-model 8", 2, "--d-model would have no effect beside --expert"),
        ("NODE --expert FILE:expert --route token", 2, "--route token would have no effect beside --expert"),
        ("NODE --optimizer FILE:number", 2, "optimizer .*: expected an optax.GradientTransformation, got int: 3"),
        ("NODE --optimizer FILE:optimizer --learning-rate 3", 2, "--learning-rate would have no effect beside"),
        ("NODE --optimizer FILE:optimizer --staleness-power 0", 2, "--staleness-power would have no effect beside"),
        ("NODE --staleness-power inf", 2, "--staleness-power must be finite and not negative, got inf"),
        ("NODE --learning-rate 0", 2, "--learning-rate must be positive, got 0.0"),
        ("NODE --average-period-s 60", 2, "--average-period-s would have no effect without --replicas"),
        ("NODE --max-batch-rows 0", 2, "--max-batch-rows must be at least 1, got 0"),
        ("NODE --xla-threads 100000", 2, "--xla-threads must be from 1 to 256, got 100000"),
        ("NODE --checkpoint-dir FILE", 2, "--checkpoint-dir must be a folder, or a name for one; .*FILE.py is a file"),
        ("NODE --replicas 2 --average-period-s 5", 2, "--average-period-s must be at least 23 .*, got 5"),
        ("NODE --replicas 9", 2, "--replicas must be an integer of at least 1 and at most 8, got 9"),
        ("NODE --announce-period-s 101", 2, "announcements live for at most 300 s, got 303"),
        ("NODE --swarm a/b", 2, "--swarm must be 1 to 64 letters, .* got 'a/b'"),
        ("TRAIN --router ROUTERS:absent", 2, "defines no 'absent'"),
        ("TRAIN --router ROUTERS:broken", 2, "broken.*raised KeyError: 'gone'"),
        ("TRAIN --router ROUTERS:small", 2, r"'small' is for grid \(2, 2\), the model's grid is \(4, 4\)"),
        ("TRAIN --router ROUTERS:narrow", 2, r"'narrow': .*\(\(3, 4\), \(3, 4\)\).* got \(\(3, 3\),\)"),
        ("TRAIN --router ROUTERS:not_finite", 2, "'not_finite': .*NaN"),
    ],
)
def test_a_mistake_gets_one_line(args: str, status: int, line: str, tmp_path: Path, capsys: Any) -> None:
    """One line names the value, and the status is not zero; nobody listens at the address, which is told later."""
    args = args.replace("NODE", "node --join 127.0.0.1:1").replace("TRAIN", "train --join 127.0.0.1:1 --d-model 16")
    for name, text in (("FILE", OWN_FILE), ("ROUTERS", ROUTER_FILE)):
        (tmp_path / f"{name}.py").write_text(text)
        args = args.replace(name, str(tmp_path / f"{name}.py"))
    check_one_line(args.split(), status, f".*{line}", capsys)


@pytest.mark.parametrize(
    ("flag", "content", "mode", "line"),
    [
        ("--identity", "", 0o644, "open to others .mode 644.*chmod 600"),
        ("--identity", "not a key", 0o600, "expected an unencrypted Ed25519 private key"),
        ("--swarm-secret-file", "0123456789abcdef", 0o640, "open to others .mode 640"),
        ("--swarm-secret-file", "short", 0o600, "holds 5 bytes, expected .* at least 16 .*openssl rand"),
        ("--swarm-secret-file", None, 0o600, "No such file or directory"),
        ("--allow-list", "bob", 0o600, "line 1: expected a peer id of 64 hexadecimal digits, got 'bob'"),
    ],
)
def test_a_file_that_will_not_do_gets_one_line(
    flag: str, content: str | None, mode: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent: the line names the file and what was expected."""
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    words = ["status", "--join", "127.0.0.1:1", flag, str(file)]
    check_one_line(words, 1, f".*{re.escape(str(file))}.*{line}", capsys)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert re.fullmatch(r"dmoe_jax \d+\.\d+\.\d+(\.dev\d+)?\n", capsys.readouterr().out)


def test_a_help_page_that_nobody_reads_to_its_end_is_no_crash() -> None:
    """As `dmoe --help | head -1` closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dmoe_jax.cli", "--help"]
    done = subprocess.run(command, check=False, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_names_every_router(capsys: pytest.CaptureFixture[str]) -> None:
    """The names are written down where JAX is not imported; they are those of the registry."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    listed = re.search(r"Chooses the experts of each sequence or token: ([^.]+)\.", words)
    assert re.split(r", | or ", listed[1]) == list(ROUTERS)


def test_an_identity_is_made_once_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call makes a private file; each prints the same 64 digits and nothing else."""
    file, printed = tmp_path / "key", []
    for _ in range(2):
        with pytest.raises(SystemExit) as exit_:
            main(["identity", str(file)])
        assert exit_.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert re.fullmatch(r"[0-9a-f]{64}\n", printed[0])
    assert file.stat().st_mode & 0o777 == 0o600


COMMANDS = "demo up dht node train assist status watch inspect evaluate generate export".split()  # noqa: SIM905 (one line)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` succeeds and no flag is without a sentence."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    flags = re.split(r"\n[│ ]{2}(?=--)", text)[1:]
    assert len(flags) >= 3
    for flag in flags:
        assert len(re.sub(r"[│╭╮╰╯─\s]+", " ", flag).split("(default")[0].split()) > 4, flag


def test_the_environment_names_whom_to_join(capsys: Any, monkeypatch: Any) -> None:
    """DMOE_JOIN stands for --join in every command that needs it, and only where it is not given."""
    monkeypatch.setenv(JOIN_VARIABLE, "127.0.0.1:1 nowhere")
    for command in ("dht", "node", "train", "assist", "status", "watch"):
        assert outcome([command], capsys)[1] == "dmoe: error: --join: expected an address as HOST:PORT, got 'nowhere'\n"
    assert "127.0.0.1:2: Connection refused" in outcome(["status", "--join", "127.0.0.1:2"], capsys)[1]
    assert outcome(["identity"], capsys)[0] == 2


def test_a_wrong_address_is_told_before_jax_is_imported() -> None:
    """Neither a slip of the pen nor `--help` nor a DHT peer waits for JAX, or pays for it in memory."""
    code = """if True:
        import sys
        from dmoe_jax.cli import main
        try:
            main(["train", "--join", "foo"])
        except SystemExit as exit_:
            sys.exit(exit_.code + 10 * ("jax" in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "dmoe: error: --join: expected an address as HOST:PORT, got 'foo'\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("train --learing-rate 1 --join a:1", r"--learing-rate, 1; did you mean --learning-rate\? See dmoe train"),
        ("stauts", r"stauts; did you mean status\? See dmoe"),
        ("train", "Missing from dmoe train: --join PEER .*; see dmoe train"),
    ],
)
def test_slips_of_the_pen_are_guessed_on_every_terminal(
    args: str, line: str, encoding: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tyro draws its boxes with other characters where the terminal lacks them; the line is the same."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    check_one_line(args.split(), 2, f".*{line} --help\n", capsys)


INTERRUPTED_IN_A_COLLECTION = """
import gc, signal, sys, trio
from dmoe_jax.runs.setting_up import keep_interrupts_out_of_collections
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
pressed = []
def callback(phase, info):
    if not pressed:
        pressed.append(phase)
        signal.raise_signal(signal.SIGINT)
gc.callbacks.append(callback)
if sys.argv[1] == "kept":
    keep_interrupts_out_of_collections()
async def main():
    gc.collect()
    await trio.lowlevel.checkpoint()
try:
    trio.run(main)
except KeyboardInterrupt:
    print("interrupted")
else:
    print("lost")
"""


@pytest.mark.parametrize(("how", "outcome"), [("kept", "interrupted"), ("as it was", "lost")])
def test_an_interrupt_in_a_garbage_collection_is_not_lost(how: str, outcome: str) -> None:
    """Python writes down what a callback of a collection raises, and goes on."""
    command = [sys.executable, "-c", INTERRUPTED_IN_A_COLLECTION, how]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout.split() == [outcome], done.stderr

#!/usr/bin/env python3
"""Training steps of agoq and of PyTorch + transformers on the same GPU, one after the other.

usage: compare_step.py [--agoq build/agoq] [--out FILE] [--set KEY=VALUE]... [--steps N] [--warmup N] [--speed-only] CASE...

CASE = SHAPE:LAYERS:SEQUENCE:BATCH[:PEER[,PEER...]], for instance llama3-8b:8:16384:1:eager,ckpt. PEER is a mode of
torch_llama.py (eager, ckpt, compile); without one only agoq runs. --set, --steps, --warmup and --speed-only go to agoq.
Where agoq says how many layers have to be recomputed for a case to fit, it runs with that many.

Prints a line per run and writes everything, with the commands, as JSON.
"""
import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"


def run(command):
    """The JSON that `command` prints, as a whole or in its last line, or what went wrong."""
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout.strip()
    for candidate in (text, *text.splitlines()[-1:]):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            pass
    return {"error": (done.stderr.strip() or text)[-400:], "status": done.returncode}


def run_agoq(agoq, shape, layers, sequence, batch, extra):
    command = [agoq, "bench", "step", str(EXAMPLES / f"{shape}.toml"), "--json"]
    settings = {"model.layers": layers, "train.sequence": sequence, "train.micro_batch": batch,
                "train.micro_batches": 1, "run.device": '"cuda"'}
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    command += extra
    result = run(command)
    fitting = re.search(r"activations\.recompute_layers ?= ?(\d+)", result.get("error", ""))
    if fitting:
        command += ["--set", f"activations.recompute_layers={fitting[1]}"]
        result = run(command)
    return {"command": " ".join(command), "result": result}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--agoq", default="build/agoq")
    parser.add_argument("--out", default="compare_step.json")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps")
    parser.add_argument("--warmup")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("cases", nargs="+")
    arguments = parser.parse_args()
    extra = [word for setting in arguments.set for word in ("--set", setting)]
    for option in ("steps", "warmup"):
        if getattr(arguments, option):
            extra += [f"--{option}", getattr(arguments, option)]
    if arguments.speed_only:
        extra.append("--speed-only")
    records = []
    for case in arguments.cases:
        shape, layers, sequence, batch, *peers = case.split(":")
        record = {"case": case, "time": datetime.datetime.now().isoformat(timespec="seconds")}
        record["agoq"] = run_agoq(arguments.agoq, shape, int(layers), int(sequence), int(batch), extra)
        ours = record["agoq"]["result"]
        floor = f"{ours['share_of_floor']:.3f} of its floor, " if "share_of_floor" in ours else ""
        if "error" in ours:
            print(f"{case}: agoq: {ours['error']}", flush=True)
        else:
            print(f"{case}: agoq {ours['tokens_per_second']:.0f} tokens/s, MFU {ours['mfu']['causal']:.3f}, "
                  f"{floor}{ours['recompute_layers']} layers recomputed, arenas {ours['arena_bytes'] / 2**30:.1f} GiB, "
                  f"peak {ours['peak_bytes_measured'] / 2**30:.2f} GiB (predicted "
                  f"{ours['peak_bytes_predicted'] / 2**30:.2f})", flush=True)
        record["peers"] = []
        for mode in (peers[0].split(",") if peers else []):
            command = [sys.executable, str(HERE / "torch_llama.py"), f"{shape}:{layers}:{sequence}:{batch}:{mode}"]
            peer = run(command)
            record["peers"].append({"command": " ".join(command), "mode": mode, "result": peer})
            if "tok_s" in peer:
                ratio = ours["tokens_per_second"] / peer["tok_s"] if "error" not in ours else float("nan")
                print(f"{case}: PyTorch {mode} {peer['tok_s']} tokens/s, MFU {peer['mfu']}, "
                      f"{peer['peak_gib']} GiB: agoq is {ratio:.3f} times as fast", flush=True)
            else:
                print(f"{case}: PyTorch {mode}: {peer}", flush=True)
        records.append(record)
        pathlib.Path(arguments.out).write_text(json.dumps(records, indent=1))


main()

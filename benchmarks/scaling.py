#!/usr/bin/env python3
"""Data parallelism on the GPUs of one machine, or on its processors: one run of everything that docs/ranks.md reports.

usage: scaling.py [--agoq build/agoq] [--ranks 2,4,8] [--device cuda] [--out FILE]
                  [--ranks-test build/test/tests/ranks/ranks_test] [--no-peer]

On each number of ranks, under mpirun:
  equality   the tests of several ranks (./dev test builds them): losses of one rank, the same weights everywhere
  comm       `agoq bench comm`: QuanGrad and ZeRO-1 beside the library's sums
  weak       LLaMA3-8B's shape with 8 layers, 16,384 tokens per rank, 1 and 8 micro-batches, against the mean of the GPUs,
             each of which takes the steps of one rank alone at the same time as the others: they are not equally fast
  zero1      on the most ranks: all 32 layers, the optimizer sharded, the longest sequence that the plan allows
             without recomputation; beside it PyTorch's FSDP, which recomputes every layer
On processors (--device cpu) the shapes are the quickstart's, and PyTorch is left out.

Prints a line per figure, ends with a table and writes everything with its commands as JSON. On 8 H200 it is made to
take less than ten minutes.
"""
import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none"]
# mpirun refuses root, which containers are, without these two.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Runs:
    """Runs commands and keeps what they were and what came."""

    def __init__(self, out, timeout):
        self.out, self.timeout, self.records, self.begun = out, timeout, [], time.monotonic()
        self.lock = threading.Lock()  # commands may run at the same time

    def run(self, what, command, **environment):
        begun = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout,
                                  env={**os.environ, **ENVIRONMENT, **environment})
            text, status = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired:
            text, status = f"no end within {self.timeout} s", -1
        shown = [f"{key}={value}" for key, value in environment.items()] + [str(word) for word in command]
        record = {"what": what, "command": " ".join(shown).replace(str(ROOT) + "/", ""), "status": status,
                  "seconds": round(time.monotonic() - begun, 1), "result": parse(text)}
        with self.lock:
            self.records.append(record)
            self.write()
        return record

    def write(self):
        self.out.write_text(json.dumps({
            "date": datetime.date.today().isoformat(), "commit": commit(), "records": self.records}, indent=1))


def parse(text):
    """The JSON in a program's output, whole or a line of it; else its last lines."""
    for candidate in (text[text.find("{"):text.rfind("}") + 1], text[text.find("["):text.rfind("]") + 1],
                      *reversed(text.splitlines())):
        try:
            value = json.loads(candidate)
            if isinstance(value, (dict, list)):
                return value
        except json.JSONDecodeError:
            pass
    return {"output": text[-2000:]}


def commit():
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def on_ranks(ranks, command):
    return [*MPIRUN, "-np", str(ranks), *command]


def settings(values):
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def say(*words):
    print(*words, flush=True)


def failed(record):
    return record["status"] != 0 or "output" in record["result"]


def reason(record):
    return str(record["result"].get("output", record["result"]))[-300:].strip().replace("\n", " / ")


def equality(runs, ranks, test, device):
    record = runs.run(f"equality on {ranks}", on_ranks(ranks, [test]), AGOQ_TEST_DEVICE=device, OMP_NUM_THREADS="1")
    text = record["result"].get("output", "")
    passed = re.search(r"PASSED  \].*?(\d+) tests", text)
    say(f"{ranks} ranks: equality tests", f"passed ({passed[1]})" if passed and record["status"] == 0
        else "FAILED: " + reason(record))


def computed_bytes(elements, ranks):
    """What a rank sends of codes and scales, 4 bytes for 128 of them: the others' shares, and its own sums to each."""
    return 2 * (ranks - 1) * elements // ranks * 132 // 128


def comm(runs, ranks, agoq, device):
    command = [agoq, "bench", "comm", "--device", device, "--json"]
    record = runs.run(f"comm on {ranks}", on_ranks(ranks, command))
    if failed(record):
        return say(f"{ranks} ranks: bench comm: " + reason(record))
    by_size = {}
    for timing in record["result"]["variants"]:
        by_size.setdefault(timing["elements"], {})[timing["variant"]] = timing
    for elements, timings in by_size.items():
        say(f"{ranks} ranks, {elements} gradients: " + "; ".join(
            f"{name} {timing['seconds'] * 1e3:.3f} ms, {timing['wire_bytes']} bytes"
            for name, timing in timings.items()))
        ours = timings["QuanGrad all-reduce"]
        say(f"  QuanGrad's bytes are {ours['wire_bytes'] / computed_bytes(elements, ranks):.4f} of the computed")
        say(f"  QuanGrad takes {ours['time_over_fp32']:.3f} of FP32's time and {ours['time_over_bf16']:.3f} of BF16's")


def step(runs, what, agoq, ranks, config, values, arguments=(), **environment):
    command = [agoq, "bench", "step", str(ROOT / "examples" / config), "--json", *settings(values), *arguments]
    record = runs.run(what, on_ranks(ranks, command) if ranks > 1 else command, **environment)
    if failed(record):
        say(f"{what}: " + reason(record))
        return None
    result = record["result"]
    exposed = result.get("exposed_communication_seconds_median", 0.0)
    say(f"{what}: {result['tokens_per_second']:.0f} tokens/s, step {result['step_seconds_median'] * 1e3:.1f} ms, "
        f"exposed {exposed * 1e3:.1f} ms ({exposed / result['step_seconds_median']:.2%}), the fastest rank waits "
        f"{result.get('rank_wait_seconds_median', 0.0) * 1e3:.1f} ms, peak measured / predicted "
        f"{result['peak_bytes_measured'] / max(1, result['peak_bytes_predicted']):.3f}")
    return result


def alone_on_each(devices, measure):
    """Tokens/s of one rank on each of so many GPUs, at the same time; fewer where one fails."""
    with concurrent.futures.ThreadPoolExecutor(devices) as pool:
        results = pool.map(lambda gpu: measure(f", GPU {gpu}", CUDA_VISIBLE_DEVICES=str(gpu)), range(devices))
        return [result["tokens_per_second"] for result in results if result]


def weak(runs, agoq, all_ranks, device):
    cuda = device == "cuda"
    config = "llama3-8b.toml" if cuda else "quickstart.toml"
    shape = {"model.layers": 8, "train.sequence": 16384, "train.micro_batch": 1} if cuda else {"train.micro_batch": 1}
    table = []
    for micro_batches in (1, 8):

        def measure(ranks, where="", **environment):
            values = {**shape, "run.device": device, "train.micro_batches": micro_batches * ranks}
            if not cuda:
                values["run.threads"] = 1
            return step(runs, f"weak scaling, {micro_batches} micro-batches a rank, {ranks} ranks{where}", agoq, ranks,
                        config, values, ["--steps", "10" if micro_batches == 1 else "4", "--warmup", "2"],
                        **environment)

        if cuda:
            speeds = alone_on_each(max(all_ranks), functools.partial(measure, 1))
        else:
            speeds = [result["tokens_per_second"] for result in [measure(1)] if result]
        for ranks in all_ranks:
            result = measure(ranks)
            if not speeds or result is None:
                continue
            alone = sum(speeds[:ranks]) / len(speeds[:ranks])
            speed = result["tokens_per_second"]
            exposed = result.get("exposed_communication_seconds_median", 0.0) / result["step_seconds_median"]
            wait = result.get("rank_wait_seconds_median", 0.0) / result["step_seconds_median"]
            table.append((ranks, micro_batches, speed, speed / alone / ranks, speed / min(speeds[:ranks]) / ranks,
                          exposed, wait))
    return table


def longest_sequence(runs, agoq, ranks, values):
    """The most tokens, in steps of 8,192, for which nothing has to be recomputed."""
    for sequence in range(131072, 0, -8192):
        command = [agoq, "plan", str(ROOT / "examples" / "llama3-8b.toml"), "--json",
                   *settings({**values, "parallel.ranks": ranks, "train.sequence": sequence})]
        record = runs.run(f"plan of {sequence} tokens", command)
        plan = record["result"]
        room = plan.get("device", {}).get("total_bytes", 0)
        if record["status"] == 0 and plan["peak_bytes_predicted"] < 0.985 * room:
            return sequence
        runs.records.pop()
    return None


def zero1(runs, agoq, ranks, peer):
    values = {"run.device": "cuda", "train.micro_batch": 1, "train.micro_batches": ranks,
              "parallel.shard_optimizer": "true"}
    sequence = longest_sequence(runs, agoq, ranks, values)
    if sequence is None:
        return say("ZeRO-1: no sequence fits")
    result = step(runs, f"32 layers, ZeRO-1, {sequence} tokens per rank, {ranks} ranks", agoq, ranks,
                  "llama3-8b.toml", {**values, "train.sequence": sequence}, ["--steps", "4", "--warmup", "1"])
    if result:
        say(f"  {result['tokens_per_second'] / ranks:.0f} tokens/s per rank")
    if peer:
        case = f"llama3-8b:32:{sequence}:1:fsdp+ckpt"
        record = runs.run(f"PyTorch FSDP, {case}", ["torchrun", "--standalone", f"--nproc-per-node={ranks}",
                                                    str(HERE / "peers" / "torch_llama.py"), case])
        say(f"PyTorch FSDP, every layer recomputed, {sequence} tokens per rank: {record['result']}")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--agoq", default="build/agoq")
    parser.add_argument("--ranks-test", default="build/test/tests/ranks/ranks_test")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="scaling.json")
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args()
    all_ranks = [int(number) for number in given.ranks.split(",")]
    for program in (given.agoq, given.ranks_test):
        if not pathlib.Path(program).exists():
            sys.exit(f"scaling.py: {program} is not there: ./dev build makes the program and ./dev test the tests")
    runs = Runs(pathlib.Path(given.out), 240 if given.device == "cuda" else 1200)
    for ranks in all_ranks:
        equality(runs, ranks, given.ranks_test, given.device)
        comm(runs, ranks, given.agoq, given.device)
    table = weak(runs, given.agoq, all_ranks, given.device)
    if given.device == "cuda":
        zero1(runs, given.agoq, max(all_ranks), not given.no_peer)
    say("\nranks  micro-batches  tokens/s  of perfect  of the slowest GPU's  exposed  first waits for last")
    for ranks, micro_batches, speed, share, of_slowest, exposed, wait in table:
        say(f"{ranks:5d}  {micro_batches:13d}  {speed:8.0f}  {share:10.3f}  {of_slowest:20.3f}  {exposed:7.2%}  {wait:19.2%}")
    say(f"{given.out}: {len(runs.records)} runs in {time.monotonic() - runs.begun:.0f} s")


main()

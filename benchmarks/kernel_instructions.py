#!/usr/bin/env python3
"""Counts the instructions of the memory-bound operations and prints the table of instruction_counts.cpp.

    benchmarks/kernel_instructions.py [--agoq build/agoq] [--ncu ncu] [OPERATION...]

Nsight Compute runs `agoq bench kernels --operation NAME` once per operation and counts one call of each
set of its operands: every kernel between begin_profile and end_profile, divided by the number of calls.
The counters need the right to read them (root, or NVreg_RestrictProfilingToAdminUsers=0). Counts do not
depend on the clock, nor on the time that profiling adds. With --sass it also prints what the operation
spends its instructions on, by opcode.
"""
import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile

OPERATIONS = [
    "residual_norm_forward", "norm_forward_saved", "norm_backward_saved", "swiglu_forward_save",
    "swiglu_backward_saved", "quantize", "dequantize", "accumulate", "adamw_update",
    "adamw_update_pieces", "sums_of_squares", "add_pieces", "pieces_sums_of_squares", "rope",
    "embedding_forward", "embedding_backward", "embedding_backward_log_uniform", "cross_entropy",
]
COUNTERS = {
    "issued": "smsp__inst_executed.sum",
    "alu": "smsp__inst_executed_pipe_alu.sum",
    "fma_heavy": "smsp__inst_executed_pipe_fmaheavy.sum",
    "fma_lite": "smsp__inst_executed_pipe_fmalite.sum",
    "xu": "smsp__inst_executed_pipe_xu.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts.sum",
}


def profile(arguments, operation, extra):
    command = [arguments.ncu, "--clock-control", "none", "--profile-from-start", "off", *extra,
               arguments.agoq, "bench", "kernels", "--device", "cuda", "--operation", operation, "--json"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rows_of(text):
    """The CSV that ncu prints, without what it and the program print around it."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return list(csv.DictReader(io.StringIO("\n".join(lines))))


def number(text):
    return float(text.replace(",", ""))


def count(arguments, operation):
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        printed = profile(arguments, operation, ["--metrics", ",".join(COUNTERS.values()), "--csv",
                                                 "--print-units", "base", "--log-file", log.name])
        rows = rows_of(open(log.name).read())
    # The copy comes first in the benchmark's list.
    measured = json.loads(printed[printed.index("{"):])["operations"][-1]
    calls = measured["operand_sets"]
    totals = {name: sum(number(row["Metric Value"]) for row in rows if row["Metric Name"] == metric) / calls
              for name, metric in COUNTERS.items()}
    return measured["bytes"], totals


def opcodes(arguments, operation):
    """Share of each opcode in the instructions executed."""
    report = tempfile.mkdtemp() + "/report"
    profile(arguments, operation, ["--section", "SourceCounters", "-o", report, "-f"])
    text = subprocess.run([arguments.ncu, "--import", report + ".ncu-rep", "--page", "source", "--csv"],
                          check=True, capture_output=True, text=True).stdout
    totals, header = {}, None
    for line in csv.reader(io.StringIO(text)):
        if "Source" in line and "Instructions Executed" in line:
            header = {name: i for i, name in enumerate(line)}
        elif header and len(line) == len(header):
            words = line[header["Source"]].split()
            words = words[1:] if words and words[0].startswith("@") else words
            try:
                executed = float(line[header["Instructions Executed"]])
            except ValueError:
                continue
            if words:
                name = words[0].split(".")[0]
                totals[name] = totals.get(name, 0) + executed
    all_of_them = sum(totals.values()) or 1
    return [(name, executed / all_of_them) for name, executed in
            sorted(totals.items(), key=lambda item: -item[1])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION")
    parser.add_argument("--agoq", default="build/agoq")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--sass", action="store_true", help="print the opcodes too")
    arguments = parser.parse_args()
    for operation in arguments.operations or OPERATIONS:
        try:
            size, totals = count(arguments, operation)
        except (subprocess.CalledProcessError, KeyError, ValueError) as error:
            sys.exit(f"{operation}: {error}\n{getattr(error, 'stderr', '') or getattr(error, 'stdout', '')}")
        figures = ", ".join(f"{totals[name]:.4g}" for name in COUNTERS)
        print(f'    {{"{operation}", {size}, {figures}}},', flush=True)
        if arguments.sass:
            print("    // " + ", ".join(f"{name} {100 * share:.0f} %"
                                        for name, share in opcodes(arguments, operation)[:12]), flush=True)


if __name__ == "__main__":
    main()

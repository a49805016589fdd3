#!/usr/bin/env python3
"""Learning with AGoQ against keeping everything: the same model on the same batches under each setting.

usage: learning.py [--agoq build/agoq] [--corpus FOLDER|FILE.tar.xz] [--runs runs/learning] [--report FILE.json]
                   [--gpus 0,1 | --gpus cpu] [--only NAME,...] [--set KEY=VALUE]... [--budget SECONDS]
                   [--commit HASH] [--hardware TEXT] [--collect] [--with EARLIER_REPORT.json]

Trains with `agoq train`, one run per GPU at a time, evaluates each run on every validation token, and measures the
fidelity of stored activations on the model that `keep` trained. What is finished is not run again, and a run that a
signal stopped goes on from its checkpoint. --budget: start nothing that would, as long as the longest finished run,
end later than so many seconds after the start. --collect: run nothing, only write the report of what is there.
--with: take what is not in the runs folder from an earlier report. A run that ends because its numbers are no longer
finite has diverged, which is a result and not run again.

The report is a JSON file, beside it the curves as SVG and, printed, a table.
"""
import argparse
import datetime
import json
import math
import os
import pathlib
import queue
import shlex
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
FP32_MOMENTS = "optimizer.moments_8bit=false"
KEEP = ["activations.policy=keep", "gradients.format=fp32", FP32_MOMENTS]
# In the order in which they start: the comparison that matters first.
SETTINGS = {
    "keep": KEEP,
    "agoq": [],
    "keep-seed2": [*KEEP, "run.seed=2"],
    "agoq-fp4-128": ["activations.format=bnbfp4/128/fp32"],
    "uniform": ["activations.policy=uniform"],
    "keep-8bit-gradients": ["activations.policy=keep", FP32_MOMENTS],
    "agoq-fp32-gradients": ["gradients.format=fp32", FP32_MOMENTS],
}
LABELS = {
    "keep": "everything kept, FP32 gradients and moments",
    "keep-seed2": "the same from other initial weights",
    "agoq": "AGoQ: NF4/32 activations, 8-bit gradients and moments",
    "agoq-fp4-128": "AGoQ with the paper's FP4/128 activations",
    "uniform": "AGoQ with every activation in NF4/32, attention's too",
    "keep-8bit-gradients": "everything kept, 8-bit gradients, FP32 moments",
    "agoq-fp32-gradients": "AGoQ activations, FP32 gradients and moments",
}
COLOURS = {"keep": "#000000", "keep-seed2": "#999999", "agoq": "#0072b2", "agoq-fp4-128": "#d55e00",
           "uniform": "#cc79a7", "keep-8bit-gradients": "#009e73", "agoq-fp32-gradients": "#56b4e9"}
FIDELITY = "fidelity"  # a job beside the settings
TOLERANCE = 0.005  # of keep's validation loss, or the gap between the seeds if that is larger


def fail(message):
    sys.exit(f"learning.py: {message}")


DIVERGED = "diverged.json"


def unpacked(corpus, runs):
    """The folder of the corpus, which may come packed."""
    if corpus.is_dir():
        return corpus
    if not corpus.is_file():
        fail(f"{corpus} does not exist: make it with {HERE.name}/make_corpus.py, or give --corpus")
    folder = runs / "corpus"
    if not folder.exists():
        unpacking = runs / "corpus.unpacking"
        unpacking.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-C", str(unpacking), "-xf", str(corpus)], check=True)
        unpacking.rename(folder)
    return folder


class Runner:
    def __init__(self, arguments, corpus):
        self.arguments = arguments
        self.corpus = corpus
        self.start = time.monotonic()
        self.jobs = queue.Queue()
        self.lock = threading.Lock()
        self.running = set()
        self.longest = 0.0  # seconds of a finished run
        self.failed = []

    def directory(self, name):
        return self.arguments.runs / name

    def train_command(self, name):
        settings = [*SETTINGS[name], f"data.paths={self.corpus}", f"run.directory={self.directory(name)}",
                    f"run.device={'cpu' if 'cpu' in self.arguments.gpus else 'cuda'}", *self.arguments.set]
        command = [self.arguments.agoq, "train", str(self.arguments.config)]
        for setting in settings:
            command += ["--set", setting]
        return command

    def is_finished(self, name):
        """Whether the run ended under the settings it would be started with now."""
        directory = self.directory(name)
        if name == FIDELITY:
            # Of the run that is there now.
            results = directory / "fidelity.json", self.directory("keep") / "evaluation.json"
            return all(file.exists() for file in results) and results[0].stat().st_mtime >= results[1].stat().st_mtime
        if not any((directory / file).exists() for file in ("evaluation.json", DIVERGED)):
            return False
        command = json.loads((directory / "command.json").read_text())
        if command[1:] != self.train_command(name)[1:]:
            fail(f"{directory} was made with other settings: remove it, or choose other --runs")
        return True

    def run(self, gpu, command, log, out=None):
        environment = dict(os.environ)
        if gpu != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with open(log, "ab") as log_file, open(out or log, "wb" if out else "ab") as out_file:
            return subprocess.run(command, stdout=out_file, stderr=log_file, env=environment).returncode == 0

    def train(self, name, gpu):
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True)
        command = self.train_command(name)
        (directory / "command.json").write_text(json.dumps(command))
        log = directory / "log.txt"
        if not (directory / "summary.json").exists():
            how = []
            if any((directory / "checkpoints").glob("step-*")):
                how = ["--resume"]
            elif (directory / "config.toml").exists():
                how = ["--overwrite"]
            if not self.run(gpu, command + how, log) or not (directory / "summary.json").exists():
                return self.has_diverged(directory)
        return self.write_json(name, gpu, ["eval", str(directory), "--json"], "evaluation.json")

    def has_diverged(self, directory):
        """Whether the run ended because a number was not finite; then keeps what it said."""
        message = self.tail(directory.name).removeprefix(": ")
        if "must be finite" not in message and "not finite" not in message:
            return False
        (directory / DIVERGED).write_text(json.dumps({"message": message}))
        return True

    def fidelity(self, gpu):
        if not self.is_finished("keep"):
            return False
        self.directory(FIDELITY).mkdir(parents=True, exist_ok=True)
        return self.write_json(FIDELITY, gpu, ["fidelity", str(self.directory("keep")), "--json"], "fidelity.json")

    def write_json(self, name, gpu, command, file):
        """What the command prints, as a file that is there only when it is whole."""
        path = self.directory(name) / file
        partial = path.with_suffix(".partial")
        if not self.run(gpu, [self.arguments.agoq, *command], self.directory(name) / "log.txt", partial):
            return False
        partial.rename(path)
        return True

    def work(self, gpu):
        while True:
            with self.lock:
                if self.jobs.empty():
                    return
                name = self.jobs.get()
                self.running.add(name)
            begin = time.monotonic()
            left = self.arguments.budget - (begin - self.start)
            if left < self.longest:
                print(f"{name}: not started, {left:.0f} s are left of the budget", flush=True)
                self.running.discard(name)
                continue
            print(f"{name}: starts on {gpu}", flush=True)
            # Fidelity comes last and needs keep, which may still run on another GPU.
            while name == FIDELITY and "keep" in self.running:
                time.sleep(1)
            done = self.fidelity(gpu) if name == FIDELITY else self.train(name, gpu)
            self.running.discard(name)
            seconds = time.monotonic() - begin
            with self.lock:
                if done and name != FIDELITY:
                    self.longest = max(self.longest, seconds)
                if not done:
                    self.failed.append(name)
            print(f"{name}: {'done' if done else 'FAILED'} after {seconds:.0f} s{'' if done else self.tail(name)}", flush=True)

    def tail(self, name):
        log = self.directory(name) / "log.txt"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f": {lines[-1]}" if lines else f": see {log}"

    def run_all(self, names):
        for name in names:
            if self.is_finished(name):
                print(f"{name}: finished before", flush=True)
            else:
                self.jobs.put(name)
        workers = [threading.Thread(target=self.work, args=(gpu,)) for gpu in self.arguments.gpus]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


# --- the report ---

def read_json(path):
    return json.loads(path.read_text()) if path.exists() else None


def read_run(directory):
    """What a run left: its curves, and summary and evaluation, or where it diverged."""
    steps, validations = [], []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        (validations if "validation_loss" in entry else steps).append(entry)
    events = {}
    for entry in steps:
        for counts in entry.get("numerics", {}).values():
            for name, count in counts.items():
                events[name] = events.get(name, 0) + count
    return {
        "command": shlex.join(json.loads((directory / "command.json").read_text())),
        "summary": read_json(directory / "summary.json"),
        "evaluation": read_json(directory / "evaluation.json"),
        "diverged": read_json(directory / DIVERGED),
        "numerics": events,
        "validation": {"step": [v["step"] for v in validations], "loss": [v["validation_loss"] for v in validations]},
        "loss": [float(f"{s['loss']:.6g}") for s in steps],
        "gradient_norm": [float(f"{s['gradient_norm']:.5g}") for s in steps],
    }


def comparison(runs):
    """Differences to keep, the gap between the seeds, and whether AGoQ stays within what is allowed."""
    losses = {name: run["evaluation"]["loss"] for name, run in runs.items() if run["evaluation"]}
    if "keep" not in losses:
        return None
    keep = losses["keep"]
    result = {"validation_loss": losses, "above_keep": {name: loss / keep - 1 for name, loss in losses.items()}}
    if "keep-seed2" in losses:
        result["gap_between_seeds"] = abs(losses["keep-seed2"] / keep - 1)
        result["allowed_above_keep"] = max(TOLERANCE, result["gap_between_seeds"])
        if "agoq" in losses:
            result["agoq_is_within"] = result["above_keep"]["agoq"] <= result["allowed_above_keep"]
    return result


def table(runs, compared):
    rows = [["", "validation loss", "to keep", "tokens/s", "saved, MiB", "gradients, MiB", "moments, MiB", "peak, GiB"]]
    mib = lambda count: f"{count / 2**20:.0f}"
    for name, run in runs.items():
        summary = run["summary"]
        if not run["evaluation"]:
            rows.append([name, f"diverged after {len(run['loss'])} steps", *[""] * (len(rows[0]) - 2)])
            continue
        above = f"{100 * compared['above_keep'][name]:+.2f} %" if compared else ""
        rows.append([name, f"{run['evaluation']['loss']:.4f}", above, f"{summary['tokens_per_second']:.0f}",
                     mib(summary["saved_activation_bytes"]), mib(summary["main_gradient_bytes"]),
                     mib(summary["moment_bytes"]), f"{summary['peak_bytes_measured'] / 2**30:.2f}"])
    rows.insert(1, ["---"] * len(rows[0]))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if compared and "gap_between_seeds" in compared:
        lines += ["", f"gap between the seeds {100 * compared['gap_between_seeds']:.2f} %, allowed above keep "
                      f"{100 * compared['allowed_above_keep']:.2f} %"]
    return "\n".join(lines)


def smoothed(values, window):
    """Means of the last `window` values: as many points, none ahead of its time."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        result.append(total / min(i + 1, window))
    return result


def ticks(low, high):
    """Round numbers between low and high."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 6)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def panel(title, curves, finished, left, top, width, height, clip):
    """An SVG group: curves {name: [(x, y)]}; the y axis shows what lies between the shares `clip` of the values of the
    finished runs."""
    values = sorted(y for name, points in curves.items() if name in finished for _, y in points)
    low, high = values[int(clip[0] * (len(values) - 1))], values[int(clip[1] * (len(values) - 1))]
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    last = max(x for points in curves.values() for x, _ in points)
    first = min(1, last - 1)
    x_of = lambda x: left + width * (x - first) / (last - first)
    y_of = lambda y: top + height * (1 - (min(max(y, low), high) - low) / (high - low))
    parts = [f'<text x="{left}" y="{top - 10}" font-weight="bold">{title}</text>',
             f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>']
    for tick in ticks(low, high):
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in ticks(first, last):
        parts.append(f'<text x="{x_of(tick):.1f}" y="{top + height + 16}" text-anchor="middle">{tick:g}</text>')
    for name, points in curves.items():
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.2"/>')
    return parts


def picture(runs):
    """Training loss, its distance from keep's on the same batch, and gradient norms."""
    finished = [name for name, run in runs.items() if run["evaluation"]] or list(runs)
    window = max(1, min(len(runs[name]["loss"]) for name in finished) // 40)
    numbered = lambda values: list(enumerate(values, start=1))
    loss = {name: numbered(smoothed(run["loss"], window)) for name, run in runs.items()}
    norm = {name: numbered(smoothed(run["gradient_norm"], window)) for name, run in runs.items()}
    left, width, height = 70, 860, 250
    tops = [70]
    parts = panel(f"training loss, nats per byte (mean of {window} steps)", loss, finished, left, tops[0], width, height, (0, .97))
    if "keep" in runs and len(runs) > 1:
        keep = runs["keep"]["loss"]
        # The first steps, where the loss falls by half, would set the scale: only the values behind them do.
        above = {name: numbered(smoothed([100 * (a / b - 1) for a, b in zip(run["loss"], keep)], 2 * window))[window:]
                 for name, run in runs.items() if name != "keep"}
        tops.append(tops[-1] + height + 70)
        parts += panel(f"training loss above keep's on the same batch, % (mean of {2 * window} steps)", above, finished, left,
                       tops[-1], width, height, (.02, .98))
    tops.append(tops[-1] + height + 70)
    parts += panel(f"gradient norm before clipping (mean of {window} steps)", norm, finished, left, tops[-1], width, height, (0, .98))
    bottom = tops[-1] + height + 50
    parts.append(f'<text x="{left + width / 2}" y="{bottom - 14}" text-anchor="middle">step</text>')
    for row, name in enumerate(runs):
        y = bottom + 14 + 18 * row
        parts.append(f'<line x1="{left}" x2="{left + 30}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[name]}" '
                     f'stroke-width="3"/><text x="{left + 40}" y="{y}">{name}: {LABELS[name]}</text>')
    total = bottom + 20 + 18 * len(runs)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" height="{total}" '
        'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def hardware(agoq):
    """What the machine says of itself."""
    found = {}
    for key, command in {
            "info": [agoq, "info", "--json"],
            "gpus": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"],
    }.items():
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
            found[key] = json.loads(text) if key == "info" else text.splitlines()
        except (OSError, ValueError, subprocess.TimeoutExpired):
            found[key] = None
    return found


def write_report(arguments, names):
    earlier = read_json(arguments.earlier) if arguments.earlier else {"runs": {}, "fidelity": None}
    runs = {}
    for name in names:
        if any((arguments.runs / name / file).exists() for file in ("evaluation.json", DIVERGED)):
            runs[name] = read_run(arguments.runs / name)
        elif name in earlier["runs"]:
            runs[name] = {"diverged": None, **earlier["runs"][name]}
    if not runs:
        fail(f"no run in {arguments.runs} is finished")
    compared = comparison(runs)
    fidelity = arguments.runs / FIDELITY / "fidelity.json"
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit,
        "hardware": arguments.hardware,
        "machine": hardware(arguments.agoq),
        "command": shlex.join(sys.argv),
        "comparison": compared,
        "labels": {name: LABELS[name] for name in runs},
        "runs": runs,
        "fidelity": read_json(fidelity) or earlier["fidelity"],
    }
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(as_lines(report) + "\n")
    arguments.report.with_suffix(".svg").write_text(picture(runs))
    print(f"\n{table(runs, compared)}\n\n{arguments.report}, {arguments.report.with_suffix('.svg')}")


def as_lines(value, indent=0):
    """JSON with an entry per line; lists of numbers, and objects without any object or list, on one."""
    pad = " " * (indent + 1)
    plain = lambda item: not isinstance(item, (dict, list))
    if isinstance(value, dict) and value and not all(map(plain, value.values())):
        items = [f"{pad}{json.dumps(key)}: {as_lines(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    if isinstance(value, list) and not all(map(plain, value)):
        return "[\n" + ",\n".join(pad + as_lines(item, indent + 1) for item in value) + "\n" + " " * indent + "]"
    return json.dumps(value, ensure_ascii=False)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--agoq", default="build/agoq")
    parser.add_argument("--config", default=HERE / "llama-107m.toml", type=pathlib.Path)
    parser.add_argument("--corpus", default=".data/learning", type=pathlib.Path)
    parser.add_argument("--runs", default="runs/learning", type=pathlib.Path)
    parser.add_argument("--report", default="runs/learning/report.json", type=pathlib.Path)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--only", default="")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--budget", default=math.inf, type=float)
    parser.add_argument("--commit", default="")
    parser.add_argument("--hardware", default="")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--with", dest="earlier", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.gpus = arguments.gpus.split(",")
    names = arguments.only.split(",") if arguments.only else [*SETTINGS, FIDELITY]
    for name in names:
        if name not in SETTINGS and name != FIDELITY:
            fail(f"no setting is called '{name}'; there are {', '.join([*SETTINGS, FIDELITY])}")
    failed = []
    if not arguments.collect:
        runner = Runner(arguments, unpacked(arguments.corpus, arguments.runs))
        runner.run_all(names)
        failed = runner.failed
    write_report(arguments, SETTINGS)
    if failed:
        fail(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

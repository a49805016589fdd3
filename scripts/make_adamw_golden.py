#!/usr/bin/env python3
"""Writes tests/golden/adamw.txt: trajectories of PyTorch's AdamW in FP32 and FP64.

Made with Python 3.12, torch 2.9 and numpy (the exact version stands in the file). The product and its
tests need neither; run this only to make the file anew:

    python scripts/make_adamw_golden.py > tests/golden/adamw.txt

Layout: comment lines start with '#'. Then, each on a line of its own,
    rows columns steps beta1 beta2 epsilon weight_decay
    the initial weights
and for every step
    the learning rate, the gradient, the FP32 weights, the FP64 weights after it.
"""

import sys

import numpy
import torch

ROWS, COLUMNS, STEPS = 3, 5, 24
BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.95, 1e-8, 0.1


def numbers(values):
    return " ".join(f"{value:.17g}" for value in values.flatten().tolist())


def main():
    generator = numpy.random.default_rng(20240229)
    initial = generator.standard_normal((ROWS, COLUMNS)).astype(numpy.float32)
    # Columns of very different gradient sizes, one of them with a gradient in every fourth step only.
    size = numpy.array([1.0, 1e-3, 1e-6, 1e2, 1.0], dtype=numpy.float32)

    weights = {}
    optimizers = {}
    for dtype in (torch.float32, torch.float64):
        weights[dtype] = torch.nn.Parameter(torch.tensor(initial, dtype=dtype))
        optimizers[dtype] = torch.optim.AdamW(
            [weights[dtype]], lr=1.0, betas=(BETA1, BETA2), eps=EPSILON, weight_decay=WEIGHT_DECAY,
            foreach=False, fused=False)

    print(f"# torch {torch.__version__}, numpy {numpy.__version__}; scripts/make_adamw_golden.py")
    print(ROWS, COLUMNS, STEPS, BETA1, BETA2, EPSILON, WEIGHT_DECAY)
    print(numbers(initial))
    for step in range(1, STEPS + 1):
        rate = 2e-3 * min(1.0, step / 4)
        gradient = (generator.standard_normal((ROWS, COLUMNS)) + 0.5).astype(numpy.float32) * size
        if step % 4 != 1:
            gradient[:, 4] = 0.0
        print(repr(rate))
        print(numbers(gradient))
        for dtype, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = rate
            weights[dtype].grad = torch.tensor(gradient, dtype=dtype)
            optimizer.step()
            print(numbers(weights[dtype].detach().numpy()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes tests/golden/dynamic_map.txt: the 256 values of bitsandbytes' create_dynamic_map, signed
and unsigned, one value a line, as hexadecimal floats. Made with bitsandbytes 0.50.2, torch 2.9.0.

Usage: python scripts/make_dynamic_map_golden.py > tests/golden/dynamic_map.txt
"""

import bitsandbytes
import torch
from bitsandbytes.functional import create_dynamic_map

print(f"# bitsandbytes {bitsandbytes.__version__} create_dynamic_map, torch {torch.__version__.split('+')[0]}")
for signed in (True, False):
    print("signed" if signed else "unsigned")
    for value in create_dynamic_map(signed=signed).tolist():
        print(value.hex())

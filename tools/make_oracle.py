#!/usr/bin/env python3
"""Writes an oracle model, whose greedy continuation is known (luce/bench/oracle_model.py).

    python tools/make_oracle.py --shape 0.8b oracle-0.8b.gguf
"""

from luce.bench.oracle_model import main

if __name__ == "__main__":
    main()

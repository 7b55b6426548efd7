"""Times the first token of long prompts of the 27b oracle: read whole, and a tenth that a 0.8b oracle chose."""
import subprocess, sys, time
from pathlib import Path
import numpy as np
import op_run
from luce import native as _native
from luce.decode.request import Compressed
from luce.files.tokenizer import Tokenizer
from luce.native import Engine, File, Model, Prompt
from luce.native.structs import EngineParams
from luce.prompts.scorer import Scorer

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
paths = {shape: folder / f"{shape}.gguf" for shape in ("27b", "0.8b")}
for shape, path in paths.items():
    if not path.exists():
        subprocess.run([sys.executable, "tools/make_oracle.py", "--shape", shape, str(path)], check=True)
native = _native.default()
op_run.score_on_gpus(native, True)

def read(engine, sequence, tokens, gaps=()):
    sequence.reset()
    chunk, began = engine.info.n_chunk, time.perf_counter()
    for at in range(0, len(tokens), chunk):
        end = min(at + chunk, len(tokens))
        here = tuple((g - at, n) for g, n in gaps if at <= g < end)
        engine.prefill([Prompt(sequence, tokens[at:end], end == len(tokens), (), here)])
    return time.perf_counter() - began

with File(paths["27b"]) as file:
    tokenizer = Tokenizer(file.kv)
    breaks = next(t for t in range(tokenizer.n_vocab) if tokenizer.bytes_of(t).endswith(b"\n"))
    tokens = np.random.default_rng(2).integers(300, 20000, 100_000).tolist()
    tokens[::12] = [breaks] * len(tokens[::12])
    with Model(file) as model, Engine(model, EngineParams(n_ctx=101_000, gaps=1)) as engine, \
         Scorer(paths["0.8b"], tokenizer, file.kv, 100_000) as scorer, engine.sequence() as sequence:
        for n in (4_096, 32_000, 100_000):
            prompt = tokens[:n]
            scorer.scores(prompt[:2000])
            began = time.perf_counter()
            scores = scorer.scores(prompt)
            scored = time.perf_counter() - began
            kept = scorer.compressed(prompt, 0.1)
            chosen = time.perf_counter() - began
            part = read(engine, sequence, kept.of(prompt), kept.gaps)
            whole = read(engine, sequence, prompt)
            print(f"{n} tokens: whole {whole:.2f} s; scores {scored:.2f} s, chosen after {chosen:.2f} s, "
                  f"{kept.read} read in {part:.2f} s: {whole / (chosen + part):.1f} times sooner; "
                  f"finite {np.isfinite(scores).all()}, sum {scores.sum():.3f}", flush=True)

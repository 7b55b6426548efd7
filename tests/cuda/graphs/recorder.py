"""Records what steps would launch on an H200 where there is no GPU.

    PYTHONPATH=tests:tests/support python -m cuda.graphs.recorder OUT [MODEL ..]

The core is compiled with CUDA on, against a pretended device (pretended.h). Each launcher of native/kernels is
replaced by one that writes down its arguments; that is made here of the headers that declare them. Models have
the shapes of real ones and no weights. For each there are two lists of all its steps:

OUT/MODEL.launches  what the device is asked for: each of luce's ops with its place ("#12", counted in a step), its
    bytes and the arguments of its launches, each of ggml's ops with its sources and params. Equal lists compute
    the same.
OUT/MODEL.nodes     the graph: bytes of the compute buffer; each node's type, shape, sources and params.

A pointer is written as the tensor that it points into and the bytes from there on: "output.weight", "#12+256". One
into a tensor that its op does not name as a source is marked. OUT/launches.txt is the short form of all lists.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import tiny
import tiny_dflash
import tiny_dflash2
import tiny_gemma4
from cuda.as_cpp import as_cpp, copy
from hollow import write_without_weights

import luce
from luce.bench.oracle_tokenizer import add_tokenizer
from luce.convert import gemma4_layout, hf_dflash, qwen35_layout

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES, KERNELS, EMULATED = ROOT / "native/src", ROOT / "native/kernels", ROOT / "tests/cuda/emulated"

# ---- models --------------------------------------------------------------------------------------------------

Types = Callable[[str], str]
QType = gguf.GGMLQuantizationType


def all_of(kind: str, others: Mapping[str, str] | None = None) -> Types:
    """Matrices of one type, but for those whose names have a part of `others`."""

    def type_of(name: str) -> str:
        if not (tiny.quantizable(name) and tiny_gemma4.quantizable(name)):
            return "F32"
        return next((other for part, other in (others or {}).items() if part in name), kind)

    return type_of


@dataclass(frozen=True)
class Case:
    """A model, and what an engine opens of it. Its files hold no weights."""

    config: tiny.Config | gemma4_layout.Config
    type_of: Types
    kv_type: str = "F16"
    drafter: hf_dflash.DFlash | None = None
    drafter_own: tuple[str, ...] = ()
    more: tiny_dflash2.Parts = tiny_dflash2.Parts()
    assistant: gemma4_layout.Config | None = None
    options: dict[str, int] = field(default_factory=dict)


SMALL = tiny.Config(n_embd=256, n_ff=512, n_v_head=8, state_size=128, head_dim=128, n_ctx=8192, n_nextn=1,
                    n_layer=3, recurrent=(True, False, True))  # fmt: skip
# Shapes of the 27b and of the 35b-a3b, but for their vocabulary, and as many layers as have all neighbours.
LARGE = tiny.Config(
    n_layer=4, recurrent=(True, True, False, True), n_embd=5120, n_ff=17408, n_head=24, n_head_kv=4, head_dim=256,
    rope_dim=64, n_k_head=16, n_v_head=48, state_size=128, n_vocab=4096, n_ctx=8192, n_nextn=1,
)  # fmt: skip
MIXTURE = replace(
    LARGE, n_embd=2048, n_head=16, n_head_kv=2, n_v_head=32,
    n_expert=256, n_expert_used=8, n_ff_expert=512, n_ff_shared=512,
)  # fmt: skip
DRAFTER = tiny_dflash.drafter(
    LARGE, n_ff=17408, n_head=32, n_head_kv=8, head_dim=128, rope_dim=128, causal=(True, False),
    sliding=(True, False), window=2048, target_layer_ids=(0, 1, 3),
)  # fmt: skip
DRAFTER_OF_SMALL = tiny_dflash.drafter(
    SMALL, n_ff=512, head_dim=128, rope_dim=128, block_size=8, target_layer_ids=(0, 1)
)
K_QUANTS = all_of(
    "Q4_K", {"output": "Q6_K", "ffn_down": "Q6_K", "attn_v": "Q8_0", "ssm_alpha": "F32", "ssm_beta": "F32"}
)
# Shapes of published Gemma 4 models, but for their vocabulary, and of their layers those that have all neighbours.
GEMMA4 = {
    name: replace(config, sliding=sliding, n_vocab=4096, n_ctx=8192, n_shared_kv=n_shared)
    for name, sliding, n_shared, config in (
        (name, sliding, n_shared, tiny_gemma4.PUBLISHED[name])
        for name, sliding, n_shared in (
            ("31B", (True, True, False), 0),
            ("26B-A4B", (True, False), 0),
            ("E2B", (True, False, True, False), 2),
        )
    )
}
ASSISTANT = replace(tiny_gemma4.PUBLISHED["31B-assistant"], n_vocab=4096, n_ctx=8192)
ASSISTANT_OF_E2B = replace(
    ASSISTANT, n_embd=256, n_ff=2048, n_head=4, n_head_kv=1, n_head_kv_swa=1, window=512, n_embd_out=1536, v_is_k=False
)
ORDERED_OF_E2B = replace(ASSISTANT_OF_E2B, n_centroid=128, n_centroid_used=32)
OF_32 = all_of("Q4_K", {"output": "Q6_K", "token_embd": "Q6_K", "ffn_down": "Q8_0"}) # rows of no multiple of 256

CASES: dict[str, Case] = {
    "27b": Case(LARGE, K_QUANTS, options={"head": 1}),
    # The first of its matrices have F16 copies: so many as fit, of which the mixture's shared experts have none.
    "27b-copies": Case(LARGE, K_QUANTS, options={"head": 1, "copy_bytes": 1_500_000_000}),
    "35b-copies": Case(MIXTURE, K_QUANTS, options={"copy_bytes": 1 << 40}),
    # Its prompts have images, and its steps positions of RoPE.
    "27b-images": Case(LARGE, K_QUANTS, options={"head": 1, "images": 1}),
    "27b-dflash": Case(LARGE, K_QUANTS, "Q8_0", DRAFTER, options={"top": 8}),
    "small-f32": Case(replace(SMALL, n_embd=264, tied=True), all_of("F32"), "F32", options={"head": 1, "top": 4}),
    # A draft depends on the one before it, as a tree and as a chain.
    "small-dflash2": Case(
        SMALL, K_QUANTS,
        drafter=DRAFTER_OF_SMALL,
        more=tiny_dflash2.Parts(rank=256, taps=2, group=16, top_k=16), options={"top": 8}),
    "small-dflash2-chain": Case(
        SMALL, all_of("Q8_0"),
        drafter=DRAFTER_OF_SMALL,
        more=tiny_dflash2.Parts(rank=256, taps=2, group=16, top_k=16)),
    "small-dspark": Case(
        SMALL, all_of("Q8_0"), drafter_own=("token_embd.weight", "output.weight", "d2t"),
        drafter=replace(DRAFTER_OF_SMALL, block_size=7, n_vocab_draft=256),
        more=tiny_dflash2.Parts(rank=256, markov=True, confidence=True), options={"top": 8}),
    # A causal layer's block has the kernels of a step's attention, and the other's those of blocks.
    "small-dspark-sinks": Case(
        SMALL, all_of("Q8_0", {"attn_sinks": "F32"}),
        drafter=replace(DRAFTER_OF_SMALL, block_size=7, causal=(True, False), sliding=(True, False), window=64),
        more=tiny_dflash2.Parts(rank=256, markov=True, sinks=True)),
    # The head looks its embeddings up in a table of F32, whose rows count in bytes as those of any type.
    "small-f32-table": Case(SMALL, all_of("F32"), options={"head": 1}),
    "small-heads": Case(
        replace(SMALL, head_dim=64, state_size=64), all_of("Q8_0", {"output": "BF16"}), options={"head": 1}
    ),
    "small-yarn": Case(
        SMALL, all_of("Q8_0"), drafter_own=("token_embd.weight", "output.weight", "d2t"),
        drafter=tiny_dflash.drafter(
            SMALL, n_head=6, n_head_kv=2, head_dim=128, rope_dim=128, n_vocab_draft=200, softcap=4.0,
            target_layer_ids=(0, 1), embedding_scale=3.0, yarn=hf_dflash.Yarn(4.0, 32, None, None, None)),
    ),
    "small-iq2": Case(SMALL, all_of("IQ2_XXS", {"attn_v": "Q8_0", "ffn_gate": "Q4_K"}), options={"head": 1}),
    "35b": Case(MIXTURE, K_QUANTS, options={"head": 1}),
    "35b-fused": Case(replace(MIXTURE, fused_experts=True), K_QUANTS, options={"head": 1}),
    "35b-unshared": Case(replace(MIXTURE, n_ff_shared=0), K_QUANTS),
    "35b-slots": Case(MIXTURE, K_QUANTS, options={"head": 1, "expert_slots": 100}),
    "35b-slots-fused": Case(replace(MIXTURE, fused_experts=True, n_ff_shared=0), K_QUANTS, options={"expert_slots": 1}),
    "35b-host": Case(MIXTURE, K_QUANTS, options={"head": 1, "cpu_experts": 4}),
    "gemma4-31b": Case(GEMMA4["31B"], K_QUANTS, assistant=ASSISTANT),
    "gemma4-31b-images": Case(GEMMA4["31B"], K_QUANTS, options={"images": 1}),
    "gemma4-31b-q8": Case(GEMMA4["31B"], all_of("Q8_0"), "Q8_0", options={"top": 4}),
    "gemma4-26b": Case(GEMMA4["26B-A4B"], OF_32),
    "gemma4-26b-slots": Case(GEMMA4["26B-A4B"], OF_32, options={"expert_slots": 40}),
    "gemma4-26b-host": Case(GEMMA4["26B-A4B"], OF_32, options={"cpu_experts": 1}),
    "gemma4-e2b": Case(GEMMA4["E2B"], K_QUANTS, assistant=ASSISTANT_OF_E2B, options={"top": 4}),
    "gemma4-e2b-ordered": Case(GEMMA4["E2B"], K_QUANTS, assistant=ORDERED_OF_E2B),
    "gemma4-e2b-images": Case(GEMMA4["E2B"], K_QUANTS, options={"images": 1}),
    "gemma4-f32": Case(
        replace(tiny_gemma4.CASES["dense"][0], sliding=(True, False), head_dim=512, head_dim_swa=256, n_ctx=8192),
        all_of("F32"), "F32"),
    "35b-host-fused": Case(
        replace(MIXTURE, fused_experts=True, n_ff_shared=0), K_QUANTS, options={"cpu_experts": 2}
    ),
}  # fmt: skip


def write_model(folder: Path, name: str, case: Case) -> list[str]:
    """Returns the arguments that say which files are opened, and how."""
    model = folder / f"{name}.gguf"
    w = gguf.GGUFWriter(model, case.config.arch)
    if isinstance(case.config, gemma4_layout.Config):
        gemma4_layout.add_keys(w, case.config, name, file_type=0)
        shapes = gemma4_layout.tensor_shapes(case.config)
    else:
        qwen35_layout.add_keys(w, case.config, name, file_type=0)
        shapes = qwen35_layout.tensor_shapes(case.config)
    add_tokenizer(w, case.config.n_vocab)
    write_without_weights(w, shapes, case.type_of)
    arguments = [str(model), f"kv_type={int(QType[case.kv_type])}"]
    if c := case.drafter:
        w = gguf.GGUFWriter(folder / f"{name}-drafter.gguf", hf_dflash.ARCH)
        hf_dflash.add_keys(w, c, name, file_type=0, m_rope=True)
        add_tokenizer(w, c.n_vocab)
        w.add_mask_token_id(c.mask_token_id or 0)
        tiny_dflash2.add_keys(case.more)(w.kv_data[0])
        of_drafter = hf_dflash.tensor_shapes(c, set(case.drafter_own)) | tiny_dflash2.tensor_shapes(case.more, c)
        write_without_weights(w, of_drafter, case.type_of)
        arguments.append(f"drafter={folder / name}-drafter.gguf")
    if a := case.assistant:
        w = gguf.GGUFWriter(folder / f"{name}-assistant.gguf", a.arch)
        gemma4_layout.add_keys(w, a, name, file_type=0)
        write_without_weights(w, gemma4_layout.tensor_shapes(a), case.type_of)
        arguments.append(f"assistant={folder / name}-assistant.gguf")
    return [*arguments, *(f"{key}={value}" for key, value in case.options.items())]


# ---- launchers that write down what they are given -------------------------------------------------------------


@dataclass(frozen=True)
class Struct:
    base: str | None
    fields: list[tuple[str, str, str | None]]  # A field has a type, a name, and what counts it where it is an array.


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|^#.*(?:\\\n.*)*", "", text, flags=re.M)


def body_at(text: str, brace: int) -> str:
    depth = 0
    for i in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[brace + 1 : i]
    raise ValueError("a brace is not closed")


def fields_of(body: str) -> list[tuple[str, str, str | None]]:
    body = re.sub(r"\([^()]*\)[^;{]*\{(?:[^{}]|\{[^{}]*\})*\}", "();", body)  # Functions.
    fields = []
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        found = re.fullmatch(r"(?:const )?([\w:]+) ([^()]+)", statement)
        if found is None or statement.startswith(("static", "constexpr", "struct", "enum", "using")):
            continue
        for declared in found[2].split(","):
            name = re.fullmatch(r"\s*(\**)\s*(\w+)(?:\[(\w+)\])?(?: = .*)?", declared)
            assert name is not None, statement
            fields.append((found[1] + name[1], name[2], name[3]))
    return fields


def structs_of(text: str) -> dict[str, Struct]:
    return {
        found[1]: Struct(found[2], fields_of(body_at(text, found.end() - 1)))
        for found in re.finditer(r"\bstruct (\w+)(?: : (\w+))? \{", text)
        if found[1].endswith(("Args", "Shape", "Pool", "Heads", "Weights", "Weight", "Dims", "Matrix", "Ranks"))
    }


def shown(name: str, struct: Struct, structs: Mapping[str, Struct]) -> str:
    lines = [f"template <> void fields(const {name} &a) {{"]
    if struct.base:
        lines.append(f"    fields(static_cast<const {struct.base} &>(a));")
    for kind, each, count in struct.fields:
        plain = kind.rstrip("*")
        if plain in structs and kind == plain and count:
            lines.append(f'    for (int i = 0; i < a.n_{each}; i++) {{ put("{each}", a.{each}[i]); }}')
        elif plain in structs and kind == plain + "*":
            lines.append(f'    put_at("{each}", a.{each});')
        elif count:
            lines.append(f'    for (const auto &each : a.{each}) {{ put("{each}", each); }}')
        else:
            lines.append(f'    put("{each}", a.{each});')
    return "\n".join([*lines, "}"])


def launchers() -> str:
    """C++ of all launchers that the headers of kernels declare, and of the structs that they take."""
    headers = [*sorted(KERNELS.rglob("*.h")), SOURCES / "cpu/matmul.h", SOURCES / "cpu/host_experts.h"]
    texts = {path: without_comments(path.read_text()) for path in headers}
    structs = {name: s for text in texts.values() for name, s in structs_of(text).items()}
    declared: dict[str, list[str]] = {}
    used: list[Path] = [SOURCES / "cpu/host_experts.h"]
    for path, text in texts.items():
        for space in re.finditer(r"namespace cuda \{", text):
            found = re.findall(r"\bint (\w+)\(([^)]*void \*stream)\);", body_at(text, space.end() - 1))
            declared |= {name: args.split(",") for name, args in found}
            used += [path] if path not in used else []
    wanted = [kind for args in declared.values() for each in args for kind in re.findall(r"\w+", each)]
    order: list[str] = []

    def need(name: str) -> None:
        if name in structs and name not in order:
            for kind in [structs[name].base or "", *(kind.rstrip("*") for kind, *_ in structs[name].fields)]:
                need(kind)
            order.append(name)

    for kind in [*wanted, "RamExpertsArgs"]:
        need(kind)
    lines = ['#include "pretended.h"', "", "#include <type_traits>"]
    lines += [f'#include "{p.relative_to(KERNELS if KERNELS in p.parents else SOURCES)}"' for p in used]
    lines += [PUT, *(f"template <> void fields(const {name} &a);" for name in order)]
    lines += [shown(name, structs[name], structs) for name in order]
    lines += ["} // namespace", "", "namespace luce::cuda {"]
    for name, args in declared.items():
        lines += [f"int {name}({','.join(args)}) {{", f'    pretended::launch("{name}");']
        for each in args[:-1]:
            given = each.split()[-1].lstrip("*&")
            lines.append(f"    fields({given});" if "&" in each else f'    put("{given}", {given});')
        lines += ["    return 0;", "}"]
    lines += ["} // namespace luce::cuda", "", "void show(const RamExpertsArgs &a) { fields(a); }"]
    return "\n".join(lines) + "\n"


# Pointers to structs are to the host's, unless they are a tensor's.
PUT = """
using namespace luce;
namespace {
template <class T> void fields(const T &);
template <class T> void put(const char *name, const T &value) {
    if constexpr (std::is_pointer_v<T>) {
        pretended::show(name, static_cast<const void *>(value));
    } else if constexpr (std::is_floating_point_v<T>) {
        pretended::show(name, double(value));
    } else if constexpr (std::is_class_v<T>) {
        pretended::begin(name);
        fields(value);
        pretended::end();
    } else {
        pretended::show(name, int64_t(value));
    }
}
template <class T> void put_at(const char *name, const T *value) {
    if (value == nullptr || pretended::is_placed(value)) {
        put(name, static_cast<const void *>(value));
    } else {
        put(name, *value);
    }
}
"""


# ---- the program -----------------------------------------------------------------------------------------------

# Beside kernels there are functions in these, which say how large and where things are.
BESIDE_KERNELS = [
    "attention/attention.cu", "deltanet/chunks.cu", "matmul/norm_first.cu", "matmul/pack.cu", "matmul/permute.cu",
    "matmul/quantised.cu", "attention/row_scores.cu", "moe/end.cu", "moe/route.cu", "sampling/nextn.cu",
]  # fmt: skip


def without_launchers(text: str) -> str:
    """A file of kernels as C++, whose launchers give way to those that write down."""
    return re.sub(r"^int cuda::", "__attribute__((weak)) int cuda::", as_cpp(text), flags=re.M)


def build(folder: Path) -> Path:
    """Compiles the program that records: folder/steps."""
    for path in [*KERNELS.rglob("*.h"), *KERNELS.rglob("*.cuh")]:
        copy(as_cpp(path.read_text()), folder / "kernels" / path.relative_to(KERNELS))
    for top in (EMULATED, HERE):
        for path in [*top.rglob("*.h"), *top.rglob("*.cuh")]:
            copy(path.read_text(), folder / "kernels" / path.relative_to(top))
    made = [folder / "launchers.cpp"]
    copy(launchers(), made[0])
    for source in [HERE / "h200.cu", *(KERNELS / name for name in BESIDE_KERNELS)]:
        made.append(folder / f"{source.stem}.cu.cpp")
        copy(without_launchers(source.read_text()), made[-1])
    ggml = subprocess.run(
        [sys.executable, ROOT / "tools/fetch_ggml.py"], capture_output=True, text=True, check=True
    ).stdout.strip()
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O0", "-w", "-ffunction-sections", "-fdata-sections", "-DLUCE_USE_CUDA"]
    flags += ["-fno-access-control", '-DLUCE_VERSION_STRING="recorder"']
    host = [f"-I{p}" for p in (HERE, ROOT / "native/include", SOURCES, KERNELS, ggml + "/include", ggml + "/src")]
    device = [f"-I{folder / 'kernels'}", "-fno-strict-aliasing", "-include", "cuda_runtime.h"]
    chapters = {name: sorted((SOURCES / name).glob("*.cpp")) for name in ("graph", "model", "ops")}
    for chapter, names in (
        ("engine", ("cache", "exchange", "expert_slots", "stage", "stage_thread")),
        ("step", ("faults", "host_experts", "inputs", "shapes", "threads")),
    ):
        chapters[chapter] = [SOURCES / chapter / f"{name}.cpp" for name in names]
    together = [folder / f"{name}.cpp" for name in chapters]  # As in a wheel: it takes half the time.
    for path, sources in zip(together, chapters.values(), strict=True):
        copy("".join(f'#include "{source}"\n' for source in sources), path)
    alone = [SOURCES / "abi/status.cpp", *sorted((SOURCES / "cpu").glob("*.cpp"))]
    objects = []

    def compiled(source: Path) -> None:
        made_here = source.name.endswith(".cu.cpp")
        output = folder / f"{source.parent.name}_{source.name}.o"
        objects.append(str(output))
        command = [*compiler, *flags, *(device if made_here else host), "-c", str(source), "-o", str(output)]
        subprocess.run(command, check=True, cwd=folder)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, [*together, *alone, *made, HERE / "steps.cpp", HERE / "pretended.cpp"]))
    libraries = Path(luce.__file__).parent / "lib"  # Those of the installed luce: a checkout may have none.
    command = [*compiler, *objects, "-Wl,--gc-sections", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-pthread"]
    command += ["-lluce-ggml-base", "-lluce-ggml-cpu", "-lluce-ggml", "-o", str(folder / "steps")]
    subprocess.run(command, check=True)
    return folder / "steps"


def record(program: Path, out: Path, names: Iterable[str] = CASES) -> None:
    """Writes the lists of models, and what they come to: OUT/launches.txt."""
    out.mkdir(parents=True, exist_ok=True)

    def recorded(name: str) -> str:
        arguments = write_model(program.parent, name, CASES[name])
        subprocess.run([program, out / name, *arguments], check=True)
        for part in ("", "-drafter", "-assistant"):
            (program.parent / f"{name}{part}.gguf").unlink(missing_ok=True)
        return summary(name, (out / f"{name}.launches").read_text(), (out / f"{name}.nodes").read_text())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        (out / "launches.txt").write_text(ABOUT + "".join(pool.map(recorded, names)))


def check_fits(program: Path, name: str, case: Case, n_ctx: int) -> None:
    """Fails where a prompt's step takes more memory than an engine of this context measures."""
    arguments = write_model(program.parent, name, case)
    subprocess.run([program, program.parent / name, *arguments, f"fits={n_ctx}"], check=True)


def check_stages(
    program: Path, name: str, case: Case, stages: int, alike: bool = True, drafts_apart: bool = False
) -> None:
    """Fails, with what was said, where a step of a model in so many stages reads what lies on another one. They are
    alike in layers, or as luce shares these out. One more may have what drafts."""
    arguments = write_model(program.parent, name, case)
    layers = [f"layers={case.config.n_layer}"] if alike else []
    cut = [f"stages={stages}", f"drafts_apart={int(drafts_apart)}", *layers]
    done = subprocess.run([program, program.parent / name, *arguments, *cut], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def check_ranks(program: Path, name: str, case: Case, ranks: int, drafts_apart: bool = False) -> list[str]:
    """Fails likewise where each of so many devices has a part of each matrix. Returns what steps of each kind are made
    of, as the core's log has it."""
    arguments = write_model(program.parent, name, case)
    cut = [f"ranks={ranks}", f"drafts_apart={int(drafts_apart)}"]
    done = subprocess.run([program, program.parent / name, *arguments, *cut], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ABOUT = """\
What steps launch on a pretended H200 (recorder.py). A step has a hash of its launches with all their arguments,
and the bytes of its compute buffer. Steps with the same ops are followed by these, and how many of each there are.
"""


def summary(name: str, launches: str, nodes: str) -> str:
    """Short form of a model's lists."""
    lines, listed = [f"\n==== {name}\n"], ""
    for step, graph in zip(launches.split("== ")[1:], nodes.split("== ")[1:], strict=True):
        title, _, rest = step.partition("\n")
        n_bytes = graph.partition("\n")[0].rpartition(": ")[2]
        found = Counter(re.findall(r"^#\d+ (\w+)", rest, flags=re.M))
        ops = ", ".join(f"{op} {n}" if n > 1 else op for op, n in found.items())
        ops = textwrap.fill(ops, 118, initial_indent="    ", subsequent_indent="    ") + "\n"
        if ops != listed:
            lines.append(listed)
        lines.append(f"{title}: {hashlib.sha256(rest.encode()).hexdigest()[:16]}, {n_bytes}\n")
        listed = ops
    return "".join([*lines, listed])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        record(build(Path(os.environ.get("LUCE_GRAPHS_BUILD", scratch))), Path(sys.argv[1]), sys.argv[2:] or CASES)

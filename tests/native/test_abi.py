"""Calls the ABI through cffi: what it refuses, what it decodes, how handles end."""

import ctypes
import dataclasses
import gc
import re
import threading

import cffi
import drive
import gguf
import numpy as np
import pytest
import tiny_vision
from checkout import HEADER
from op_run import op_run

from luce import native as _native
from luce.errors import (
    BY_CODE,
    ArgumentError,
    Cancelled,
    Error,
    FileError,
    StateError,
)
from luce.native import Engine, File, Model, Tower, declare, library
from luce.native.structs import PAGE, EngineParams, Sampling

pytestmark = pytest.mark.sanitize

E_ARG = 1
HANDLES = tuple(f"luce_{kind} *" for kind in ("file", "model", "engine", "sequence", "checkpoint", "tower"))


def statuses(native):
    """Maps the name of every function of luce.h that returns a status to cffi's type of it."""
    names = [name for name in dir(native.lib) if name.startswith("luce_")]
    kinds = {name: native.ffi.typeof(getattr(native.lib, name)) for name in names}
    return {name: kind for name, kind in kinds.items() if plain(kind.result) == "luce_status"}


def plain(kind):
    """Spells a C type without the words that cffi writes or leaves out."""
    return re.sub(r"\b(struct|enum) ", "", kind.cname)


def fields_of(ffi, name):
    return {field: (plain(of.type), of.offset) for field, of in ffi.typeof(name).fields}


def structs(ffi):
    """Maps the name of each struct of luce.h that is not opaque to its fields: their types and offsets."""
    kinds = {name: ffi.typeof(name) for name in ffi.list_types()[0]}
    known = (name for name, kind in kinds.items() if kind.kind == "struct" and kind.fields)
    return {name: fields_of(ffi, name) for name in known}


@pytest.fixture
def file(native, tiny_gguf):
    with File(tiny_gguf, native) as file:
        yield file


@pytest.fixture
def model(file, device):
    with Model(file, device) as model:
        yield model


@pytest.fixture
def engine(model):
    params = EngineParams(n_ctx=600, n_rows=8, n_checkpoints=1, n_chunk=256, n_threads=1, kv_type="f32")
    with Engine(model, params) as engine:
        yield engine


@pytest.fixture
def tower(native, tmp_path):
    weights = tiny_vision.layout(tiny_vision.TINY, tiny_vision.weights(tiny_vision.TINY, 1))
    with File(tiny_vision.write(tmp_path / "mmproj.gguf", tiny_vision.TINY, weights), native) as held:
        with Tower(held) as tower:
            yield tower


@pytest.fixture
def checkpoint(sequence):
    sequence.prefill([1] * 256)
    with sequence.checkpoint() as checkpoint:
        yield checkpoint


@pytest.fixture
def sequence(engine):
    with engine.sequence() as sequence:
        yield sequence


def test_header_and_library_have_one_abi_version(native):
    assert native.lib.luce_abi_version() == native.lib.LUCE_ABI_VERSION
    assert native.lib.LUCE_PAGE == PAGE


def test_what_the_build_declared_is_what_the_header_declares(native):
    """The build writes it, and luce starts with it. A Python without cffi would have written nothing."""
    header, ahead = declare.parsed(HEADER), native.ffi
    assert not isinstance(ahead, cffi.FFI)
    for name, fields in structs(header).items():
        assert ahead.sizeof(name) == header.sizeof(name) and fields_of(ahead, name) == fields
    lib = header.dlopen(str(native.path))
    assert dir(lib) == dir(native.lib)
    for name in dir(lib):
        ours, other = getattr(native.lib, name), getattr(lib, name)
        if isinstance(ours, int):
            assert ours == other, name
        else:
            assert plain(ahead.typeof(ours)) == plain(header.typeof(other)), name


def test_a_header_that_was_not_declared_ahead_is_parsed(native, tmp_path):
    (tmp_path / "luce.h").write_text(HEADER.read_text())
    core = _native.load(native.path.parent, tmp_path / "luce.h")
    assert isinstance(core.ffi, cffi.FFI) and core.version == native.version


def test_another_abi_version_is_refused(native, tmp_path):
    version = f"#define LUCE_ABI_VERSION {native.lib.LUCE_ABI_VERSION}"
    other = tmp_path / "luce.h"
    assert version in HEADER.read_text()
    other.write_text(HEADER.read_text().replace(version, "#define LUCE_ABI_VERSION 999"))
    with pytest.raises(Error, match=f"{native.lib.LUCE_ABI_VERSION}.*999.*reinstall"):
        _native.load(native.path.parent, other)


def test_a_source_tree_that_is_newer_than_its_build_is_said_so(tmp_path):
    """An ABI version that nobody raised does not hide it."""
    package = tmp_path / "luce"
    for folder in (package / "include", tmp_path / "native" / "include"):
        folder.mkdir(parents=True)
        (folder / "luce.h").write_bytes(HEADER.read_bytes())
    library.require_built(package)
    (tmp_path / "native" / "include" / "luce.h").write_text("/* another */")
    with pytest.raises(Error, match="pip install -e"):
        library.require_built(package)
    (tmp_path / "native" / "include" / "luce.h").unlink()  # A package that was installed has no sources beside it.
    library.require_built(package)


def test_a_missing_library_names_the_remedy(tmp_path):
    with pytest.raises(Error, match="pip install"):
        _native.load(tmp_path)


def test_a_file_that_is_not_a_library_is_refused(tmp_path):
    (tmp_path / "libluce.so").write_text("not a library")
    with pytest.raises(Error, match="cannot load .*reinstall"):
        _native.load(tmp_path, HEADER)


def test_a_status_is_the_exception_with_its_code(native):
    codes = native.ffi.typeof("luce_status").relements
    assert {code for code in codes.values() if code} == set(BY_CODE)
    assert all(kind.code == code for code, kind in BY_CODE.items())


def test_null_and_zero_arguments_are_refused(native):
    for name, kind in statuses(native).items():
        if name != "luce_set_log":  # Its NULL means to discard.
            zeros = [0 if arg.kind == "primitive" else native.ffi.NULL for arg in kind.args]
            assert getattr(native.lib, name)(*zeros) == E_ARG, name
            assert native.text(native.lib.luce_last_error()), name


def test_closed_wrong_and_foreign_handles_are_refused(native, tiny_gguf):
    ffi = native.ffi
    buffer = ffi.new("char[4096]")
    file, closed = File(tiny_gguf, native), File(tiny_gguf, native)
    gone = closed.handle
    closed.close()
    tried = 0
    for name, kind in statuses(native).items():
        handles = [index for index, arg in enumerate(kind.args) if plain(arg) in HANDLES]
        if not handles:
            continue
        wrong = file.handle if plain(kind.args[handles[0]]) != "luce_file *" else gone
        for pointer in (gone, wrong, buffer):
            args = [ffi.cast(arg, buffer if arg.kind == "pointer" else 1) for arg in kind.args]
            args[handles[0]] = ffi.cast(kind.args[handles[0]], pointer)
            assert getattr(native.lib, name)(*args) == E_ARG, name
            tried += 1
    assert tried >= 3 * 26
    assert file.info.n_tensors > 0, "the open one is untouched"
    file.close()


@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_an_unknown_struct_size_is_refused(native, file, model, engine, sequence, checkpoint, tower, wrong):
    """Every struct that the library reads or writes has size 0, one less and one more."""
    lib, out = native.lib, native.ffi.new("void *[1]")
    ints = native.ffi.new("int32_t[64]")
    count = native.ffi.new("uint32_t *", 64)
    calls = {
        "luce_device_info": lambda s: lib.luce_device_get(0, s),
        "luce_gpu_info": lambda s: lib.luce_device_gpu(0, s),
        "luce_file_info": lambda s: lib.luce_file_get_info(file.handle, s),
        "luce_kv": lambda s: lib.luce_file_get_kv(file.handle, 0, s),
        "luce_tensor_info": lambda s: lib.luce_file_get_tensor(file.handle, 0, s),
        "luce_model_info": lambda s: lib.luce_model_get_info(model.handle, s),
        "luce_drafter_info": lambda s: lib.luce_model_get_drafter(model.handle, 0, s),
        "luce_engine_info": lambda s: lib.luce_engine_get_info(engine.handle, s),
        "luce_sequence_info": lambda s: lib.luce_sequence_get_info(sequence.handle, s),
        "luce_checkpoint_info": lambda s: lib.luce_checkpoint_get_info(
            checkpoint.handle, s, native.ffi.NULL, 0
        ),
        "luce_type_info": lambda s: lib.luce_type_get(0, s),
        "luce_tower_params": lambda s: lib.luce_tower_open(
            native.ffi.cast("luce_tower **", out), file.handle, s
        ),
        "luce_tower_info": lambda s: lib.luce_tower_get_info(tower.handle, s),
        "luce_sampling": lambda s: lib.luce_sequence_set_sampling(sequence.handle, s),
        "luce_penalties": lambda s: lib.luce_sequence_set_penalties(sequence.handle, s),
        "luce_lists": lambda s: lib.luce_tree(1, s, 3, ints, ints, count),
        "luce_memory": lambda s: lib.luce_plan_memory(
            file.handle, native.struct("luce_model_params"), native.struct("luce_engine_params"), s
        ),
        "luce_model_params": lambda s: lib.luce_model_open(
            native.ffi.cast("luce_model **", out), file.handle, s
        ),
        "luce_engine_params": lambda s: lib.luce_engine_open(
            native.ffi.cast("luce_engine **", out), model.handle, s
        ),
    }
    sized = {name for name, fields in structs(declare.parsed(HEADER)).items() if "struct_size" in fields}
    assert set(calls) == sized
    for name, call in calls.items():
        struct = native.struct(name)
        struct.struct_size = 0 if wrong == 0 else struct.struct_size + wrong
        assert call(struct) == E_ARG, name


@pytest.mark.parametrize("name", ["file", "model", "engine", "sequence", "checkpoint", "tower"])
def test_a_closed_handle_raises_and_closes_again(name, request):
    handle = request.getfixturevalue(name)
    handle.close()
    handle.close()
    with pytest.raises(StateError, match=f"the {name} is closed"):
        _ = handle.handle


def test_a_file_may_be_opened_twice(native, tiny_gguf):
    with File(tiny_gguf, native) as first, File(tiny_gguf, native) as second:
        first.close()
        assert second.kv["general.architecture"] == "qwen35"


def test_collected_handles_close_themselves(native, tiny_gguf):
    file = File(tiny_gguf, native)
    pointer = file.handle
    del file
    gc.collect()
    info = native.struct("luce_file_info")
    assert native.lib.luce_file_get_info(pointer, info) == E_ARG


def test_a_missing_file_is_named(native, tmp_path):
    with pytest.raises(FileError, match=r"nothing-here\.gguf"):
        File(tmp_path / "nothing-here.gguf", native)


def test_indices_past_the_end_are_refused(native, file):
    for function, kind in (
        (native.lib.luce_file_get_kv, "luce_kv"),
        (native.lib.luce_file_get_tensor, "luce_tensor_info"),
    ):
        for index in (10**6, 2**64 - 1):
            assert function(file.handle, index, native.struct(kind)) == E_ARG


@pytest.mark.parametrize("on_device", [-1, 2])
def test_a_checkpoint_moves_to_the_host_or_the_device_alone(native, checkpoint, on_device):
    assert native.lib.luce_checkpoint_move(checkpoint.handle, on_device) == E_ARG
    assert checkpoint.info.on_device and checkpoint.tokens == [1] * 256


@pytest.fixture(scope="module")
def values():
    """Writes a key of each GGUF type and an array of each."""
    scalars = {"UINT8": 200, "INT8": -3, "UINT16": 60000, "INT16": -300, "UINT32": 2**32 - 1,
               "INT32": -(2**31), "UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT32": 0.5,
               "FLOAT64": 0.1, "BOOL": True, "STRING": "naïve"}  # fmt: skip
    arrays = {"UINT8": [1, 255], "INT8": [-1, 2], "UINT16": [1, 65535], "INT16": [-1], "UINT32": [7, 8, 9],
              "INT32": [-1, 5], "UINT64": [2**63], "INT64": [-1], "FLOAT32": [0.25, 1.5],
              "FLOAT64": [0.1], "BOOL": [True, False], "STRING": ["", "a", "é\0x", ""]}  # fmt: skip
    return scalars, arrays


def write_values(path, scalars, arrays):
    types = gguf.GGUFValueType
    writer = gguf.GGUFWriter(path, "qwen35")
    for name, value in scalars.items():
        writer.add_key_value(f"scalar.{name}", value, types[name])
    for name, value in arrays.items():
        writer.add_key_value(f"array.{name}", value, types.ARRAY, sub_type=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_metadata_of_every_type(native, tmp_path, values):
    scalars, arrays = values
    with File(write_values(tmp_path / "kv.gguf", scalars, arrays), native) as file:
        for name, value in scalars.items():
            found = file.kv[f"scalar.{name}"]
            assert type(found) is type(value) and found == value, name
        for name, value in arrays.items():
            found = file.kv[f"array.{name}"]
            assert list(found) == value, name
            assert isinstance(found, list if name == "STRING" else memoryview)
        assert len(file.kv) == file.info.n_kv == len(list(file.kv)) == 1 + len(scalars) + len(arrays)
        assert "missing" not in file.kv


def test_an_empty_array_of_strings(native, tmp_path):
    path = tmp_path / "empty.gguf"
    write_values(path, {}, {"STRING": ["x"]})
    raw = path.read_bytes()
    one = raw.index(b"array.STRING") + len("array.STRING") + 8
    path.write_bytes(raw[:one] + (0).to_bytes(8, "little"))
    with File(path, native) as file:
        assert file.kv["array.STRING"] == []


def test_text_that_is_not_utf8_names_its_key(native, tmp_path):
    path = tmp_path / "bytes.gguf"
    write_values(path, {"STRING": "aXb"}, {"STRING": ["aXb", "c"]})
    path.write_bytes(path.read_bytes().replace(b"aXb", b"a\xffb"))
    with File(path, native) as file:
        for key in ("scalar.STRING", "array.STRING"):
            with pytest.raises(FileError, match=key):
                _ = file.kv[key]


def test_tensors_are_those_of_the_file(native, tiny_gguf, file):
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    assert [tensor.name for tensor in file.tensors] == list(expected)
    for tensor in file.tensors:
        other = expected[tensor.name]
        assert tensor.shape == tuple(other.shape.tolist()), tensor.name
        assert (tensor.size_bytes, tensor.type_name) == (other.n_bytes, other.tensor_type.name)


def test_a_device_is_named_in_any_way_that_options_have(native, monkeypatch):
    """What results say of it has one name."""
    cpu = native.devices()[-1]
    gpus = [dataclasses.replace(cpu, name=f"cuda:{i}", is_gpu=1) for i in range(2)]
    monkeypatch.setattr(type(native), "devices", lambda self: [*gpus, cpu])
    found = {name: native.device(name).name for name in (None, "cuda", "cuda:0", "cuda:1", "cpu")}
    assert found == {None: "cuda:0", "cuda": "cuda:0", "cuda:0": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}
    with pytest.raises(ArgumentError, match="no device 'cuda:2': this machine has cuda:0, cuda:1, cpu"):
        native.device("cuda:2")


def test_devices_begin_with_what_auto_takes(native, file):
    devices = native.devices()
    with Model(file, "auto") as model:
        assert model.info.device == devices[0].name
    assert "cpu" in [device.name for device in devices]
    assert all(device.memory_total >= device.memory_free > 0 for device in devices)


def test_an_unknown_device_is_named(file):
    with pytest.raises(ArgumentError, match="toaster"):
        Model(file, "toaster")


def test_progress_ends_at_one(file, device):
    parts = []
    Model(file, device, parts.append).close()
    assert parts == sorted(parts) and parts[-1] == 1.0


def test_progress_can_cancel(file, device):
    with pytest.raises(Cancelled):
        Model(file, device, lambda part: True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("from the callback")])
def test_what_progress_raises_is_raised(file, device, error):
    def progress(part):
        raise error

    with pytest.raises(type(error)) as raised:
        Model(file, device, progress)
    assert raised.value is error


def test_the_log_callback_may_log_and_call_the_core(native):
    """ggml logs through it, from several threads. What it does in turn, also setting another, waits for no
    lock that is held."""
    ggml = ctypes.CDLL(str(native.path.with_name(native.path.name.replace("libluce", "libluce-ggml-base"))))
    ggml_log, lines = ggml.ggml_log_internal, []

    def log(level, text):
        lines.append(text)
        if len(lines) < 50:
            ggml_log(2, b"again\n")
        native.devices()
        with pytest.raises(ArgumentError):
            native.type_info(-1)
        if len(lines) > 100:
            native.set_log(None)

    def work():
        for _ in range(20):
            ggml_log(3, b"first\n")

    native.devices()  # From here on ggml logs through the core.
    native.set_log(log)
    try:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a deadlock"
    finally:
        native.set_log(None)
    assert len(lines) >= 50 and set(lines) == {"ggml: first", "ggml: again"}
    n = len(lines)
    ggml_log(3, b"unset\n")
    assert len(lines) == n


def test_engine_reports_what_it_resolved(engine, model):
    info = engine.info
    assert (info.n_ctx, info.n_rows, info.n_chunk, info.n_threads) == (600, 8, 256, 1)
    assert (info.n_sequences, info.n_checkpoints, info.n_draft) == (1, 1, 0)
    assert info.n_pages == info.pages_free == 2 * 3 and info.memory_bytes > 0
    with Engine(model) as plain:
        info = plain.info
        n_chunk = 512 if model.info.device.startswith("cpu") else 2048
        assert (info.n_ctx, info.n_rows, info.n_chunk, info.n_sequences) == (2048, 1, n_chunk, 1)
        assert info.n_checkpoints == 0 and 1 <= info.n_threads <= 16


def test_a_round_goes_on_where_prefill_ended(sequence):
    first = sequence.prefill([1, 2, 3])
    assert sequence.logits(0).shape == (384,)
    assert int(sequence.logits(0).argmax()) == first
    choices = drive.verify(sequence, [first, 7, 9], [-1, 0, 0])
    assert len(choices) == 3 and sequence.info.n_verified == 3
    sequence.commit([0])
    assert sequence.info.n_past == 4
    sequence.reset()
    assert sequence.info.n_past == 0
    assert sequence.prefill([1, 2, 3]) == first


@pytest.mark.parametrize("token", [-1, 384, 2**31 - 1, 2**31, -(2**40)])
def test_token_ids_out_of_range_are_refused(sequence, token):
    with pytest.raises(ArgumentError):
        sequence.prefill([token])
    with pytest.raises(ArgumentError):
        drive.verify(sequence, [token])
    assert sequence.info.n_past == 0 and not sequence.info.failed


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1),
        Sampling(temperature=np.nan),
        Sampling(temperature=1, top_p=1.5),
        Sampling(temperature=1, top_p=-0.1),
        Sampling(temperature=1, min_p=1.0),
        Sampling(temperature=1, min_p=-0.1),
        Sampling(temperature=1, top_k=-1),
    ],
)
def test_sampling_out_of_range_is_refused(native, sequence, sampling):
    with pytest.raises(ArgumentError):
        native.sample(np.zeros(4, np.float32), sampling, 0)
    with pytest.raises(ArgumentError):
        sequence.set_sampling(sampling)


def test_a_type_that_ggml_lacks_is_refused(native):
    assert native.type_info(0).name == "F32"
    for type_id in (-1, 4, 5, 1000):
        with pytest.raises(ArgumentError):
            native.type_info(type_id)


def test_quantized_rows_are_those_of_the_gguf_package(native):
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    made = native.quantize(gguf.GGMLQuantizationType.Q8_0, rows)
    assert np.array_equal(made, gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("shape", [(64,), (2, 33), (1, 2, 32)])
def test_rows_that_are_not_whole_blocks_are_refused(native, shape):
    with pytest.raises(ArgumentError):
        native.quantize(gguf.GGMLQuantizationType.Q8_0, np.zeros(shape, np.float32))


def test_an_op_that_does_not_exist_is_named(native):
    with pytest.raises(ArgumentError, match="no-such-op"):
        op_run(native, "cpu", "no-such-op", [np.zeros(4, np.float32)], shape=(4,))


def test_an_ops_arguments_have_the_shapes_of_its_signature(native):
    """Letters stand for one value throughout; types and numbers are what they are."""
    row = np.zeros((3, 2), np.int32)
    tokens, drafts = np.array([5, -1, 6], np.int32), row

    def run(*arrays):
        return op_run(native, "cpu", "row_tokens", arrays, (100,), shape=(3,), dtype=np.int32)

    assert run(tokens, drafts).tolist() == [5, 0, 6]
    misfits = [
        (tokens, np.zeros((3, 3), np.int32)),
        (tokens, row[:, :1].copy()),
        (tokens.astype(np.float32), drafts),
        (tokens, drafts.astype(np.float32)),
        (tokens[None, None, :].repeat(2, 0), drafts),
        (tokens, np.zeros((2, 3, 2), np.int32)),
        (tokens,),
        (tokens, drafts, drafts),
    ]
    for arrays in misfits:
        with pytest.raises(ArgumentError, match="row_tokens"):
            run(*arrays)
    with pytest.raises(ArgumentError, match="row_tokens: the result has 2 values, expected 3 or more"):
        op_run(native, "cpu", "row_tokens", [tokens, drafts], (100,), shape=(2,), dtype=np.int32)


# ---- what `luce doctor` asks


def test_a_cpu_is_no_gpu_and_has_a_bandwidth(native):
    cpu = len(native.devices()) - 1
    with pytest.raises(ArgumentError, match="cpu is no GPU"):
        native.gpu_info(cpu)
    assert native.bandwidth(cpu, 2) > 10**8, "no memory gives so little"
    for threads in (0, 513):
        with pytest.raises(ArgumentError, match=f"n_threads is {threads}, expected 1 to 512"):
            native.bandwidth(cpu, threads)
    for index in (-1, cpu + 1):
        with pytest.raises(ArgumentError, match=f"device {index}: there are"):
            native.bandwidth(index, 1)
        with pytest.raises(ArgumentError, match=f"device {index}: there are"):
            native.gpu_info(index)


def test_an_op_runs_alone_as_tests_run_it(native):
    tokens, drafts = np.array([5, -1], np.int32), np.array([[7, 0], [8, 0]], np.int32)
    found = np.zeros(2, np.int32)
    given = [_native.OpArray(tokens, (2,), 26), _native.OpArray(drafts, (2, 2), 26)]
    native.op_run("cpu", "row_tokens", given, (100,), _native.OpArray(found, (2,), 26))
    expected = op_run(native, "cpu", "row_tokens", [tokens, drafts], (100,), shape=(2,), dtype=np.int32)
    assert found.tolist() == expected.tolist()
    with pytest.raises(ArgumentError, match="there is no op no-such-op"):
        native.op_run("cpu", "no-such-op", given, (), _native.OpArray(found, (2,), 26))

"""The ABI through cffi: what it refuses, what it decodes, how handles end."""

import gc
import time

import gguf
import numpy as np
import pytest
from conftest import HEADER
from hypothesis import given, settings
from hypothesis import strategies as st

from luce import _native
from luce._native import File, Model, Session
from luce.errors import (
    BY_CODE,
    ArgumentError,
    Cancelled,
    FileError,
    LuceError,
    NumericError,
    StateError,
)
from luce.structs import Sampling, SessionParams

pytestmark = pytest.mark.sanitize

E_ARG = 1
HANDLES = ("luce_file *", "luce_model *", "luce_session *")


def statuses(native):
    """Name to cffi's type of every function of luce.h that returns a status."""
    names = [name for name in dir(native.lib) if name.startswith("luce_")]
    kinds = {name: native.ffi.typeof(getattr(native.lib, name)) for name in names}
    return {name: kind for name, kind in kinds.items() if kind.result.cname == "luce_status"}


@pytest.fixture
def file(native, tiny_gguf):
    with File(tiny_gguf, native) as file:
        yield file


@pytest.fixture
def model(file, device):
    with Model(file, device) as model:
        yield model


@pytest.fixture
def session(model):
    with Session(model, SessionParams(n_ctx=64, n_rows=8, kv_type="f32")) as session:
        yield session


def test_header_and_library_have_one_abi_version(native):
    assert native.lib.luce_abi_version() == native.lib.LUCE_ABI_VERSION


def test_another_abi_version_is_refused(native, tmp_path):
    version = f"#define LUCE_ABI_VERSION {native.lib.LUCE_ABI_VERSION}"
    other = tmp_path / "luce.h"
    assert version in HEADER.read_text()
    other.write_text(HEADER.read_text().replace(version, "#define LUCE_ABI_VERSION 999"))
    with pytest.raises(LuceError, match=f"{native.lib.LUCE_ABI_VERSION}.*999.*reinstall"):
        _native.load(native.path.parent, other)


def test_a_missing_library_names_the_remedy(tmp_path):
    with pytest.raises(LuceError, match="pip install"):
        _native.load(tmp_path)


def test_a_file_that_is_not_a_library_is_refused(tmp_path):
    (tmp_path / "libluce.so").write_text("not a library")
    with pytest.raises(LuceError, match="cannot load .*reinstall"):
        _native.load(tmp_path, HEADER)


def test_a_status_is_the_exception_with_its_code(native):
    codes = native.ffi.typeof("luce_status").relements
    assert {code for code in codes.values() if code} == set(BY_CODE)
    assert all(kind.code == code for code, kind in BY_CODE.items())


def test_null_and_zero_arguments_are_refused(native):
    for name, kind in statuses(native).items():
        if name != "luce_set_log":  # whose NULL means: discard
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
        handles = [index for index, arg in enumerate(kind.args) if arg.cname in HANDLES]
        if not handles:
            continue
        wrong = file.handle if kind.args[handles[0]].cname != "luce_file *" else gone
        for pointer in (gone, wrong, buffer):
            args = [ffi.cast(arg, buffer if arg.kind == "pointer" else 1) for arg in kind.args]
            args[handles[0]] = ffi.cast(kind.args[handles[0]], pointer)
            assert getattr(native.lib, name)(*args) == E_ARG, name
            tried += 1
    assert tried >= 3 * 14
    assert file.info.n_tensors > 0, "the open one is untouched"
    file.close()


@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_an_unknown_struct_size_is_refused(native, file, model, session, wrong):
    """Every struct that the library reads or writes, with size 0, one less and one more."""
    lib, out = native.lib, native.ffi.new("void *[1]")
    calls = {
        "luce_device_info": lambda s: lib.luce_device_get(0, s),
        "luce_file_info": lambda s: lib.luce_file_get_info(file.handle, s),
        "luce_kv": lambda s: lib.luce_file_get_kv(file.handle, 0, s),
        "luce_tensor_info": lambda s: lib.luce_file_get_tensor(file.handle, 0, s),
        "luce_model_info": lambda s: lib.luce_model_get_info(model.handle, s),
        "luce_session_info": lambda s: lib.luce_session_get_info(session.handle, s),
        "luce_type_info": lambda s: lib.luce_type_get(0, s),
        "luce_sampling": lambda s: lib.luce_session_set_sampling(session.handle, s),
        "luce_memory": lambda s: lib.luce_plan_memory(
            file.handle, native.struct("luce_model_params"), native.struct("luce_session_params"), s
        ),
        "luce_model_params": lambda s: lib.luce_model_open(
            native.ffi.cast("luce_model **", out), file.handle, s
        ),
        "luce_session_params": lambda s: lib.luce_session_open(
            native.ffi.cast("luce_session **", out), model.handle, s
        ),
    }
    sized = {name for name in native.ffi.list_types()[0] if "struct_size" in _fields(native, name)}
    assert set(calls) == sized
    for name, call in calls.items():
        struct = native.struct(name)
        struct.struct_size = 0 if wrong == 0 else struct.struct_size + wrong
        assert call(struct) == E_ARG, name


def _fields(native, name):
    kind = native.ffi.typeof(name)
    return dict(kind.fields or ()) if kind.kind == "struct" else {}


@pytest.mark.parametrize("name", ["file", "model", "session"])
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


@pytest.fixture(scope="module")
def values():
    """A key of each GGUF type and an array of each."""
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
            assert isinstance(found, list if name == "STRING" else np.ndarray)
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


def test_a_large_vocabulary_is_read_in_under_a_second(native, tmp_path):
    tokens = [f"token {index}" for index in range(250_000)]
    with File(write_values(tmp_path / "large.gguf", {}, {"STRING": tokens}), native) as file:
        began = time.process_time()
        assert file.kv["array.STRING"] == tokens
        assert time.process_time() - began < 1.0


def test_tensors_are_those_of_the_file(native, tiny_gguf, file):
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    assert [tensor.name for tensor in file.tensors] == list(expected)
    for tensor in file.tensors:
        other = expected[tensor.name]
        assert tensor.shape == tuple(other.shape.tolist()), tensor.name
        assert (tensor.size_bytes, tensor.type_name) == (other.n_bytes, other.tensor_type.name)


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


def test_the_log_callback_can_be_set_and_unset(native, file, device):
    lines = []
    native.set_log(lambda level, text: lines.append((level, text)))
    Model(file, device).close()
    native.set_log(None)
    assert all(level in range(4) and isinstance(text, str) for level, text in lines)


def test_session_reports_what_it_resolved(session):
    info = session.info
    assert (info.n_ctx, info.n_rows, info.n_past, info.failed) == (64, 8, 0, 0)
    assert info.n_chunk >= 1 and info.n_threads >= 1 and info.memory_bytes > 0


def test_a_round_goes_on_where_prefill_ended(session):
    first = session.prefill([1, 2, 3])
    assert session.logits(0).shape == (384,)
    assert int(session.logits(0).argmax()) == first
    choices = session.verify([first, 7, 9], [-1, 0, 0])
    assert len(choices) == 3 and session.info.n_verified == 3
    session.commit([0])
    assert session.info.n_past == 4
    session.reset()
    assert session.info.n_past == 0
    assert session.prefill([1, 2, 3]) == first


def test_accept_takes_a_chain_without_parents(native):
    assert native.accept([5, 6, 7, 8], None, [6, 7, 0, 0]) == ([0, 1, 2], 0)
    assert native.accept([5], None, [9]) == ([0], 9)


@pytest.mark.parametrize("token", [-1, 384, 2**31 - 1, 2**31, -(2**40)])
def test_token_ids_out_of_range_are_refused(session, token):
    with pytest.raises(ArgumentError):
        session.prefill([token])
    with pytest.raises(ArgumentError):
        session.verify([token])
    assert session.info.n_past == 0 and not session.info.failed


@settings(max_examples=300, deadline=None)
@given(data=st.data(), n=st.integers(1, 64))
def test_accept_walks_along_the_choices(native, data, n):
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    choices = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    parents, above = [-1], [0]
    for row in range(1, n):  # depth-first: below some row of the path to the one before
        depth = data.draw(st.integers(0, len(above) - 1))
        parents.append(above[depth])
        above = [*above[: depth + 1], row]
    path, row = [0], 0
    while children := [i for i in range(1, n) if parents[i] == row and tokens[i] == choices[row]]:
        row = children[0]
        path.append(row)
    assert native.accept(tokens, parents, choices) == (path, choices[row])


@given(row=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50))
def test_greedy_takes_the_lowest_id_of_the_largest(native, row):
    logits = np.array(row, np.float32)
    assert native.sample(logits, Sampling(), 0) == int(logits.argmax())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_an_error(native, bad, temperature):
    with pytest.raises(NumericError):
        native.sample(np.array([1, bad, 2], np.float32), Sampling(temperature=temperature), 0)


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
def test_sampling_out_of_range_is_refused(native, session, sampling):
    with pytest.raises(ArgumentError):
        native.sample(np.zeros(4, np.float32), sampling, 0)
    with pytest.raises(ArgumentError):
        session.set_sampling(sampling)


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
        native.op_run("cpu", "no-such-op", [np.zeros(4, np.float32)], shape=(4,))

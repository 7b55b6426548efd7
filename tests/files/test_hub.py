"""Takes models of a hub: a stand-in on this machine says what the hub says."""

import fcntl
import hashlib
import json
import os
import pty
import re
import socket
import struct
import termios
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gguf
import numpy as np
import pytest
import tiny
from huggingface_hub import constants

from luce.errors import FileError
from luce.files.hub import chosen, fetch, fetch_projector, named, parts_of, projector_beside

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Gives hub(files), which returns its address; `asked` has the paths that were asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    servers = []

    def start(files):
        class Handler(BaseHTTPRequestHandler):
            asked = []

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                self.asked.append((self.command, self.path))
                name = self.path.partition("/resolve/main/")[2]
                if self.path.startswith("/api/models/owner/repo/tree/main"):
                    tree = [
                        {"type": "file", "path": each, "size": len(files[each]), "oid": "0"} for each in files
                    ]
                    self._say(200, {}, json.dumps(tree).encode())
                elif name in files:
                    etag = hashlib.sha256(files[name]).hexdigest()
                    self._say(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, files[name])
                else:
                    self._say(404, {"X-Error-Code": "EntryNotFound"}, b"{}")

            def _say(self, status, headers, body):
                self.send_response(status)
                for key, value in {**headers, "Content-Length": len(body)}.items():
                    self.send_header(key, str(value))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", Handler.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_file_is_downloaded_once(hub):
    url, asked = hub({"model-Q4_K_M.gguf": b"weights", "model-Q8_0.gguf": b"more", "README.md": b"x"})
    path = fetch("owner/repo", url)
    assert path.name == "model-Q4_K_M.gguf" and path.read_bytes() == b"weights"
    assert fetch("owner/repo:model-Q8_0.gguf", url).read_bytes() == b"more"
    before = [each for each in asked if each[0] == "GET" and "resolve" in each[1]]
    assert fetch("owner/repo", url) == path
    assert [each for each in asked if each[0] == "GET" and "resolve" in each[1]] == before


def test_what_is_not_there_is_named(hub):
    url, _ = hub({"a.gguf": b"1", "b.gguf": b"2"})
    with pytest.raises(FileError, match="owner/repo:none.gguf"):
        fetch("owner/repo:none.gguf", url)
    with pytest.raises(FileError, match="a.gguf, b.gguf"):
        fetch("owner/repo", url)
    with pytest.raises(FileError, match="no REPO"):
        fetch("../../etc/passwd", url)


@pytest.fixture
def impatient(monkeypatch):
    """Lets nothing wait: a hub that cannot be reached is asked once."""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"{seconds} seconds were waited"))


@pytest.fixture
def nobody():
    """Gives the address of a hub that nobody answers at."""
    with socket.socket() as bound:  # The socket is bound, and it listens to no one.
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("reference", ["owner/repo", "owner/repo:a.gguf", "owner/repo:Q4_K_M"])
def test_a_hub_that_cannot_be_reached_is_one_line(hub, nobody, impatient, reference):
    told = f"^{reference}: the hub cannot be reached: [^\n]+; the cache has nothing of it$"
    with pytest.raises(FileError, match=told):
        fetch(reference, nobody)


def test_a_hub_that_never_answers_is_asked_for_a_bounded_time(hub, impatient, monkeypatch):
    monkeypatch.setattr("luce.files.hub.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(FileError, match="the hub cannot be reached: [^\n]+; the cache has nothing"):
            fetch("owner/repo", url)


ASKED = ["owner/repo", "owner/repo:q4_k_m", "owner/repo:latest", "owner/repo:m-Q4_K_M.gguf"]


@pytest.mark.parametrize("reference", ASKED)
def test_what_the_cache_has_needs_no_hub(hub, nobody, impatient, reference):
    url, _ = hub({"m-Q4_K_M.gguf": b"weights", "m-Q8_0.gguf": b"more", "mtp-m-Q4_K_M.gguf": b"head"})
    paths = {name: fetch(f"owner/repo:{name}", url) for name in ("m-Q4_K_M.gguf", "mtp-m-Q4_K_M.gguf")}
    told = []
    assert fetch(reference, nobody, told.append) == paths["m-Q4_K_M.gguf"]
    (line,) = told
    assert line.startswith(f"{reference} is taken from the cache: the hub cannot be reached: ")
    assert "\n" not in line
    there = "; the cache has only m-Q4_K_M.gguf, mtp-m-Q4_K_M.gguf$"
    for lacking in ("owner/repo:Q8_0", "owner/repo:m-Q8_0.gguf"):
        with pytest.raises(FileError, match=there):
            fetch(lacking, nobody)


@pytest.mark.long
def test_offline_is_believed_without_asking(command, hub, tmp_path, tiny_gguf):
    url, asked = hub({"m.gguf": tiny_gguf.read_bytes()})
    folder = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": url}
    words = ("generate", "--hf", "owner/repo", "-n", "2", "--device", "cpu", "x")
    for offline, code in (("1", 1), ("0", 0), ("1", 0)):
        before = len(asked)
        with command(*words, env=folder | {"HF_HUB_OFFLINE": offline}, text=True) as process:
            said = process.communicate()[1]
        assert process.returncode == code, said
        assert (len(asked) > before) == (offline == "0")
        if code:
            assert "Error: owner/repo: " in said and "offline" in said and "Traceback" not in said
        else:
            assert "Warning" not in said


def test_all_parts_have_to_be_cached(hub, nobody, impatient):
    names = [f"m-Q4_K_M-0000{n}-of-00002.gguf" for n in (1, 2)]
    url, _ = hub({name: b"part" for name in names})
    assert fetch("owner/repo:q4_k_m", url).name == names[0]
    assert fetch("owner/repo", nobody).with_name(names[1]).read_bytes() == b"part"
    fetch("owner/repo", nobody).with_name(names[1]).unlink()
    with pytest.raises(FileError, match="the cache has only m-Q4_K_M-00001-of-00002.gguf"):
        fetch("owner/repo", nobody)


def test_parts_and_preferences():
    assert parts_of("m-00001-of-00003.gguf") == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    split = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-F16.gguf"]
    assert chosen(split, "r") == split[0]
    with pytest.raises(FileError, match="no GGUF"):
        chosen(["mmproj-F16.gguf", "config.json"], "r")
    with pytest.raises(FileError, match="no GGUF"):
        chosen(["config.json"], "r")


MODEL = "Some-27B-Q4_K_M.gguf"
BESIDE = [
    "MTP/mtp-Some-27B-Q4_K_M.gguf", "MTP/Some-27B-Q4_K_M.gguf", "mtp-Some-27B-Q4_K_M.gguf",
    "Some-27B-MTP-Q4_K_M.gguf", "Some-27B-mtp.gguf", "mtp/00001.gguf", "nextn-Q4_K_M.gguf",
    "DFlash/Some-DFlash-Q4_K_M.gguf", "Some-27B-DFlash-Q4_K_M.gguf", "dflash-draft-Q4_K_M.gguf",
    "drafters/dspark-Q4_K_M.gguf", "Some-27B-DSpark.gguf", "eagle3-Some-27B-Q4_K_M.gguf",
    "EAGLE3/x-Q4_K_M.gguf", "Some-27B-eagle3-Q4_K_M.gguf", "mmproj-Some-27B-F16.gguf",
    "Some-27B-mmproj-Q4_K_M.gguf", "mmproj/model-Q4_K_M.gguf", "imatrix_own.gguf", "Some-27B-imatrix.gguf",
    "Some-27B.imatrix.gguf", "imatrix/Q4_K_M.gguf", "lora-Q4_K_M.gguf", "Lora/x-Q4_K_M.gguf",
    "adapter-Q4_K_M.gguf", "some-lora-Q4_K_M.gguf", "adapters/style-Q4_K_M.gguf",
    "draft-Some-0.6B-Q4_K_M.gguf", "ggml-vocab-Q4_K_M.gguf", "vocab-some.gguf",
]  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
def test_what_goes_with_a_model_is_never_taken_for_it(beside):
    for model in (MODEL, "Some-27B-UD-Q4_K_XL.gguf", "a/Some-27B-IQ1_M.gguf", "zz-MXFP4_MOE.gguf"):
        kind = re.search(r"(?:UD-)?(?:I?Q|MX)\w+", model)[0]
        for files in ([beside, model], [model, beside]):
            assert chosen(files, "r") == named(files, "r", kind.lower()) == model


@pytest.mark.parametrize("alone", ["MTP/x-Q8_0.gguf", "mtp-x.gguf", "DFlash/x.gguf", "lora-x.gguf"])
def test_what_goes_with_a_model_alone_is_none(alone):
    with pytest.raises(FileError, match=f"r has no GGUF of a model, only {alone}; r:FILE names one"):
        chosen([alone], "r")


@pytest.mark.parametrize(
    "files",
    [["Some-27B-MTP-Q4_K_M.gguf", "Some-27B-MTP-Q8_0.gguf"], ["Some-QLoRA-Q4_K_M.gguf"],
     ["Some-27B-imatrix-Q4_K_M.gguf", "Some-27B-imatrix-Q3_K_S.gguf", "imatrix.gguf"]],
)  # fmt: skip
def test_a_model_may_have_such_a_word_in_its_name(files):
    assert chosen(files, "r") == named(files, "r", "Q4_K_M") == files[0]


SOME = [
    "Some-27B-UD-Q4_K_XL.gguf", "Some-27B-UD-Q4_K_M.gguf", MODEL, "Some-27B-Q4_K_S.gguf",
    "Some-27B-Q8_0.gguf", "Some-27B-IQ4_NL.gguf", "mtp-Some-27B-Q8_0.gguf", "mtp-Some-27B-Q2_K.gguf",
    "mmproj-BF16.gguf", "BF16/Some-27B-BF16-00001-of-00002.gguf", "BF16/Some-27B-BF16-00002-of-00002.gguf",
    "Q6_K/model-00001-of-00002.gguf", "Q6_K/model-00002-of-00002.gguf", "README.md",
]  # fmt: skip


@pytest.mark.parametrize(
    "asked, name",
    [
        ("", MODEL), ("latest", MODEL), ("Q4_K_M", MODEL), ("q4_k_m", MODEL), (MODEL, MODEL),
        (MODEL.upper(), MODEL), ("UD-Q4_K_XL", SOME[0]), ("ud-q4_k_xl", SOME[0]), ("Q4_K_XL", SOME[0]),
        ("UD-Q4_K_M", SOME[1]), ("Q4_K_S", SOME[3]), ("Q8_0", SOME[4]), ("iq4_nl", SOME[5]),
        ("bf16", "BF16/Some-27B-BF16-00001-of-00002.gguf"), ("Q6_K", "Q6_K/model-00001-of-00002.gguf"),
        ("Some-27B-BF16-00001-of-00002.gguf", "BF16/Some-27B-BF16-00001-of-00002.gguf"),
        ("mtp-Some-27B-Q8_0.gguf", "mtp-Some-27B-Q8_0.gguf"), ("mmproj-BF16.gguf", "mmproj-BF16.gguf"),
    ],
)  # fmt: skip
def test_a_type_or_a_file_may_be_named(asked, name):
    assert named(SOME, "r", asked) == name


@pytest.mark.parametrize("asked", ["Q4_K", "F16", "Q4", "Q2_K", "Q5_K_M", "K", "XL", "none.gguf"])
def test_a_type_or_file_that_is_not_there_lists_what_is(asked):
    with pytest.raises(FileError, match="Some-27B-Q4_K_M.gguf, .*Some-27B-UD-Q4_K_XL.gguf") as raised:
        named(SOME, "r", asked)
    assert asked in str(raised.value)


@pytest.mark.parametrize("left_out", range(4))
def test_types_are_preferred_in_their_order(left_out):
    there = ["x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "x-UD-Q4_K_XL.gguf", "x-Q8_0.gguf", "x-F16.gguf"][left_out:]
    assert chosen([*there[::-1], "x-IQ1_S.gguf"], "r") == there[0]


def test_models_of_several_names_have_to_be_named():
    for asked in ("", "Q4_K_M"):
        with pytest.raises(FileError, match="r:FILE: a-7B-Q4_K_M.gguf, b-Q4_K_M.gguf"):
            named(["b-Q4_K_M.gguf", "a-7B-Q4_K_M.gguf", "mtp-b.gguf"], "r", asked)
    with pytest.raises(FileError, match="and 5 more$"):
        chosen([f"{n:02}.gguf" for n in range(25)], "r")


def head_of(path):
    config = tiny.Config(n_nextn=1)
    return tiny.write(path, config, tiny.head_only(config, tiny.layout(config, 1)))


def of_type(path, **keys):
    writer = gguf.GGUFWriter(path, keys.get("architecture", "qwen35"))
    writer.add_type(keys.get("type", "model"))
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    "make, held",
    [(head_of, "a NextN head"), (partial(of_type, type="adapter"), "data of type adapter"),
     (partial(of_type, type="mmproj"), "data of type mmproj"),
     (partial(of_type, type="imatrix"), "data of type imatrix"),
     (partial(of_type, architecture="clip"), "data of type clip"),
     (partial(of_type, architecture="dflash"), "a DFlash drafter"),
     (partial(of_type, architecture="eagle3"), "data of type eagle3")],
)  # fmt: skip
def test_what_was_downloaded_is_looked_at(hub, tmp_path, make, held):
    """Its name says that it is a model, and its metadata say what it is."""
    url, _ = hub({"some-Q4_K_M.gguf": make(tmp_path / "x.gguf").read_bytes(), "some-Q8_0.gguf": b"more"})
    for reference in ("owner/repo", "owner/repo:Q4_K_M"):
        with pytest.raises(FileError, match=f"some-Q4_K_M.gguf holds {held}, no model.*some-Q8_0.gguf"):
            fetch(reference, url)
    assert fetch("owner/repo:some-Q4_K_M.gguf", url).name == "some-Q4_K_M.gguf"


@pytest.mark.long
def test_each_command_takes_a_model_of_the_hub(hub, luce_, command, tiny_gguf, monkeypatch, tmp_path):
    url, asked = hub({"m.gguf": tiny_gguf.read_bytes()})
    form = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + form)
    for words, stdin in ((("probe-gguf",), None), (("generate", "x", "-n", "2"), None),
                         (("chat", "--device", "cpu", "-n", "2"), "hello\n")):  # fmt: skip
        result = luce_(*words, "--hf", "owner/repo", stdin=stdin)
        assert result.exit_code == 0 and result.stdout, result.stderr
    assert [path for verb, path in asked if verb == "GET" and "resolve" in path] == [
        "/owner/repo/resolve/main/m.gguf"
    ]
    env = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "other")}
    words = ("--hf", "owner/repo:m.gguf", "--port", "0", "--device", "cpu", "--ctx", "256")
    screen, theirs = pty.openpty()  # The bar is for a terminal.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with command("serve", *words, env=env, stderr=theirs) as process, open(screen, "rb", buffering=0) as said:
        os.close(theirs)
        shown = b""
        while b"luce serves" not in shown:
            shown += said.read(1000)
        process.terminate()
    assert b"m.gguf: 100%" in shown and b"luce serves owner/repo:m.gguf at http" in shown


# Repositories as they are published, what was asked of them, and the tower that goes with that.
TOWERS = [
    (["Qwen3.5-9B-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "", "mmproj-F16.gguf"),
    (["Qwen3.5-9B-Q4_K_M.gguf", "mmproj-Qwen3.5-9B-Q8_0.gguf", "mmproj-Qwen3.5-9B-bf16.gguf"], "",
     "mmproj-Qwen3.5-9B-bf16.gguf"),
    (["Qwen3.5-9B-Q8_0.gguf", "Qwen3.5-9B.mmproj-f16.gguf"], "", "Qwen3.5-9B.mmproj-f16.gguf"),
    (["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "mmproj/mmproj-model-f16.gguf"], "BF16",
     "mmproj/mmproj-model-f16.gguf"),
    (["a-4B-Q8_0.gguf", "a-9B-Q4_K_M.gguf", "mmproj-a-4B-F16.gguf", "mmproj-a-9B-F16.gguf"], "a-9B-Q4_K_M.gguf",
     "mmproj-a-9B-F16.gguf"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "name", "tower"), TOWERS)
def test_the_tower_beside_a_model(files, name, tower):
    for each in (files, files[::-1]):
        assert projector_beside(each, "o/r", named(each, "o/r", name)) == tower
        assert named(each, "o/r", name) != tower


def test_a_tower_that_is_not_there_or_not_clear_is_told():
    with pytest.raises(FileError, match="o/r has no vision tower: no file of it is named mmproj"):
        projector_beside(["a-Q8_0.gguf", "mtp-a.gguf"], "o/r", "a-Q8_0.gguf")
    with pytest.raises(FileError, match="several vision towers, download one: mmproj-b-F16.gguf, mmproj-c-F16.gguf"):
        projector_beside(["a-Q8_0.gguf", "mmproj-b-F16.gguf", "mmproj-c-F16.gguf"], "o/r", "a-Q8_0.gguf")


def test_a_tower_is_downloaded_once_and_taken_from_the_cache(hub, nobody, impatient):
    url, asked = hub({"m-Q8_0.gguf": b"weights", "mmproj-F16.gguf": b"tower", "mmproj-F32.gguf": b"more"})
    path = fetch_projector("owner/repo", url)
    assert path.name == "mmproj-F16.gguf" and path.read_bytes() == b"tower"
    assert not [each for each in asked if "m-Q8_0" in each[1] or "F32" in each[1]]
    fetch("owner/repo", url)
    told = []
    assert fetch_projector("owner/repo:Q8_0", nobody, told.append) == path and len(told) == 1

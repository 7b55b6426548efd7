"""`luce chat` is a conversation in the terminal. Each turn is read only from where it differs from the one
before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from luce.cli import stdout
from luce.cli.command import CtrlC, Utf8, with_remedy
from luce.cli.keeping import KEEPING, idle_keeping, scorer_of
from luce.cli.options import (
    COPIES,
    DRAFT_DEVICE,
    DRAFTING,
    EXPERTS,
    MODEL,
    RUN,
    SPLIT,
    drafter_of,
    hf_option,
    idle_copies,
    idle_draft_device,
    idle_sampling,
    idle_split,
    idle_thinking,
    idle_threads,
    misplaced,
    model_path,
    options,
    options_of,
    sampling,
    sampling_of,
)
from luce.cli.seeing import MMPROJ, idle_images, marks, mmproj_of, picture_of, sight_of, with_images
from luce.cli.terminal import Display
from luce.decode.events import Failed, Finished, Tokens
from luce.decode.request import Request
from luce.errors import Cancelled, ContextFull, Error, OutputError, about
from luce.files.tokenizer import NFC_SHRINKS
from luce.images.pixels import Picture
from luce.images.sight import Placed, Sight
from luce.model.defaults import with_room
from luce.model.loaded import Loaded, Settings
from luce.native.structs import MAX_U32
from luce.planning.opened import Files
from luce.planning.plan import require_supported
from luce.prompts.scorer import Scorer
from luce.text.parsers import parser_of
from luce.text.pieces import Reasoning, Text
from luce.text.prompt import BoundedTemplate, chat_template, opening_of, prompt_ids, thinks

HELP = """\
/help          this
/clear         forget the conversation
/system TEXT   begin anew with this system message
/think         switch thinking before the answer on or off
/image FILE    show this image with the next message; it needs --mmproj
/quit          end; so does Ctrl-D
A line that ends with \\ goes on in the next one; pasted lines are one message. Ctrl-C stops an answer, or the
encoding of an image.
"""
QUOTE = '"""'


@click.command()
@options(MODEL)
@hf_option
@click.option("--system", type=Utf8(), help="Begin the conversation with this system message.")
@click.option("--think/--no-think", default=None, help="Let the model think before it answers, or not.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1, MAX_U32),
    default=2048,
    show_default=True,
    help="Stop an answer after so many tokens.",
)
@options(sampling(temp=0.6, top_k=20, top_p=0.95))
@click.option(
    "--ctx",
    type=click.IntRange(1, MAX_U32),
    help="Make room for so many tokens.  [default: 8192, or what was trained]",
)
@options(RUN, DRAFT_DEVICE, SPLIT, EXPERTS, COPIES, MMPROJ, KEEPING, DRAFTING)
def chat(gguf: Path | None, hf: str | None, **flags: Any) -> None:
    """Talk with a model. /help says what else can be done.

    \b
    Examples:
      luce chat --gguf model.gguf
      luce chat --hf OWNER/REPO --system "You are terse."
      luce chat --gguf model.gguf --mmproj mmproj.gguf
    """
    idle = idle_sampling(flags) or idle_threads(flags) or idle_copies(flags) or idle_split(flags)
    idle = idle or idle_draft_device(flags)
    if problem := misplaced(flags) or idle or idle_images(flags, hf) or idle_keeping(flags):
        raise click.UsageError(problem)
    path = model_path(gguf, hf)
    flags["mmproj"] = mmproj_of(flags, hf)
    drafter = drafter_of(path, flags)
    where = flags["device"], drafter, flags["draft_device"]
    with Files(path, flags["mtp_gguf"], *where) as files, Display() as display:
        with about(path):
            require_supported(files.facts)
            template = chat_template(files.file.kv)
        for warning in files.warnings:
            display.warn(warning)
        ctx = flags["ctx"] or min(8192, files.facts.context_length or 8192)
        asked = options_of(flags | {"ctx": ctx}, checkpoints=8, gaps=flags["prefill_keep"] is not None)
        with closing(template), ExitStack() as opened:
            if problem := idle_thinking(template, [{"role": "user", "content": "Hello"}], flags["think"]):
                raise click.UsageError(problem)
            sight = opened.enter_context(seeing) if (seeing := sight_of(files, flags, display)) else None
            asked = with_room(asked, sight.at_once if sight else 0)
            display.spin("loading the model")
            scorer = opened.enter_context(found) if (found := scorer_of(files, flags, ctx)) else None
            with sight.beside() if sight else nullcontext():
                loaded = opened.enter_context(Loaded(files, asked, Settings(asked, host_bytes=0), display.loading))
            display.clear()
            if sight:
                sight.require_fit(loaded.engine.model)
            talk = Talk(loaded, template, flags, display, sight, scorer)
            display.note(f"{files.facts.name or path.name}, a context of {loaded.info.n_ctx} tokens; /help")
            for said in lines(loaded.info.n_ctx * loaded.tokenizer.longest * NFC_SHRINKS):
                if not talk.hear(said):
                    break


def lines(most: int) -> Iterator[str]:
    """Yields what is typed, a message at a time. It has a history where readline is there. Raises ContextFull
    where a message that is piped has more than `most` bytes, and then reads no more of them."""
    if sys.stdin is None:
        return
    with suppress(ImportError):
        import readline  # input() uses it

        readline.parse_and_bind("set enable-bracketed-paste on")  # Lines that are pasted are one message.
    terminal = sys.stdin.isatty()
    while True:
        said: list[str] = []
        left, quoted, goes_on = most, False, True
        try:
            while goes_on:
                line = input(". " if said else "> ") if terminal else piped_line(left)
                left -= len(line.encode(errors="replace")) + 1
                quoted ^= line.count(QUOTE) % 2 == 1
                goes_on = quoted or line.endswith("\\")
                said.append(line.removesuffix("\\"))
        except KeyboardInterrupt:
            stdout.put("\n")
            continue
        except EOFError:
            return
        yield "\n".join(said).replace(QUOTE, "").strip()


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keeps keys that are typed meanwhile off the terminal: they wait for the next message."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def piped_line(most: int) -> str:
    """Returns a line of stdin without its end. Raises ContextFull where it has more than `most` bytes."""
    try:
        line = sys.stdin.buffer.readline(max(most, 0) + 1)
        if len(line) > most:
            raise ContextFull("stdin gives a message of more tokens than the context holds")
        if not line:
            raise EOFError
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except OSError as error:
        raise click.UsageError(f"stdin cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.UsageError("stdin is not UTF-8 text") from None


class Talk:
    """This is a conversation: what was said, and how it is answered."""

    def __init__(
        self,
        loaded: Loaded,
        template: BoundedTemplate,
        flags: dict[str, Any],
        display: Display,
        sight: Sight | None = None,
        scorer: Scorer | None = None,
    ):
        self._loaded, self._template, self._flags, self._display, self._sight = loaded, template, flags, display, sight
        self._scorer = scorer
        self._pictures: list[Picture] = []  # of all messages, and then those of the next one
        self._shown = 0  # So many of them stand in messages.
        self._think: bool | None = flags["think"]
        self._system: str | None = flags["system"]
        self._messages: list[dict[str, Any]] = []

    def hear(self, said: str) -> bool:
        """Takes a message or a command. Returns False where that was all."""
        command, _, rest = said.partition(" ")
        if "\n" in said:
            command = ""  # A command has one line; this was pasted or is quoted.
        if command == "/quit":
            return False
        if command == "/help":
            stdout.put(HELP)
        elif command in ("/clear", "/system"):
            self._messages, self._pictures, self._shown = [], [], 0
            self._system = rest or None if command == "/system" else self._system
        elif command == "/think":
            self._switch_thinking()
        elif command == "/image":
            self._show(rest.strip())
        elif command.startswith("/") and command[1:].isalpha():
            stdout.put(f"{command} is no command: /help\n")
        elif said:
            shown, self._shown = self._shown, len(self._pictures)
            self._messages.append({"role": "user", "content": with_images(said, self._shown - shown)})
            try:
                self._messages.append(self._answer())
            except OutputError:
                raise  # There is nobody to talk to.
            except Error as error:
                self._messages.pop()
                del self._pictures[shown:]
                self._shown = shown
                if isinstance(error, Cancelled):  # Ctrl-C, while an image was encoded.
                    stdout.put("stopped: the message and its images are forgotten\n")
                    return True
                more = "; /clear begins anew" if isinstance(error, ContextFull) else ""
                click.echo(f"Error: {error}{more}", err=True)
        return True

    def _show(self, path: str) -> None:
        """Does /image."""
        try:
            if self._sight is None:
                raise Error("/image needs --mmproj, the file of the model's vision tower")
            if not path:
                raise Error("/image FILE: name an image")
            marks(self._loaded.tokenizer)
            picture = picture_of(self._sight, Path(path).expanduser())
        except Error as error:
            click.echo(f"Error: {with_remedy(error)}", err=True)
            return
        self._pictures.append(picture)
        stdout.put(f"{picture.said}\n")

    def _switch_thinking(self) -> None:
        """Does /think. Where nothing was asked for yet, the template's own choice is what is switched."""
        try:
            now = thinks(self._template, self._think)
        except Error as error:
            click.echo(f"Error: {error}", err=True)
            return
        if now is None:
            click.echo("Error: /think sets enable_thinking, which the chat template does not read", err=True)
            return
        self._think = not now
        stdout.put(f"thinking is {'on' if self._think else 'off'}\n")

    def _answer(self) -> dict[str, Any]:
        """Returns the model's message, which is printed as it comes."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        tokenizer, flags, n_ctx = self._loaded.tokenizer, self._flags, self._loaded.info.n_ctx
        image = marks(tokenizer) if self._pictures else (0, 0, 0)
        how = None, None, False, True, image
        ids = prompt_ids(self._template, tokenizer, [*system, *self._messages], *how, enable_thinking=self._think)
        opening = opening_of(tokenizer, ids)
        placed = Placed(ids, [])
        if self._sight and self._pictures:
            placed = self._sight.placed(ids, image[1], self._pictures)
        ids = placed.tokens
        kept = None
        if self._scorer:
            with CtrlC() as stop:
                kept = self._scorer.compressed(ids, flags["prefill_keep"], lambda: stop.pressed)
            ids = list(kept.of(ids))
        if len(ids) >= n_ctx:
            raise ContextFull(f"{len(ids)} tokens were said, a context of {n_ctx}")
        parser = parser_of(opening)
        thought, text, finished = "", "", None
        with CtrlC() as ctrl_c, quiet_keys():
            images = self._sight.shown(placed, lambda part: ctrl_c.pressed) if self._sight else ()
            asked = tuple(ids), flags["max_tokens"], sampling_of(flags)
            running = self._loaded.run(Request(*asked, images=images, compressed=kept))
            ctrl_c.on_press = running.cancel
            if ctrl_c.pressed:
                running.cancel()
            for event in running:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Tokens):
                    stdout.put_text(event.text)
                    pieces = parser.push(event.text)
                elif isinstance(event, Finished):
                    pieces, finished = parser.flush(), event
                else:
                    continue
                thought += "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
                text += "".join(piece.text for piece in pieces if isinstance(piece, Text))
        stdout.put("\n")
        if finished is not None:
            self._display.summary(finished)
        message = {"role": "assistant", "content": text.removesuffix(opening.dialect.think[1])}
        return message | ({"reasoning_content": thought} if thought else {})

"""Commands taken apart: variables, what starts the processes with its options, and the program with its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlmpipe.importing.findings import is_secret
from vlmpipe.trainer.errors import ConfigError

LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "horovodrun", "mpirun", "mpiexec")
SELF_STARTING = ("llamafactory-cli", "swift", "axolotl", "automodel")
ALL_ARGUMENTS = ("$@", "${@}", "$*", "${*}")
SHELLS = ("sh", "bash", "dash", "zsh", "ash")
MAX_CHARACTERS = 1 << 20  # of a command with its variables
CONTINUED = re.compile(r"\\[ \t\r]*\n")
_SEPARATOR = re.compile(r"[;&|\n]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_REDIRECTION = re.compile(r"[0-9]?(?:>>?|<)([^>&].*)?")
_PREFIXES = ("nohup", "exec", "time", "sudo")  # words of the shell before the program
# Options of launchers without a value.
FLAGS = ("--standalone", "--no_python", "--no-python", "--multi_gpu", "--use_deepspeed", "--use_fsdp", "--same_network",
         "--no_local_rank", "--verbose", "--module", "-m", "--force_multi", "--enable_elastic_training",
         "--allow-run-as-root", "--use_env", "--use-env", "--oversubscribe", "--gloo",
         "--cpu", "--run_path", "--quiet", "--debug")  # fmt: skip


# No value of an option: whatever is not known above has none before such a word.
_BEGINS_PROGRAM = re.compile(r"-.*|.*\.(py|sh)|(.*/)?python[\d.]*")


@dataclass
class Launch:
    """A command in parts."""

    launcher: str = ""
    options: list[tuple[str, str]] = field(default_factory=list)  # name with _ for -, value
    program: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # commands before and after it
    redirections: list[str] = field(default_factory=list)  # such as 2>&1
    unused: list[str] = field(default_factory=list)  # words after a shell's text that it passes to no program
    shell: dict[str, str] = field(default_factory=dict)  # values of the shell's own variables
    is_module: bool = False
    argument_files: dict[str, str] = field(default_factory=dict)  # @FILE -> why its words are not read; empty if read
    settings_file: str = ""  # of TRL, LLaMA-Factory or Axolotl, which the program is given


def words_of_text(text: str) -> list[str]:
    """The words of a shell's commands, with separators such as && and line ends, without comments.

    Raises ConfigError for a quote that does not end.
    """
    joined = re.sub(r"(?m)^[ \t]*#.*$", "", CONTINUED.sub(" ", text))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    in_comment = False
    try:
        for word in lexer:
            in_comment = "\n" not in word and (in_comment or word.startswith("#"))
            words += [] if in_comment else [word]
    except ValueError as error:
        raise ConfigError(
            f"the command cannot be read: {error}", expected="a shell's words, with closed quotes"
        ) from None
    return words


def parse_command(words: Sequence[str]) -> Launch:
    """Take a command apart: variables, the launcher with its options, the program with its arguments."""
    launch = Launch()
    rest = _one_command(_without_redirections(_without_shell(list(words), launch), launch), launch)
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        launch.variables.append(rest.pop(0))
    if rest[:1] == ["env"]:
        rest.pop(0)
    head = rest[0].rpartition("/")[2] if rest else ""
    is_python = re.fullmatch(r"python[\d.]*", head) is not None
    if is_python and rest[1:2] == ["-m"] and len(rest) > 2 and re.fullmatch(
        r"torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.runner", rest[2]
    ):  # fmt: skip
        launch.launcher = {"a": "accelerate", "d": "deepspeed"}.get(rest[2][0], "torchrun")
        rest = rest[3:]
    elif head in LAUNCHERS:
        launch.launcher = head
        rest = rest[1:]
        if head == "accelerate" and rest[:1] == ["launch"]:
            rest = rest[1:]
    if launch.launcher:
        rest = _take_options(rest, launch)
    launch.program = rest
    return launch


def _without_shell(words: list[str], launch: Launch) -> list[str]:
    """The command that a shell is given with -c. Words after it replace "$@", but the first, which is its $0."""
    shell = words[0].rpartition("/")[2] if words else ""
    for index, word in enumerate(words[1:4], 1):
        if shell in SHELLS and re.fullmatch(r"-[a-z]*c", word) and index + 1 < len(words):
            text, after = words_of_text(words[index + 1]), words[index + 3 :]
            if not any(part in ALL_ARGUMENTS for part in text):
                launch.unused += words[index + 2 :]
            return [part for piece in text for part in (after if piece in ALL_ARGUMENTS else [piece])]
    return words


def _without_redirections(words: list[str], launch: Launch) -> list[str]:
    """The words without 2>&1, > FILE and their like, which are for the shell; they are noted in `launch`."""
    remaining: list[str] = []
    index = 0
    while index < len(words):
        taken = 1
        if words[index] == "&" and re.fullmatch(r">>?.*", "".join(words[index + 1 : index + 2])):  # &> FILE
            taken = 2
        match = _REDIRECTION.fullmatch(words[index + taken - 1])
        if not match:
            remaining.append(words[index])
            index += 1
            continue
        if not match[1]:
            taken += 2 if words[index + taken : index + taken + 1] == ["&"] else 1
        launch.redirections.append("".join(words[index : index + taken]))
        index += taken
    return remaining


def _filled_in(word: str, variables: Mapping[str, str]) -> str:
    """A word with the variables that the text itself sets, and the defaults of ${NAME:-DEFAULT}.

    Others stay as $NAME, without braces, which a run file would fill in.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else f"${name}")

    return re.sub(r"\$(?:\{(\w+)(?::?-([^${}]*))?\}|(\w+))", value, word)


def _filled_words(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Words with their variables; a variable that holds options becomes several words, as in a shell."""
    filled: list[str] = []
    characters = 0
    for word in words:
        text = _filled_in(word, variables)
        characters += len(text)
        if characters > MAX_CHARACTERS:
            raise ConfigError("variables make the command too long", expected=f"{MAX_CHARACTERS:,} characters at most")
        holds_options = word.startswith("$") and text.strip().startswith("-") and re.search(r"\s", text.strip())
        filled += shlex.split(text) if holds_options and text.count('"') % 2 == text.count("'") % 2 == 0 else [text]
    return filled


def _one_command(words: list[str], launch: Launch) -> list[str]:
    """Choose the command that trains out of several in a row; the others are noted in `launch`."""
    commands: list[list[str]] = [[]]
    for word in words:
        if _SEPARATOR.fullmatch(word):
            commands.append([])
        else:
            commands[-1].append(word)
    commands = _with_values([command for command in commands if command], launch)
    if not commands:
        return []

    def trains(command: list[str]) -> bool:
        heads = [word.rpartition("/")[2] for word in command if not _ASSIGNMENT.fullmatch(word)][:1]
        return bool(heads) and (heads[0] in (*LAUNCHERS, *SELF_STARTING, "trl") or heads[0].startswith("python"))

    chosen = next((command for command in commands if trains(command)), commands[-1])
    for command in commands:
        if command[0] == "export":
            launch.variables += [word for word in command[1:] if _ASSIGNMENT.fullmatch(word)]
        elif command is not chosen and command[0] != "set":
            launch.others.append(" ".join(command))
    return chosen


def _with_values(commands: list[list[str]], launch: Launch) -> list[list[str]]:
    """The commands with variables that the text sets before them, also by export. Secrets are not filled in."""
    known: dict[str, str] = {}
    with_values: list[list[str]] = []
    for command in commands:
        while command[0] in _PREFIXES and len(command) > 1:
            command = command[1:]
        filled = _filled_words(command, known)
        assigned = filled[1:] if filled[0] == "export" else filled
        if all(_ASSIGNMENT.fullmatch(word) for word in assigned):
            values = dict(word.partition("=")[::2] for word in assigned)
            known |= {name: value for name, value in values.items() if not is_secret((), value, name)}
            if filled[0] != "export":
                launch.shell |= values
                continue
        with_values.append(filled)
    return with_values


def _take_options(words: list[str], launch: Launch) -> list[str]:
    """Options of the launcher, up to the program."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        bare = name.lstrip("-").replace("-", "_")
        if name in ("-m", "--module"):
            launch.is_module = True
        if not sign and name not in FLAGS and rest and not _BEGINS_PROGRAM.fullmatch(rest[0]):
            value = rest.pop(0)
        launch.options.append((bare, value))
    return rest


def is_words_of(launch: Launch) -> str:
    """The tool whose settings the arguments are: trl, llama_factory or axolotl; empty for a program of one's own."""
    head = launch.program[0].rpartition("/")[2] if launch.program else ""
    if re.fullmatch(r"python[\d.]*", head) and len(launch.program) > 1:
        head = launch.program[1].rpartition("/")[2]
    if head == "trl" or re.fullmatch(r"(sft|dpo)(_vlm\w*)?\.py", head):
        return "trl"
    if head == "llamafactory-cli":
        return "llama_factory"
    if head == "axolotl" or "axolotl.cli.train" in launch.program[:3]:
        return "axolotl"
    return ""


def method_of(launch: Launch) -> str:
    """The method that TRL trains by, such as sft or dpo; empty for other programs."""
    if is_words_of(launch) != "trl":
        return ""
    names = [word.rpartition("/")[2] for word in launch.program]
    script = next((name for name in names if name.endswith(".py")), "")
    return re.split(r"[_.]", script)[0] if script else "".join(names[1:2]).lower()


def arguments_of(words: Sequence[str]) -> dict[str, object]:
    """Options with their values: --a 1, --a=1 and --flag; words without an option have their position as name."""
    options: dict[str, object] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"--?[A-Za-z]", word):
            options[f"word {index}"] = word
            continue
        name, sign, value = word.lstrip("-").partition("=")
        values: list[str] = [value] if sign else []
        while not sign and index < len(words) and not re.match(r"--?[A-Za-z]", words[index]):
            values.append(words[index])
            index += 1
        key = name
        while key in options:
            key += "'"
        options[key] = True if not values else _plain(values[0]) if len(values) == 1 else values
    return options


def _plain(text: str) -> object:
    """A word as a number or a switch, if it is one."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

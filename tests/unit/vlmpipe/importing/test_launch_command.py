from __future__ import annotations

import pytest

from vlmpipe.importing.launch_command import arguments_of, parse_command, words_of_text
from vlmpipe.trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "launcher", "options", "program"),
    [
        ("torchrun --nproc_per_node=8 train.py --a 1", "torchrun", [("nproc_per_node", "8")], ["train.py", "--a", "1"]),
        ("python -m torch.distributed.run --nproc-per-node 4 -m x.y", "torchrun", [("nproc_per_node", "4"), ("m", "")],
         ["x.y"]),
        ("accelerate launch --multi_gpu --num_processes 2 a.py", "accelerate",
         [("multi_gpu", ""), ("num_processes", "2")],
         ["a.py"]),
        ("bash -c 'cd /app && deepspeed --num_gpus 8 a.py'", "deepspeed", [("num_gpus", "8")], ["a.py"]),
        ("N=4\nhorovodrun -np $N python a.py", "horovodrun", [("np", "4")], ["python", "a.py"]),
        ("python -m torch.distributed.launch --nproc_per_node=8 --use_env main.py", "torchrun",
         [("nproc_per_node", "8"), ("use_env", "")], ["main.py"]),
        ("deepspeed --some_flag --num_gpus 2 --another main.py --x", "deepspeed",
         [("some_flag", ""), ("num_gpus", "2"), ("another", "")], ["main.py", "--x"]),
        ("mpirun -np 4 --tag-output python3 a.py", "mpirun", [("np", "4"), ("tag_output", "")], ["python3", "a.py"]),
        ("A=1 B=2 python train.py", "", [], ["python", "train.py"]),
    ],
)  # fmt: skip
def test_a_command_is_taken_apart(text: str, launcher: str, options: list[tuple[str, str]], program: list[str]) -> None:
    launch = parse_command(words_of_text(text))
    assert (launch.launcher, launch.options, launch.program) == (launcher, options, program)


def test_lines_comments_and_quotes_are_read_as_a_shell_does() -> None:
    text = "# don't\ntorchrun \\\n  a.py --x 'b c' # end\npip install x && echo \"a\nb\"\n"
    launch = parse_command(words_of_text(text))
    assert launch.program == ["a.py", "--x", "b c"]
    assert launch.others == ["pip install x", "echo a\nb"]
    with pytest.raises(ConfigError, match="No closing quotation"):
        words_of_text("torchrun 'a")


def test_words_of_the_shell_are_not_the_programs() -> None:
    text = 'ARGS="--a 1 \\\n --b ${B:-2}"\nnohup torchrun t.py ${ARGS} --c ${C} --d $N 2>&1 | tee log &> x\n'
    launch = parse_command(words_of_text("export N=3\n" + text))
    assert launch.program == ["t.py", "--a", "1", "--b", "2", "--c", "$C", "--d", "3"]
    assert launch.redirections == ["2>&1", "&>x"]
    assert launch.others == ["tee log"]
    launch = parse_command(words_of_text("torchrun t.py > log 2>err <in >> all"))
    assert (launch.program, launch.redirections) == (["t.py"], [">log", "2>err", "<in", ">>all"])


def test_variables_of_variables_do_not_grow_without_end() -> None:
    text = "A=xx\n" + "A=$A$A\n" * 40 + "torchrun t.py $A"
    with pytest.raises(ConfigError, match="variables make the command too long"):
        parse_command(words_of_text(text))


def test_secrets_are_not_filled_in() -> None:
    launch = parse_command(words_of_text("DB_PASSWORD=hunter22\ntorchrun t.py --db $DB_PASSWORD"))
    assert launch.program == ["t.py", "--db", "$DB_PASSWORD"]


def test_arguments_have_names_and_plain_values() -> None:
    words = ["--a", "1", "--b=2e-5", "--c", "--d", "x", "y", "--a", "3", "file.yaml"]
    assert arguments_of(words) == {"a": 1, "b": 2e-5, "c": True, "d": ["x", "y"], "a'": ["3", "file.yaml"]}

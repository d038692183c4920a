"""How configurations are read and how wrong ones are explained."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from moray.config import Config, load_config, merge, read_yaml, run_entry_point, validate
from moray.errors import ConfigError, DataError
from moray.explain import describe, help_rows


class Leaf(Config):
    width: int = Field(default=4, ge=1)
    note: str | None = None


class Chain(Config):
    type: Literal["chain"] = "chain"
    depth: int = 4


class Wide(Config):
    type: Literal["wide"] = "wide"
    breadth: int = 2
    leaf: Leaf = Leaf(width=9)


Shape = Annotated[Chain | Wide, Field(discriminator="type")]


class Optim(Config):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)


class Run(Config):
    name: str
    out: Path = Path("runs/x")
    shape: Shape = Wide(breadth=3)
    shapes: tuple[Shape, ...] = ()
    by_name: dict[str, Shape] = {}
    weights: dict[str, float] = {}
    optim: Optim = Optim(lr=0.5)
    second: Optim | None = None
    speed: Literal["fast", "slow"] = "fast"
    either: int | str = 3
    steps: int = 10
    flag: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Run":
        if self.steps == 13:
            raise ValueError("steps is 13: accepted is\nany other number; choose one")
        return self


def load(*arguments: str) -> Run:
    return load_config(Run, ["name=x", *arguments])


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_files_merge_left_to_right_and_overrides_come_last(tmp_path):
    first = write(tmp_path / "a.yaml", "name: a\nsteps: 1\noptim: {lr: 1, betas: [0.1, 0.2]}\nweights: {x: 1, y: 2}\n")
    second = write(tmp_path / "b.yaml", "steps: 2\noptim:\n  lr: 2e-3\nweights: {y: 3}\n")
    config = load_config(Run, ["steps=7", first, "steps=8", second])
    assert config.name == "a"
    assert config.steps == 8
    assert config.optim == Optim(lr=2e-3, betas=(0.1, 0.2))
    assert config.weights == {"x": 1, "y": 3}
    assert load_config(Run, [second, first]).steps == 1


def test_lists_are_replaced_whole(tmp_path):
    first = write(tmp_path / "a.yaml", "shapes: [{type: chain}, {type: chain}]")
    assert load(first, "shapes=[{type: wide, breadth: 5}]").shapes == (Wide(breadth=5),)


def test_merge_leaves_its_arguments_alone():
    base, update = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merge(base, update) == {"a": {"b": 3, "c": 2}}
    assert (base, update) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})


def test_every_kind_of_field_is_built():
    config = load(
        "out=some/folder",
        "shapes=[{type: chain, depth: 2}, {type: wide, leaf: {width: 3}}]",
        "by_name.small.type=chain",
        "weights.my-key=1e-3",
        "second.betas=[0, 1]",
        "either=word",
        "speed=slow",
        "flag=true",
    )
    assert config.out == Path("some/folder")
    assert config.shapes == (Chain(depth=2), Wide(leaf=Leaf(width=3)))
    assert config.by_name == {"small": Chain()}
    assert config.weights == {"my-key": 1e-3}
    assert config.second == Optim(betas=(0.0, 1.0))
    assert (config.either, config.speed, config.flag) == ("word", "slow", True)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "+1.e-3", "1.0e-03", ".1e-2"])
def test_numbers_are_read_as_people_write_them(text):
    assert load(f"optim.lr={text}").optim.lr == 1e-3


def test_an_override_keeps_the_declared_default_of_its_neighbours():
    assert load("optim.betas=[0, 0]").optim == Optim(lr=0.5, betas=(0, 0))
    assert load("shape.leaf.note=hi").shape == Wide(breadth=3, leaf=Leaf(width=9, note="hi"))


def test_another_type_replaces_the_fields_of_the_old_variant(tmp_path):
    path = write(tmp_path / "a.yaml", "shape: {type: wide, breadth: 8}")
    assert load(path, "shape.type=chain").shape == Chain()
    assert load(path, "shape.type=chain", "shape.depth=2").shape == Chain(depth=2)
    assert load(path, "shape.type=wide").shape == Wide(breadth=8)


def test_naming_the_type_after_its_fields_does_not_drop_them():
    assert load("by_name.a.depth=2", "by_name.a.type=chain").by_name == {"a": Chain(depth=2)}


def test_configurations_are_frozen_and_direct_construction_is_strict():
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="valid integer"):
        Leaf(width="3")  # pyright: ignore[reportArgumentType]


def test_a_dump_validates_to_the_same_configuration():
    config = load("shapes=[{type: chain}]", "second.lr=2", "out=a/b")
    assert validate(Run, config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("stesp=3", "unknown key 'stesp'; did you mean 'steps'?"),
        ("lr=3", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("optim.beta=3", "unknown key 'optim.beta'; did you mean 'optim.betas'?"),
        ("optim.zzz=3", "unknown key 'optim.zzz'; 'optim' takes lr, betas"),
        ("second.l=3", "unknown key 'second.l'; did you mean 'second.lr'?"),
        ("shape.breath=3", "unknown key 'shape.breath'; did you mean 'shape.breadth'?"),
        ("shape.leaf.widht=3", "unknown key 'shape.leaf.widht'; did you mean 'shape.leaf.width'?"),
        ("shape.depth=3", "unknown key 'shape.depth'; only type chain takes it; 'shape' takes type, breadth, leaf"),
        ("shapes=[{type: chain, dpth: 3}]", "unknown key 'shapes.0.dpth'; did you mean 'shapes.0.depth'?"),
        ("shape.type=chian", "'shape.type' is \"chian\": accepted are chain, wide; did you mean 'chain'?"),
        ("shapes=[{depth: 3}]", "'shapes.0.type' is missing: accepted are chain, wide"),
        ("by_name.a={type: chain, depth: x}", "'by_name.a.depth' is \"x\": input should be a valid integer"),
        ("steps=1.5", "'steps' is 1.5: input should be a valid integer"),
        ("steps='1'", "'steps' is \"1\": input should be a valid integer"),
        ("steps=true", "'steps' is true: input should be a valid integer"),
        ("flag=1", "'flag' is 1: input should be a valid boolean"),
        ("weights.k=x", "'weights.k' is \"x\": input should be a valid number"),
        ("shape.leaf.width=0", "'shape.leaf.width' is 0: input should be greater than or equal to 1"),
        ("optim.lr=.nan", "'optim.lr' is NaN: input should be a finite number"),
        ("optim=3", "'optim' is 3: a mapping of keys is needed, such as optim.NAME=VALUE"),
        ("optim.betas=[1]", "'optim.betas' is [1]: it needs more items"),
        ("speed=fsat", "'speed' is \"fsat\": accepted are 'fast' or 'slow'; did you mean 'fast'?"),
        ("either=1.5", "'either' is 1.5: accepted are int | str"),
        ("name=null", "'name' is null: input should be a valid string"),
        ("steps=13", "steps is 13: accepted is any other number; choose one"),
        ("a..b=3", "override 'a..b=3' has an empty key: write it as name=value or a.b=value"),
        ("steps=[1", "'steps=[1' is not valid YAML: expected ',' or ']', but got '<stream end>' (line 1, column 3)"),
        ("name=2026-13-01", "'name=2026-13-01' is not valid YAML: month must be in 1..12"),
        ("shapes=&x [*x]", "the configuration refers to itself: remove the YAML alias that closes the circle"),
    ],
)
def test_a_wrong_value_is_explained(argument, message):
    with pytest.raises(ConfigError) as caught:
        load(argument)
    assert str(caught.value) == message


def test_up_to_five_problems_are_named_at_once():
    with pytest.raises(ConfigError, match=r"^'name' is missing: give it in a YAML file or as name=VALUE$"):
        load_config(Run, [])
    with pytest.raises(ConfigError, match=r"^unknown key 'nmae'; did you mean 'name'\?$"):
        load_config(Run, ["nmae=x"])
    with pytest.raises(ConfigError) as caught:
        load("steps=x", "flag=x", "optim.lr=x")
    named = {part.partition(" is ")[0] for part in str(caught.value).split(" Also: ")}
    assert named == {"'steps'", "'flag'", "'optim.lr'"}
    for count, end in ((6, "unknown4'. Also: 1 more problem."), (7, "unknown4'. Also: 2 more problems.")):
        with pytest.raises(ConfigError) as caught:
            load(*(f"unknown{number}=x" for number in range(count)))
        assert str(caught.value).endswith(end)
        assert str(caught.value).count("accepted are") == 1


def test_an_item_of_one_member_of_a_union_is_one_problem():
    class Workers(Config):
        num_workers: int | tuple[int, int] = 1

    with pytest.raises(ConfigError) as caught:
        load_config(Workers, ["num_workers=[1, a]"])
    assert str(caught.value).startswith("'num_workers.1' is \"a\": ")
    assert "Also" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^'num_workers' is \"a\": accepted are int . \[int, int\]$"):
        load_config(Workers, ["num_workers=a"])


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        load("steps=" + "x" * 5000)
    assert len(str(caught.value)) < 200


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "drafter.yaml", "name: a")
    (tmp_path / "targets").mkdir()
    with pytest.raises(ConfigError, match=r"draftr\.yaml' does not exist; did you mean '.*drafter\.yaml'\?$"):
        read_yaml(tmp_path / "draftr.yaml")
    with pytest.raises(ConfigError, match=r"target/demo\.yaml' does not exist; did you mean '.*targets'\?$"):
        read_yaml(tmp_path / "target" / "demo.yaml")
    with pytest.raises(ConfigError, match="is a folder: name a YAML file in it"):
        read_yaml(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"the key 'a' stands here twice \(line 3, column 1\)"),
        ("x: {a: 1, a: 2}", "the key 'a' stands here twice"),
        ("- 1\n- 2\n", "holds a list; a mapping of keys is needed"),
        ("[a]: 1", "a key must be plain text"),
        ("a: [1", "is not valid YAML"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_a_broken_file_is_explained(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    write(path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_explained(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        read_yaml(tmp_path / "a.yaml")


def test_keys_are_text_and_yaml_merge_keys_work(tmp_path):
    path = tmp_path / "a.yaml"
    write(path, "1: a\non: b\nbase: &base {x: 1, y: 2}\nmore: {<<: *base, y: 3}\nempty:\n")
    more = {"x": 1, "y": 3}
    assert read_yaml(path) == {"1": "a", "on": "b", "base": {"x": 1, "y": 2}, "more": more, "empty": None}
    assert read_yaml(Path(write(tmp_path / "b.yaml", "# nothing\n"))) == {}


def test_main_receives_the_configuration():
    received: list[Run] = []
    run_entry_point(Run, "Test.", received.append, ["name=a", "steps=3"])
    assert received == [Run(name="a", steps=3)]


@pytest.mark.parametrize("arguments", [["name=a", "stesp=3"], ["name=a", "--steps=3"], ["absent.yaml"], ["steps=13"]])
def test_a_wrong_command_line_gives_one_line_and_exit_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        run_entry_point(Run, "Test.", lambda config: None, arguments)
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_errors_of_main_give_one_line_and_their_exit_code(capsys):
    def main(config: Run) -> None:
        raise DataError("the first line\n  and the second")

    with pytest.raises(SystemExit) as caught:
        run_entry_point(Run, "Test.", main, ["name=a"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: the first line and the second\n"


def test_an_interrupt_says_how_to_go_on_and_a_defect_keeps_its_traceback(capsys):
    def interrupt(config: Run) -> None:
        raise KeyboardInterrupt

    def fail(config: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(SystemExit) as caught:
        run_entry_point(Run, "Test.", interrupt, ["name=a"])
    assert caught.value.code == 130
    assert "run the same command again" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        run_entry_point(Run, "Test.", fail, ["name=a"])


def test_sigterm_ends_in_one_line_and_closes_what_was_opened(capsys):
    closed = []

    def work(config: Run) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        run_entry_point(Run, "Test.", work, ["name=a"])
    assert caught.value.code == 143
    assert capsys.readouterr().err == "ended by SIGTERM: run the same command again to resume\n"
    assert closed
    assert signal.getsignal(signal.SIGTERM) == before


def test_help_lists_every_key_with_type_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        run_entry_point(Run, "Train 100 % of it.", lambda config: None, ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "Train 100 % of it." in out
    listed = {line.strip() for line in out.splitlines()}
    assert listed >= {
        "name: str (required)",
        'out: path = "runs/x"',
        'shape.type: chain | wide = "wide"',
        "shape.depth: int = 4  [chain]",
        "shape.breadth: int = 3  [wide]",
        "shape.leaf.width: int >= 1 = 9  [wide]",
        "shapes: [chain | wide, ...] = []",
        "shapes[].depth: int = 4  [chain]",
        "weights: {str: float} = {}",
        "optim.lr: float > 0 = 0.5",
        "second: Optim | null = null",
        "second.lr: float > 0 = 0.001",
        'speed: fast | slow = "fast"',
        "either: int | str = 3",
    }


class Explained(Config):
    """What keys are explained with."""

    steps: int = 3
    """Updates of the weights. They are counted over all workers, which is not shown."""
    optim: Optim
    second: Optim | None = None
    """Another optimiser, for a test of how long lines look in a narrow terminal; null for none."""


def test_a_key_is_explained_by_its_docstring_on_one_line():
    lines = describe(Explained).splitlines()
    assert "  steps: int = 3  # Updates of the weights" in lines
    assert len(lines) == 1 + len(help_rows(Explained))


def test_in_a_terminal_keys_are_wrapped():
    lines = describe(Explained, 60).splitlines()
    assert max(map(len, lines)) <= 60
    start = next(number for number, line in enumerate(lines) if line.startswith("  second: "))
    end = next(number for number, line in enumerate(lines) if line.startswith("  second.lr: "))
    assert end - start > 1
    assert all(line.startswith("      ") for line in lines[start + 1 : end])
    assert " ".join(line.strip() for line in lines) == " ".join(map(str.strip, describe(Explained).splitlines()))


def test_the_module_imports_nothing_heavy():
    import subprocess

    code = "import sys, moray.config, moray.provenance; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


@pytest.mark.parametrize("word", ["off", "on", "yes", "no"])
def test_words_that_were_truths_in_old_yaml_are_words(word):
    assert load(f"either={word}").either == word
    assert load("flag=true").flag is True


def test_a_list_s_bad_item_is_one_problem(tmp_path):
    class Listed(Config):
        shapes: tuple[Shape, ...] = Field(min_length=1)

    with pytest.raises(ConfigError) as caught:
        load_config(Listed, ["shapes=[{type: chain, depth: deep}]"])
    assert "depth" in str(caught.value)
    assert "Also:" not in str(caught.value)
    with pytest.raises(ConfigError, match="shapes"):
        load_config(Listed, ["shapes=[]"])

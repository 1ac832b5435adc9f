"""Every configuration composes and fits its types; a mistake is named, and the README's commands are real."""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException

from heads import HEADS
from heads.common.resolvers import register_resolvers
from heads.common.typed import typed
from train.config import RunConfig, run_config
from train.package.build import FOLDERS

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("local", "ops", "__pycache__")
}
COMPOSED = sorted(f"{file.relative_to(CONF).with_suffix('')}" for file in [*CONF.glob("*.yaml"), *CONF.glob("ops/*")])
PARTS = ["model", "head", "peft", "objective", "data", "trainer", "launcher", "tree", "eval"]
PRIMARY = {"drafter": "eval"}  # the command that a group belongs to, where it is not training
PRIMARIES = sorted(str(file.relative_to(CONF))[:-5] for place in ("*.yaml", "ops/*.yaml") for file in CONF.glob(place))
OPTIONS = [f"{group}={option}" for group, options in GROUPS.items() if group not in PRIMARY for option in options]
FILES = [*CONF.glob("*.yaml"), *CONF.glob("ops/*.yaml")]
PRIMARIES = sorted(str(file.relative_to(CONF).with_suffix("")) for file in FILES)
LAYERS = ("heads", "inference", "data", "eval", "train", "ops")
README, STRUCTURE, HOWTO, TUTORIAL = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/structure.md", "docs/howto.md", "docs/tutorial.md")
)
COMMANDS = re.findall(r"^(?:python|make) [^#\n]*", "\n".join((README, HOWTO, TUTORIAL)), re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def conf() -> Iterator[None]:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def run(*overrides: str) -> RunConfig:
    return run_config(compose("train", list(overrides)))


@pytest.mark.parametrize(("model", "head"), list(product(GROUPS["model"], HEADS)))
def test_every_model_takes_every_head(model: str, head: str) -> None:
    config = run(f"model={model}", f"head={head}")
    assert (config.head.name, config.name) == (head, f"{model}-{head}")
    assert config.out == f"outputs/{model}-{head}"


def test_a_heads_values_for_the_trainer_yield_to_overrides() -> None:
    assert run("head=mtp").trainer.optimizer != run("head=eagle").trainer.optimizer
    assert run("head=mtp", "trainer.optimizer=adamw", "trainer.lr=0.5").trainer.lr == 0.5
    assert compose("data", ["head=mtp", "features=stored"]).head.name == "mtp"


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("experiment")])
def test_every_option_fits_its_types(option: str) -> None:
    assert isinstance(run("head=eagle", option), RunConfig)


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_fits_its_types_and_yields_to_overrides(experiment: str) -> None:
    assert run(f"experiment={experiment}", "trainer.steps=7", "name=mine").trainer.steps == 7


@pytest.mark.parametrize("primary", PRIMARIES)
def test_every_command_has_a_configuration_that_composes(primary: str) -> None:
    assert compose(primary)


def test_a_debug_run_evaluates_next_to_nothing() -> None:
    small = run("trainer=debug").eval
    assert small.prompts * small.max_new_tokens * (small.repeats + small.warmup) < 100
    assert (small.tier, small.hf) == (["live"], False)
    assert run("trainer=debug", "eval.prompts=5", "head=mtp").eval.prompts == 5


def test_the_embedded_target_is_the_default() -> None:
    config = run()
    assert (config.model.name, config.head.name) == ("tiny", "mtp")
    assert Path(config.model.path) == ROOT / "examples" / "tiny"


@pytest.mark.parametrize("path", ["/models/mine", "/models/mine/", "me/mine", "mine"])
def test_a_users_model_is_one_override_and_names_the_run(path: str) -> None:
    config = run(f"model.path={path}", "head=eagle")
    assert (config.model.path, config.name) == (path, "mine-eagle")


def test_every_head_has_one_yaml() -> None:
    assert {*HEADS, "best"} == set(GROUPS["head"])


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_choice_lists_the_options(group: str) -> None:
    with pytest.raises(MissingConfigException) as error:
        compose(PRIMARY.get(group, "train"), [f"{group}=nonesuch"])
    listed = str(error.value).split("Available options", 1)[1].split()
    assert [option for option in GROUPS[group] if option not in listed] == []


@pytest.mark.parametrize("key", ["stepz", *(f"{group}.stepz" for group in ("model", "trainer", "launcher", "eval"))])
def test_an_unknown_key_is_named(key: str) -> None:
    with pytest.raises(ConfigCompositionException) as error:
        compose("train", [f"{key}=1"])
    assert "stepz" in str(error.value) + str(error.value.__cause__)


@pytest.mark.parametrize("part", ["", *(f"{part}." for part in PARTS)])
def test_an_unknown_key_that_is_forced_in_is_named_in_one_line(part: str) -> None:
    with pytest.raises(ValueError, match="stepz") as error:
        run("head=eagle", f"+{part}stepz=1")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.steps=many", "steps"),
        ("trainer.steps=0", "trainer.steps"),
        ("trainer.min_lr=2", "trainer.min_lr"),
        ("trainer.trackers=[wandb,maybe]", "wandb_offline"),
        ("trainer.on_bad_step=maybe", "skip, stop"),
        ("trainer.spike=0.5", "trainer.spike"),
        ("trainer.peak_tflops=0", "trainer.peak_tflops"),
        ("trainer.micro_tokens=100", "data.length"),
        ("launcher.machine_rank=1", "NODE_RANK"),
        ("launcher.strategy=zero4", "zero3"),
        ("model.dtype=int8", "bfloat16"),
        ("eval.temperature=[]", "eval.temperature"),
        ("~trainer.seed", "seed"),
        ("head.layers=[1]", "layers"),
        ("head.name=nonesuch", "medusa"),
        ("data.length=long", "length"),
        ("+objective.losses.smooth_l1=x", "smooth_l1"),
        ("tree.depth=deep", "depth"),
        ("head.draft_vocab=0", "head.draft_vocab is 0: give 1 or more"),
        ("head.num_heads=0", "head.num_heads is 0: give 1 or more"),
        ("head.rope_theta=0", "head.rope_theta is 0.0: give a number above 0"),
        ("head.rope_theta=nan", "head.rope_theta is nan: give a finite number"),
        ("+objective.losses.soft_ce=inf", "objective.losses.soft_ce is inf: give a finite number"),
    ],
)
def test_a_bad_value_is_named_in_one_line(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        run("head=eagle", override)
    assert "\n" not in str(error.value)


HOSTILE: list[Any] = [-1, 1e30, 10**400, math.nan, "many"]
ALLOWED = {"mask_token": [-1]}  # the vocabulary's last token


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(map(numeric, get_args(hint)))


@pytest.mark.parametrize(
    "part", [*HEADS, "peft", "objective", "data", "features", "trainer", "launcher", "device", "tree", "eval"]
)
def test_a_number_that_cannot_be_is_named_in_one_line(part: str) -> None:
    made: Any = run(f"head={part}").head if part in HEADS else getattr(run("peft=lora"), part)
    values = asdict(made)
    keys = [key for key, hint in get_type_hints(type(made)).items() if numeric(hint)]
    assert keys
    for key, value in product(keys, HOSTILE):
        if value not in ALLOWED.get(key, []):
            with pytest.raises(ValueError, match=key) as error:
                typed(type(made), {**values, key: value})
            assert "\n" not in str(error.value), (key, value)


def test_published_trees_are_whole() -> None:
    for tree, nodes in {"medusa63": 63, "eagle25": 25}.items():
        paths = {tuple(path) for path in run(f"tree={tree}").tree.paths}
        assert len(paths) == nodes
        assert all(len(path) == 1 or path[:-1] in paths for path in paths)


def test_hydra_writes_nothing() -> None:
    hydra = compose("train", return_hydra_config=True).hydra
    assert (hydra.output_subdir, hydra.run.dir, hydra.job.chdir) == (None, ".", False)
    assert "file" not in hydra.job_logging.handlers


def test_the_packages_are_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert setuptools["packages"] == ["headstart", *LAYERS]
    assert set(FOLDERS) == {*LAYERS, "conf", "examples/tiny"}


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_of_the_docs_is_real(command: str) -> None:
    program, target, *overrides = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return
    script = (ROOT / target).read_text(encoding="utf-8")
    primary = re.search(r'@command\("([\w/]+)"\)', script)
    assert primary, f"{target} names no configuration"
    many = "-m" in overrides  # a multirun: of each list of choices, every one
    words = [[word] for word in overrides if word != "-m"]
    if many:
        words = [
            [f"{key}={each}" for each in values.split(",")] for (word,) in words for key, values in [word.split("=")]
        ]
    for chosen in product(*words):
        config = compose(primary[1], list(chosen))
        if primary[1] == "train" and config.head.name != "best":  # which reads the target
            run_config(config)


def tree_paths(tree: str) -> set[str]:
    """Return the full paths that an indented tree lists, a folder with its slash."""
    above: list[str] = []
    paths = set()
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.split()[0]]
        paths.add("".join(above))
    return paths


def test_every_folder_is_listed() -> None:
    listed = tree_paths(STRUCTURE[STRUCTURE.index("```\nheads/") :].split("```")[1].strip("\n"))
    packages = {file.parent for layer in LAYERS for file in (ROOT / layer).glob("*/__init__.py")}
    assert {f"{package.relative_to(ROOT)}/" for package in packages} <= listed
    assert {f"conf/{group}/" for group in (*GROUPS, "ops")} <= listed
    assert [path for path in listed if not (ROOT / path).exists()] == []


def test_the_readme_has_the_commands() -> None:
    programs = {command.split()[1] for command in COMMANDS}
    assert {"demo", "train/run.py", "eval/run.py"} <= programs

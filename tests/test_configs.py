"""Every configuration composes and fits its types; a mistake is named, and the README's commands are real."""

import copy
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from heads import HEADS
from heads.common.resolvers import register_resolvers
from heads.common.typed import typed
from tests.refusals import refuses
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
PARTS = ["model", "head", "peft", "objective", "data", "trainer", "launcher", "tree", "eval"]
PRIMARY = {"drafter": "eval"}  # the command that a group belongs to, where it is not training
PRIMARIES = sorted(
    str(file.relative_to(CONF).with_suffix("")) for place in ("*.yaml", "ops/*.yaml") for file in CONF.glob(place)
)
LAYERS = ("heads", "inference", "data", "eval", "train", "ops")
README, STRUCTURE, HOWTO, TUTORIAL = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/structure.md", "docs/howto.md", "docs/tutorial.md")
)
ERRORS = (ValueError, HydraException, OmegaConfBaseException)
COMMANDS = re.findall(r"^(?:python|make) [^#\n]*", "\n".join((README, HOWTO, TUTORIAL)), re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def conf() -> Iterator[None]:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def run(*overrides: str) -> RunConfig:
    return run_config(compose("train", list(overrides)))


def test_every_option_fits_its_types() -> None:
    """Each option of a group with one of every other group."""
    groups = {group: options for group, options in GROUPS.items() if group not in {"experiment", *PRIMARY}}
    wrong = []
    for number in range(max(map(len, groups.values()))):
        chosen = {group: options[number % len(options)] for group, options in groups.items()}
        words = [f"{group}={option}" for group, option in chosen.items()]
        if chosen["launcher"].startswith("zero"):  # which takes no muon
            words += ["trainer.optimizer=adamw", "trainer.lr=3e-3"]
        try:
            config = run(*words)
        except ERRORS as error:
            wrong.append(f"{words}: {error}")
            continue
        name = f"{chosen['model']}-{config.head.name}"
        if chosen["head"] not in (config.head.name, "best") or not config.out.startswith(f"outputs/{name}"):
            wrong.append(f"{words}: {config.head.name}, {config.name}, {config.out}")
    assert wrong == []


def test_a_heads_values_for_the_trainer_yield_to_overrides() -> None:
    assert run("head=mtp").trainer.optimizer != run("head=eagle").trainer.optimizer
    assert run("head=mtp", "trainer.optimizer=adamw", "trainer.lr=0.5").trainer.lr == 0.5
    assert compose("data", ["head=mtp", "features=stored"]).head.name == "mtp"


def test_every_experiment_yields_to_overrides() -> None:
    for experiment in GROUPS["experiment"]:
        assert run(f"experiment={experiment}", "trainer.steps=7", "name=mine").trainer.steps == 7, experiment


def test_every_command_has_a_configuration_that_composes() -> None:
    for primary in PRIMARIES:
        assert compose(primary), primary


def test_a_debug_run_evaluates_next_to_nothing() -> None:
    small = run("trainer=debug").eval
    assert small.prompts * small.max_new_tokens * (small.repeats + small.warmup) < 100
    assert (small.tier, small.hf) == (["live"], False)
    assert run("trainer=debug", "eval.prompts=5", "head=mtp").eval.prompts == 5


def test_the_embedded_target_is_the_default() -> None:
    config = run()
    assert (config.model.name, config.head.name) == ("tiny", "mtp")
    assert Path(config.model.path) == ROOT / "examples" / "tiny"


def test_a_users_model_is_one_override_and_names_the_run() -> None:
    for path in ("/models/mine/", "me/mine", "mine"):
        config = run(f"model.path={path}", "head=eagle")
        assert (config.model.path, config.name) == (path, "mine-eagle")


def test_every_head_has_one_yaml() -> None:
    assert {*HEADS, "best"} == set(GROUPS["head"])


def changed(config: Any, key: str, value: str | None) -> Any:
    """Return a composed configuration with a key set, or taken out."""
    config = copy.deepcopy(config)
    OmegaConf.set_struct(config, False)
    if value is None:
        group, _, name = key.rpartition(".")
        del OmegaConf.select(config, group)[name]
    else:
        OmegaConf.update(config, key, yaml.safe_load(value), merge=False)
    return config


BAD = {
    ("trainer.steps", "many"): "steps",
    ("trainer.steps", "0"): "trainer.steps",
    ("trainer.min_lr", "2"): "trainer.min_lr",
    ("trainer.trackers", "[wandb,maybe]"): "wandb_offline",
    ("trainer.on_bad_step", "maybe"): "skip, stop",
    ("trainer.spike", "0.5"): "trainer.spike",
    ("trainer.peak_tflops", "0"): "trainer.peak_tflops",
    ("trainer.micro_tokens", "100"): "data.length",
    ("launcher.machine_rank", "1"): "NODE_RANK",
    ("launcher.strategy", "zero4"): "zero3",
    ("model.dtype", "int8"): "bfloat16",
    ("trainer.seed", None): "seed",
    ("head.layers", "[1]"): "layers",
    ("head.name", "nonesuch"): "medusa",
    ("data.length", "long"): "length",
    ("objective.losses.smooth_l1", "x"): "smooth_l1",
    ("tree.depth", "deep"): "depth",
    ("head.draft_vocab", "0"): "head.draft_vocab is 0: give 1 or more",
    ("head.num_heads", "0"): "head.num_heads is 0: give 1 or more",
    ("head.rope_theta", "0"): "head.rope_theta is 0.0: give a number above 0",
    ("head.rope_theta", "nan"): "head.rope_theta is nan: give a finite number",
    ("objective.losses.soft_ce", "inf"): "objective.losses.soft_ce is inf: give a finite number",
    **{(f"{part}stepz", "1"): "stepz" for part in ["", *(f"{part}." for part in PARTS)]},
}


def test_a_bad_value_is_named_in_one_line() -> None:
    made = compose("train", ["head=eagle"])
    for (key, value), named in BAD.items():
        refuses(re.escape(named), run_config, changed(made, key, value))


HOSTILE: list[Any] = [-1, 1e30, 10**400, math.nan, "many"]
ALLOWED = {"mask_token": [-1]}  # the vocabulary's last token


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(map(numeric, get_args(hint)))


def test_a_number_that_cannot_be_is_named_in_one_line() -> None:
    base = run("peft=lora")
    parts: dict[str, Any] = {name: getattr(base, name) for name in (*PARTS[2:], "features", "device")}
    for part, made in (parts | {name: run(f"head={name}").head for name in HEADS}).items():
        keys = [key for key, hint in get_type_hints(type(made)).items() if numeric(hint)]
        assert keys, part
        for key, value in product(keys, HOSTILE):
            if value not in ALLOWED.get(key, []):
                refuses(key, typed, type(made), {**asdict(made), key: value})


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


def test_the_commands_of_the_docs_are_real() -> None:
    makefile, wrong = (ROOT / "Makefile").read_text(encoding="utf-8"), []
    for command in dict.fromkeys(COMMANDS):
        program, target, *overrides = shlex.split(command)
        if program == "make":
            assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), command
            continue
        primary = re.search(r'@command\("([\w/]+)"\)', (ROOT / target).read_text(encoding="utf-8"))
        assert primary, f"{target} names no configuration"
        words = [[word] for word in overrides if word != "-m"]
        if "-m" in overrides:  # a multirun: of each list of choices, every one
            pairs = [word.split("=") for (word,) in words]
            words = [[f"{key}={each}" for each in values.split(",")] for key, values in pairs]
        for number in range(max(map(len, words), default=1)):
            try:
                config = compose(primary[1], [choices[number % len(choices)] for choices in words])
                if primary[1] == "train" and config.head.name != "best":  # which reads the target
                    run_config(config)
            except ERRORS as error:
                wrong.append(f"{command}: {error}")
    assert wrong == []
    assert {"demo", "train/run.py", "eval/run.py"} <= {command.split()[1] for command in COMMANDS}


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

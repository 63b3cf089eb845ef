"""What importing costs, and that registration happens whatever is imported first."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import private_names
import pytest
import signatures

import hf_longattn
from hf_longattn.slots import registry

LABORATORY = ("evaluation", "training", "sharing", "cli")


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported once it has run this code."""
    code += "\nimport json, sys; print(json.dumps([m for m in sys.modules if sys.modules[m] is not None]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import hf_longattn", "from hf_longattn.config import LongAttnConfig; LongAttnConfig()"])
def test_the_package_and_its_config_are_imported_without_torch(code):
    assert not modules_after(code) & {"torch", "transformers", "numpy", "peft"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import importlib.util\nimport hf_longattn.core\nimportlib.util.find_spec('transformers')\n"
        "from transformers.models.llama import modeling_llama",
        "import transformers\nfrom hf_longattn import apply",
    ],
)
def test_names_are_registered_whichever_comes_first_and_only_the_core_is_imported(code):
    code += (
        "\nimport hf_longattn, transformers"
        "\nassert 'scale_invariant' in transformers.AttentionInterface().valid_keys()"
        "\nassert isinstance(transformers.PreTrainedConfig.longattn, property)"
        "\nassert 'exec_module' not in vars(transformers.__spec__.loader)"
        "\nassert hf_longattn.attention.__name__ == 'attention'"
    )
    found = modules_after(code)
    assert {"hf_longattn.integration.patches", "hf_longattn.core.kernels.tiled"} <= found
    assert not {f"hf_longattn.{name}" for name in LABORATORY} & found
    assert not {"peft", "matplotlib", "typer"} & found


@pytest.mark.slow
def test_peft_knows_our_adapters_when_it_is_imported_after_us():
    assert "hf_longattn.sharing.adapters" in modules_after("import hf_longattn\nimport peft")


@pytest.mark.slow
def test_a_peft_that_is_too_old_is_told(tmp_path):
    (tmp_path / "peft.py").write_text("class LoraConfig: pass\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport hf_longattn\nimport peft\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "adapters need PEFT 0.21 or newer" in result.stderr
    assert "adapters do not record their model's method, and load without it" in result.stderr


def test_several_wait_for_one_package():
    code = (
        "import sys\nfrom hf_longattn.lazy_imports import when_imported\ndone = []\nfinders = len(sys.meta_path)\n"
        "for n in range(3):\n    when_imported('colorsys', lambda n=n: done.append(n))\n"
        "import colorsys\nassert done == [0, 1, 2]\nassert len(sys.meta_path) == finders"
    )
    assert "colorsys" in modules_after(code)


def test_an_error_of_a_late_registration_is_an_error_of_the_import():
    code = (
        "import sys\nfrom hf_longattn.lazy_imports import when_imported\n"
        "def refuse(): raise ImportError('too old')\n"
        "when_imported('colorsys', refuse)\n"
        "try:\n    import colorsys\nexcept ImportError as error:\n    assert str(error) == 'too old'\n"
        "else:\n    raise SystemExit(1)"
    )
    modules_after(code)


def test_public_names_are_there_for_people_and_for_type_checkers():
    for package in (hf_longattn, hf_longattn.methods, hf_longattn.evaluation, hf_longattn.training):
        tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
        block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
        assert sorted(a.asname for n in block.body for a in n.names) == sorted(package.__all__)
    assert set(hf_longattn.__all__) <= set(dir(hf_longattn))


@pytest.mark.parametrize("package", ["", ".evaluation", ".integration", ".methods", ".training"])
def test_a_package_lists_its_public_names_alone(package: str) -> None:
    module = importlib.import_module(f"hf_longattn{package}")
    listed = set(dir(module))
    assert listed - set(module.__all__) <= {"evaluation", "training", "__version__"}
    assert all(hasattr(module, name) for name in listed)


def test_editors_know_the_parameters_of_every_method() -> None:
    written = signatures.FILE.read_text(encoding="utf-8")
    assert written == signatures.text(), "run: python tests/kit/signatures.py"
    functions = [node for node in ast.parse(written).body if isinstance(node, ast.FunctionDef)]
    named = [node for node in functions if node.name == "apply" and node.args.kwonlyargs]
    methods = {ast.literal_eval(node.args.args[1].annotation.slice): node for node in named}
    assert list(methods) == sorted([*registry.METHODS, *registry.PRESETS])
    for name, node in methods.items():
        given = {arg.arg for arg in node.args.kwonlyargs} - {"train_length", "layers", "backend"}
        assert given == registry.parameters_of(name) - {"train_length"}
    (evaluate,) = (node for node in functions if node.name == "evaluate")
    shown = inspect.signature(hf_longattn.evaluate)
    assert [a.arg for a in (*evaluate.args.args, *evaluate.args.kwonlyargs)] == list(shown.parameters)
    assert shown.parameters["lengths"].default == "2k,4k,8k"
    for name in hf_longattn.__all__:
        assert getattr(hf_longattn, name) is not None
    user = (Path(__file__).parent / "kit" / "typed_user.py").read_text(encoding="utf-8")  # whom `make lint` checks
    assert not [name for name in hf_longattn.__all__ if not re.search(rf"\b{name}\b", user)]
    assert hf_longattn.training is sys.modules["hf_longattn.training"]  # submodules, too
    with pytest.raises(AttributeError, match="has no attribute 'scale'"):
        hf_longattn.scale  # noqa: B018


COMMANDS = ([], ["extend"], ["eval"], ["inspect"], ["train"], ["push"], ["doctor"])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [*([*command, "--help"] for command in COMMANDS), ["--version"]], ids=" ".join)
def test_help_costs_no_torch_and_less_than_a_second(arguments):
    code = (
        f"import sys, time; sys.argv = ['hf-longattn', *{arguments!r}]\n"
        "from hf_longattn.cli import app\n"
        "try:\n    app()\nexcept SystemExit as done:\n    assert not done.code\n"
        "assert time.process_time() < 1.0, time.process_time()"  # measured: 0.3; seven to ten before
    )
    assert not modules_after(code) & {"torch", "transformers", "numpy"}


@pytest.mark.slow
def test_doctor_looks_at_an_environment_without_importing_transformers():
    """1.5 seconds of a CPU, where all of transformers takes four more."""
    code = (
        "import sys; sys.argv = ['hf-longattn', 'doctor']\n"
        "from hf_longattn.cli import app\n"
        "try:\n    app()\nexcept SystemExit as done:\n    assert not done.code"
    )
    assert not modules_after(code) & {"torch._dynamo", "transformers", "peft"}


MISTAKES = {
    "a model that is none": ["eval", "no/such/model", "--text", "{text}", "--out", "{out}"],
    "a folder without one": ["extend", "{folder}", "--to", "32k", "--text", "{text}"],
    "an adapter for a model": ["probe", "{adapter}", "--text", "{text}"],
    "a damaged checkpoint": ["doctor", "{damaged}"],
    "a text that is none": ["inspect", "{model}", "--text", "{folder}/none"],
    "a method's name": ["eval", "{model}", "--text", "{text}", "--out", "{out}", "--method", "rerop"],
    "a precision": ["memory", "{model}", "--dtype", "float8"],
    "lengths": ["eval", "{model}", "--text", "{text}", "--out", "{out}", "--lengths", "4x"],
    "a folder in use": ["extend", "{model}", "--to", "32k", "--text", "{text}", "--out", "{used}"],
    "a repository's name": ["push", "{model}", "a/b/c"],
    "a recipe": ["train", "continue_lorra"],
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_command_is_refused_without_torch(mistake, tmp_path):
    """Importing torch alone takes longer than all else that such a command does, and transformers thrice as long."""
    for name, content in {
        "model/config.json": "{}",
        "adapter/adapter_config.json": '{"base_model_name_or_path": "x"}',
        "damaged/config.json": "{}",
        "damaged/model.safetensors": "x",
        "used/notes.txt": "mine",
        "folder/text.txt": "a text",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    there = {name: tmp_path / name for name in ("model", "adapter", "damaged", "used", "folder", "out")}
    given = [word.format(**there, text=tmp_path / "folder/text.txt") for word in MISTAKES[mistake]]
    code = (
        f"import sys; sys.argv = ['hf-longattn', *{given!r}]\n"
        "from hf_longattn.cli import app\n"
        "try:\n    app()\nexcept SystemExit as done:\n    assert done.code == 2, done.code"
    )
    assert not modules_after(code) & {"torch", "transformers", "numpy"}


def test_inspect_names_everything_that_it_measures():
    from typer.main import get_command

    from hf_longattn.cli import app
    from hf_longattn.evaluation.measures.diagnostics import WHAT

    what = next(p for p in get_command(app).commands["inspect"].params if p.name == "what")
    assert f": {', '.join(WHAT)};" in what.help


@pytest.mark.slow
def test_private_names_of_other_packages_stand_behind_the_doors() -> None:
    assert private_names.outside() == []
    assert private_names.foreign()  # the script finds those that are there

"""What the command and the package import: nothing heavy before there is work to do."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "huggingface_hub", "ml_dtypes", "safetensors", "transformers")
RUN = "from unshard.cli.main import main"


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import unshard",
        "import unshard; unshard.UnshardError; dir(unshard)",
        f"{RUN}\ntry: main(['--help'])\nexcept SystemExit: pass",
        f"{RUN}\ntry: main(['merge', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    loaded = modules_after(code)
    assert "unshard" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_a_merge_imports_no_torch_even_where_it_is_installed(tmp_path: object) -> None:
    code = f"import unshard; unshard.merge('examples/checkpoint', {str(tmp_path) + '/out'!r})"
    loaded = modules_after(code)
    assert "numpy" in loaded
    assert loaded.isdisjoint({"torch", "transformers"})


def test_everything_public_is_there() -> None:
    import unshard

    for name in unshard.__all__:
        assert getattr(unshard, name) is not None
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = unshard.no_such_thing

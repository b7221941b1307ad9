"""What `import mixednuts_dist` offers."""

import subprocess
import sys

import pytest

import mixednuts_dist


@pytest.mark.parametrize("name", mixednuts_dist.__all__)
def test_a_public_name_can_be_had_and_says_what_it_is(name: str) -> None:
    assert getattr(mixednuts_dist, name).__doc__


def test_an_unknown_name_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(AttributeError, match="it has: Arithmetic, AttackBudget"):
        mixednuts_dist.nothing  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_ray() -> None:
    code = "import mixednuts_dist, sys; print({'torch', 'ray'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"

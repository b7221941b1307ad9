"""Configuration: what is wrong, the value and what is valid, before anything starts."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from mixednuts_dist.config.keys import RangeConfig
from mixednuts_dist.config.run_config import RunConfig, load_config, parse_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.versions import FAST
from mixednuts_dist.errors import ConfigError, ThreatModelError
from tests.helpers.runs import with_key

MINIMAL: dict[str, Any] = {
    "name": "tiny",
    "data": {"uri": "digits"},
    "std": "demo:std",
    "rob": "demo:rob",
    "threat": {"eps": "8/255"},
}
GRID, THOUSANDS = ("scales", "powers", "biases"), {"min": 1, "max": 2, "count": 200}
CODES, NAMES = ["a\0b", "a\nb", "a\n", "\u202ea"], ["a" * 65, "", "..", "../other", "-rf", "\u00e9"]
CONFIGS = sorted((Path(__file__).parents[2] / "jobs" / "configs").glob("*.yaml"))
changed = partial(with_key, MINIMAL)


@pytest.mark.parametrize(
    ("written", "eps"), [("8/255", 8 / 255), ("0.5/255", 0.5 / 255), (" 1 / 4 ", 0.25), (0.1, 0.1)]
)
def test_a_radius_is_a_number_or_a_fraction(written: object, eps: float) -> None:
    assert parse_config(changed("threat.eps", written)).threat.eps == eps


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("threat.eps", 8, r"eps=8.0 exceeds the pixel range \[0, 1\] for norm 'Linf'; did you mean 8/255\?"),
        ("threat.eps", "1/0", "'1/0'"),
        ("threat.epz", 0.1, r"threat.epz: unknown key \(value 0.1\); did you mean 'eps'\? Valid keys here: eps, norm"),
        ("threat.norm", "L7", "norm 'L7' is not known.*Linf, L2"),
        ("partitions", 3, "partitions: unknown key.*partition_size"),
        ("search.beta", 98.5, "search.beta.*98.5"),
        ("search.clamp", "gleu", "gelu.*'gleu'"),
        ("search.scales", {"mim": 1, "max": 2}, "search.scales.mim: unknown key.*keys here: count, max, min, spacing"),
        ("search.scales", [-1, 2], "-1; every candidate must be positive"),
        ("search.scales", [], "search.scales: .*at least 1 item"),
        ("search.biases", {"min": 1, "max": 0}, "min=1 is above max=0"),
        ("evaluate.attacks", ["apgd"], "apgd-ce.*'apgd'"),
        ("evaluate.attacks", ["square", "square"], "'square' occurs twice"),
        ("evaluate", {"attacks": ["joint"], "joint_starts": 0}, "joint_starts=0 disables the attack 'joint'"),
        ("search.scales", {"min": 1, "max": 2, "count": 100_000_000_000}, "search.scales.count.*1000.*100000000000"),
        ("search.scales", {"min": 1, "max": 1e300}, "search.scales.max.*1000000000.*1e[+]300"),
        ("search.powers", list(range(1, 1002)), "search.powers.*at most 1000 items.*1001"),
        ("seed", True, r"seed: takes no true or false.*\(value True\)"),
        ("search.betas", [0.9, True], "search.betas: takes no true or false"),
        ("name", False, "name: takes no true or false.*needs quotes"),
        ("storage", "runs\n\x1b[31m", r"storage: holds characters that cannot be printed"),
        ("storage", "s3://key:sekret@bucket/x", r"storage: credentials .* \(value 's3://...@bucket/x'\)"),
        ("storage", "http://user:sekret@127.0.0.1:9/x", "storage: credentials .* 'http://...@127.0.0.1:9/x'"),
        ("storage", "http://host/x?token=sekret", r"storage: credentials .* 'http://host/x\?token=...'"),
        ("storage", "s3://", "storage: does not name a folder or bucket; give a folder or s3://bucket/prefix"),
        ("storage", " ", "storage: does not name a folder or bucket"),
        ("threat.eps", "1" * 4000 + "/3", r"threat.eps.*111 \.\.\. 111"),
        ("search.sample", 0, r"^configuration: search\.sample: input should be greater than 0 or 'auto' \(value 0\)$"),
        ("names", {"standard": "A"}, "names.standard: input should be 'std', 'rob' or 'mixed'"),
        ("certify", {"radii": [9]}, "certify: no image is certified .* Give a smaller radius or a larger sigma"),
        ("extensions", "my_attack.py", "extensions.*'my_attack.py'"),
        ("extensions", ["nowhere.py"], r"extensions: nowhere\.py does not exist"),
        ("x" * 5000, 1, r"'xxx+ \.\.\. x+': unknown key"),
        (
            "search",
            dict.fromkeys(GRID, THOUSANDS),
            "scales, powers and biases make 8,000,000 candidates; at most 1,000,",
        ),
        *(
            ("name", name, r"^configuration: name: holds characters that cannot be printed [^\n\0]*\Z")
            for name in CODES
        ),
        *(("name", name, r"^configuration: name: .*A-Za-z0-9[^\n]* \(value '[^\n]*'\)\Z") for name in NAMES),
    ],
)
def test_a_wrong_value_is_named_with_the_valid_ones(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(changed(path, value))
    assert "sekret" not in str(caught.value)


def test_many_mistakes_are_told_in_a_few_lines() -> None:
    with pytest.raises(ConfigError) as told:
        parse_config(changed("search.betas", ["x"] * 900))
    lines = str(told.value).splitlines()
    assert len(lines) == 13
    assert lines[-1] == "configuration: and 888 more"


def test_changes_are_checked_as_the_file_is() -> None:
    config = parse_config(MINIMAL)
    other = config.with_changes(evaluate=config.evaluate.with_changes(attacks=("square",)), seed=3)
    assert (other.evaluate.attacks, other.seed, other.search) == (("square",), 3, config.search)
    with pytest.raises(ConfigError, match=r"rob.*\(value 7\)"):
        config.with_changes(rob=7)
    with pytest.raises(ConfigError, match=r"n_itre: unknown key.*'n_iter'"):
        config.attack.with_changes(n_itre=3)


def test_extensions_are_imported_before_their_names_are_checked(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from mixednuts_dist.config.register import CRITERIA\n"
        "@CRITERIA('most-certain-of-all', describes='a toy')\n"
        "class MostCertain: ...\n"
    )
    content = changed("search.criterion", "most-certain-of-all")
    with pytest.raises(ConfigError, match=r"search\.criterion: .*is not known.* Valid names: "):
        parse_config(content)
    config = parse_config({**content, "extensions": [str(mine)]})
    assert config.search.criterion == "most-certain-of-all"
    mine.write_text(mine.read_text() + "# changed\n")
    changed_file = parse_config({**MINIMAL, "extensions": [str(mine)]})
    assert len({changed_file.run_id(), parse_config(MINIMAL).run_id()}) == 2


def test_a_missing_key_is_named() -> None:
    content = {key: value for key, value in MINIMAL.items() if key != "rob"}
    with pytest.raises(ConfigError, match="rob: this key is required and missing"):
        parse_config(content)


def test_overrides_reach_nested_keys_and_read_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    config = load_config(path, ["search.beta=0.97", "data.n=12", "search.powers=[1, 2]", "storage=s3://bucket/prefix"])
    assert (config.search.beta, config.data.n, config.search.powers) == (0.97, 12, (1.0, 2.0))
    assert config.storage == "s3://bucket/prefix"
    for override in ("search.beta", "=3", "name.first=x", "search.beta=[1"):
        with pytest.raises(ConfigError, match="--set"):
            load_config(path, [override])


def test_the_run_id_follows_the_results_and_nothing_else() -> None:
    base = parse_config(MINIMAL)
    assert base.run_id() == parse_config(MINIMAL).run_id()
    assert base.run_id().startswith("tiny-")
    same = [changed("storage", "elsewhere"), changed("compute.batch_size", 7), changed("compute.num_workers", 3)]
    same += [changed("names", {"rob": "WRN-70-16"}), changed("data.class_names", ["cat", "dog"])]
    assert {parse_config(content).run_id() for content in same} == {base.run_id()}
    other = [changed("seed", 1), changed("threat.eps", 0.03), changed("search.beta", 0.9), changed("attack.n_iter", 3)]
    others = [parse_config(content) for content in other]
    assert len({base.run_id(), *(config.run_id() for config in others)}) == 5
    unmoved = [config.attack_determinants() == base.attack_determinants() for config in others]
    assert unmoved == [False, False, True, False], "only beta does not move the attack"


def test_preset_sets_keys_that_others_override() -> None:
    fast = parse_config(changed("preset", "fast"))
    chosen = fast.evaluate.model_dump(mode="json")
    assert {key: chosen[key] for key in FAST} == FAST
    by_hand = {"attack": {"n_iter": 100, "n_target_classes": 3}, "evaluate": FAST}
    assert fast.run_id() == parse_config({**MINIMAL, **by_hand}).run_id() != parse_config(MINIMAL).run_id()
    assert parse_config(changed("preset", "standard")).run_id() == parse_config(MINIMAL).run_id()
    longer = parse_config({**MINIMAL, "preset": "fast", "evaluate": {"n_iter": 70}}).evaluate
    only_evaluation = parse_config(changed("evaluate.preset", "fast"))
    assert only_evaluation.evaluate.model_dump() == fast.evaluate.model_dump()
    assert only_evaluation.attack_determinants() == parse_config(MINIMAL).attack_determinants()
    assert (longer.n_iter, longer.attacks) == (70, tuple(FAST["attacks"]))
    assert fast.evaluate.notes != [] == longer.notes


def test_ranges_include_both_ends() -> None:
    values = RangeConfig(min=0.05, max=5, count=8, spacing="log").values()
    assert len(values) == 8
    assert (values[0], values[-1]) == (0.05, 5)
    ratios = [b / a for a, b in pairwise(values)]
    assert ratios == pytest.approx([100 ** (1 / 7)] * 7)
    assert RangeConfig(min=1, max=4, count=4).values() == (1, 2, 3, 4)
    assert RangeConfig(min=2, max=4, count=1).values() == (2,)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), RunConfig)


@pytest.mark.parametrize(
    ("norm", "eps"),
    [("Linf", 0), ("Linf", float("nan")), ("L2", -1), ("L1", 8 / 255), ("L7", 1), ("Linf", 1.5), ("Linf", "8/255")],
)
def test_threat_models_are_checked(norm: Any, eps: Any) -> None:
    with pytest.raises(ThreatModelError):
        ThreatModel(norm, eps)


def test_all_betas_contain_the_deployed_one() -> None:
    config = parse_config(changed("search.beta", 0.123))
    assert config.search.criterion == "exact"
    assert 0.123 in config.search.all_betas()
    assert list(config.search.all_betas()) == sorted(config.search.all_betas(), reverse=True)


def test_the_fast_preset_of_a_run_is_that_of_its_attacks() -> None:
    config = parse_config({**MINIMAL, "preset": "fast", "attack": {"n_iter": 7}})
    by_hand = {"attack": {"n_iter": 7, "n_target_classes": 3}, "evaluate": FAST}
    assert config.run_id() == parse_config({**MINIMAL, **by_hand}).run_id()
    assert config.with_changes(seed=1).attack.n_iter == 7
    assert parse_config(config.model_dump(mode="json")).run_id() == config.run_id()


def test_paper_preset_sets_the_paper_keys() -> None:
    config = parse_config({**MINIMAL, "preset": "paper"})
    assert (config.search.criterion, config.search.rounds) == ("paper-interpolated", 0)
    assert (config.attack.border_restarts, config.evaluate.joint_starts) == (0, 0)
    assert (config.evaluate.warm_start, config.precision) == (False, "fp32")
    assert (config.attack.n_iter, config.attack.n_target_classes) == (100, 9)
    assert (config.evaluate.n_iter, config.evaluate.n_target_classes, config.evaluate.n_queries) == (100, 9, 5000)

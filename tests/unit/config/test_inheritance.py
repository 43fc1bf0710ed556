"""`defaults:` chains, `_override_`, and files that cannot be read."""

import pytest
from omegaconf import OmegaConf

from nemo_rl_dsv4.config.inheritance import load_layers, merge_layers
from nemo_rl_dsv4.errors import UserError


def merged(path):
    return OmegaConf.to_container(merge_layers(load_layers(path)), resolve=True)


def test_parents_are_read_depth_first_and_later_ones_win(write):
    write("grandparent.yaml", "a: 1\nb: 1\nc: 1\nd: 1\n")
    write("left.yaml", "defaults: grandparent.yaml\nb: 2\nc: 2\nd: 2\n")
    write("right.yaml", "c: 3\nd: 3\n")
    child = write("child.yaml", "defaults: [left.yaml, right.yaml]\nd: 4\n")
    assert merged(child) == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_a_later_parent_brings_its_own_ancestors_along(write):
    write("grandparent.yaml", "a: 1\n")
    write("left.yaml", "a: 2\n")
    write("right.yaml", "defaults: grandparent.yaml\nb: 3\n")
    assert merged(write("child.yaml", "defaults: [left.yaml, right.yaml]\n")) == {"a": 1, "b": 3}


def test_paths_are_relative_to_the_file_that_names_them(write):
    write("bases/deep/root.yaml", "x: 1\n")
    write("bases/middle.yaml", "defaults: deep/root.yaml\ny: 2\n")
    assert merged(write("recipes/child.yaml", "defaults: ../bases/middle.yaml\n")) == {"x": 1, "y": 2}


def test_sections_merge_and_override_replaces_them(write):
    write("parent.yaml", "top:\n  kept: {a: 1, b: 2}\n  replaced: {a: 1, b: 2}\n")
    child = write("child.yaml", "defaults: parent.yaml\ntop:\n  kept: {b: 3}\n  replaced: {_override_: true, b: 3}\n")
    assert merged(child) == {"top": {"kept": {"a": 1, "b": 3}, "replaced": {"b": 3}}}


def test_an_override_mark_of_a_middle_file_does_not_reach_the_files_after_it(write):
    write("parent.yaml", "s: {a: 1}\n")
    write("middle.yaml", "defaults: parent.yaml\ns: {_override_: true, b: 2}\n")
    assert merged(write("child.yaml", "defaults: middle.yaml\ns: {c: 3}\n")) == {"s": {"b": 2, "c": 3}}


def test_interpolation_sees_the_child_values(write):
    write("parent.yaml", "n: 1\ntwice: ${n}\n")
    assert merged(write("child.yaml", "defaults: parent.yaml\nn: 5\n")) == {"n": 5, "twice": 5}


def test_a_null_parent_section_can_be_filled(write):
    write("parent.yaml", "s: null\n")
    assert merged(write("child.yaml", "defaults: parent.yaml\ns: {a: 1}\n")) == {"s": {"a": 1}}


def test_circular_defaults_name_the_circle(write):
    write("a.yaml", "defaults: b.yaml\n")
    with pytest.raises(UserError, match=r"circle \(a.yaml -> b.yaml -> a.yaml\)"):
        load_layers(write("b.yaml", "defaults: a.yaml\n").parent / "a.yaml")


def test_the_same_parent_twice_is_no_circle(write):
    write("root.yaml", "a: 1\n")
    write("left.yaml", "defaults: root.yaml\n")
    write("right.yaml", "defaults: root.yaml\n")
    assert merged(write("child.yaml", "defaults: [left.yaml, right.yaml]\n")) == {"a": 1}


def test_a_missing_file_names_a_similar_one(write):
    here = write("grpo-tiny.yaml", "a: 1\n").parent
    with pytest.raises(UserError, match=r"no such recipe file; did you mean grpo-tiny.yaml\?"):
        load_layers(here / "grpo-tyni.yaml")


def test_a_missing_parent_names_the_file_that_wants_it(write):
    with pytest.raises(UserError, match=r"nowhere.yaml: no such recipe file \(named in `defaults:` of child.yaml\)"):
        load_layers(write("child.yaml", "defaults: nowhere.yaml\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\n", "not valid YAML at line"),
        ("- 1\n- 2\n", "this file holds a list"),
        ("defaults: {a: 1}\n", "takes a path or a list"),
        ("defaults: [1]\n", "takes a path or a list"),
        ("a: 1\na: 2\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(write, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load_layers(write("broken.yaml", text))
    assert "broken.yaml" in str(caught.value)


def test_a_binary_file_and_a_folder_are_named(write, tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="binary.yaml"):
        load_layers(binary)
    with pytest.raises(UserError, match="is a folder"):
        load_layers(tmp_path)


def test_an_anchor_that_refers_to_itself_is_named(write):
    """It ended in a RecursionError."""
    path = write("a.yaml", "grpo: &again\n  seed: 1\n  more: *again\n")
    with pytest.raises(UserError, match=r"a.yaml: a YAML anchor refers to itself"):
        load_layers(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s: {c: [1]}", "child.yaml: s.c is a list, wanted a mapping as in the files that it inherits from"),
        ("s: {d: {x: 1}}", "child.yaml: s.d is a mapping, wanted a list"),
    ],
)
def test_a_list_does_not_take_the_place_of_a_mapping(write, text, message):
    """OmegaConf's "Cannot merge DictConfig with ListConfig" named no key."""
    write("parent.yaml", "s: {c: {x: 1}, d: [1], e: null}\n")
    with pytest.raises(UserError, match=message):
        merged(write("child.yaml", f"defaults: parent.yaml\n{text}\n"))
    assert merged(write("fits.yaml", "defaults: parent.yaml\ns: {c: null, d: [2], e: [3]}\n")) == {
        "s": {"c": None, "d": [2], "e": [3]}
    }

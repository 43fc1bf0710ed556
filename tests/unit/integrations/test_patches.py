"""Patches and registrations are applied where needed, undone, and refused where the tree has moved."""

import sys
from types import SimpleNamespace

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl import patches, tree
from nemo_rl_dsv4.integrations.nemo_rl.patches import (
    Patch,
    applied,
    guard_is_there,
    registered,
    transformers_guard,
    worker_environment,
)


def replace(owner, name="limit", value=2, needed=True):
    return Patch(f"patch-of-{name}", lambda: owner, name, lambda before: before + value, lambda: needed)


def test_a_patch_holds_inside_its_block_and_is_undone_even_after_an_error():
    owner = SimpleNamespace(limit=1, other=10)
    with pytest.raises(RuntimeError, match="inside"), applied([replace(owner), replace(owner, "other")]) as names:
        assert (owner.limit, owner.other) == (3, 12)
        assert names == ["patch-of-limit", "patch-of-other"]
        raise RuntimeError("inside")
    assert (owner.limit, owner.other) == (1, 10)


def test_a_patch_that_is_not_needed_changes_nothing():
    owner = SimpleNamespace(limit=1)
    with applied([replace(owner, needed=False)]) as names:
        assert names == [] and owner.limit == 1


def test_what_was_to_be_replaced_is_gone():
    message = "there is no SimpleNamespace.limit to replace; the tree has moved"
    with pytest.raises(UserError, match=message), applied([replace(SimpleNamespace())]):
        pass


def test_a_patch_replaced_by_someone_else_is_not_undone_over_them():
    owner = SimpleNamespace(limit=1)
    with pytest.raises(UserError, match="was replaced by something else"), applied([replace(owner)]):
        owner.limit = 99
    assert owner.limit == 99


def test_a_registry_gets_its_entry_back_out_and_is_never_overwritten():
    registry = {"math": "theirs"}
    with registered(registry, "dsv4_math", "ours"):
        assert registry == {"math": "theirs", "dsv4_math": "ours"}
    assert registry == {"math": "theirs"}
    with pytest.raises(UserError, match="already has 'math': 'theirs'"), registered(registry, "math", "ours"):
        pass


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A tree whose policy package refuses the installed transformers as NeMo-RL's does."""
    policy = tmp_path / "nemo_rl" / "models" / "policy"
    policy.mkdir(parents=True)
    for folder in (tmp_path / "nemo_rl", tmp_path / "nemo_rl" / "models"):
        (folder / "__init__.py").write_text("")
    (policy / "__init__.py").write_text(
        "import transformers\n"
        "assert tuple(map(int, transformers.__version__.split('.')[:2])) < (5, 12), 'too new'\n"
        "PolicyConfig = dict\n"
    )
    (tmp_path / "nemo_rl" / "algorithms").mkdir()
    (tmp_path / "nemo_rl" / "algorithms" / "grpo.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "nemo_rl" or name.startswith("nemo_rl.")]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name == "nemo_rl" or name.startswith("nemo_rl.")]:
        del sys.modules[name]


def test_the_guard_against_new_transformers_is_passed_and_the_version_put_back(checkout, monkeypatch):
    """AutoModel pins transformers 5.18.0; NeMo-RL's import refuses 5.12 and newer."""
    import transformers

    before = transformers.__version__
    monkeypatch.setattr(tree, "PYTHON", (3, 11))
    with pytest.raises(AssertionError, match="too new"):
        __import__("nemo_rl.models.policy")
    assert patches.import_nemo_rl() == ["transformers-guard"]
    assert sys.modules["transformers"].__version__ == before
    assert patches.import_nemo_rl() == []  # imported already


def test_a_tree_without_the_guard_is_not_patched(checkout):
    source = checkout / "nemo_rl" / "models" / "policy" / "__init__.py"
    assert guard_is_there(checkout) and transformers_guard(checkout).needed()
    source.write_text("PolicyConfig = dict\n")
    assert not guard_is_there(checkout) and not transformers_guard(checkout).needed()


def test_workers_find_both_packages_and_what_was_on_the_path(checkout):
    own = str(patches.Path(patches.__file__).resolve().parents[3])
    found = worker_environment(checkout, f"/mine::{own}")
    assert found == {"PYTHONPATH": f"{own}:{checkout}:/mine"}


def test_an_absent_tree_and_an_old_python_are_explained(checkout, monkeypatch):
    monkeypatch.setattr(tree, "PYTHON", (3, 99))
    with pytest.raises(UserError, match=r"this is Python 3\.\d+.*; NeMo-RL's sources need 3.99 or newer.*embedded"):
        tree.require_tree()
    monkeypatch.setattr(tree, "nemo_rl_source", lambda: None)
    with pytest.raises(UserError, match=r"not importable; put its checkout on PYTHONPATH .*--trainer embedded"):
        tree.require_tree()


def test_names_that_moved_and_libraries_that_are_missing_are_told_apart(checkout):
    (checkout / "nemo_rl" / "broken.py").write_text("import library_that_is_not_there\n")
    with pytest.raises(UserError, match=r"no no_such_name in nemo_rl.algorithms.grpo: it has moved since"):
        tree.symbol("nemo_rl.algorithms.grpo:no_such_name")
    with pytest.raises(UserError, match=r"no Thing in nemo_rl.no_such_module: it has moved since"):
        tree.symbol("nemo_rl.no_such_module:Thing")
    with pytest.raises(
        UserError, match="importing nemo_rl.broken for NeMo-RL needs the library library_that_is_not_there"
    ):
        tree.symbol("nemo_rl.broken:Thing")


def test_the_revision_of_a_checkout_is_its_commit(checkout):
    assert tree.revision(checkout) == "unknown revision"
    (checkout / "nemo_rl" / "package_info.py").write_text("MAJOR = 1\nMINOR = 2\nPATCH = 3\n")
    assert tree.revision(checkout) == "version 1.2.3"
    git = checkout / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n" + "b" * 40 + " refs/heads/main\n")
    assert tree.revision(checkout) == "b" * 40
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert tree.revision(checkout) == "a" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert tree.revision(checkout) == "c" * 40

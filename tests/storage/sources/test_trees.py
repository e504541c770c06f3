"""Which folders are splits and which classes, and what else is in a tree, behind links, too."""

from __future__ import annotations

import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from storage.errors import SourceError
from storage.sources.trees import PicturePath, pictures_below, read_tree

TRAIN = ("train", "Train", "TRAINING", "training")
HELD_OUT = ("test", "Test", "testing", "val", "valid", "VALIDATION", "dev", "held-out", "eval")
AROUND = ("{}", "{}_set", "{}2017", "seg_{}", "My {} Images")


def grown(root: Path, *folders: str, n: int = 2) -> Path:
    """Empty files that are named like pictures: a tree is understood by its names alone."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(n):
            (root / folder / f"{number}.png").touch()
    return root


def below(files: list[Path], root: Path) -> set[str]:
    return {file.relative_to(root).parent.as_posix() for file in files}


@settings(max_examples=50, deadline=None)
@given(
    train=st.sampled_from(TRAIN),
    held_out=st.sampled_from(HELD_OUT),
    around=st.sampled_from(AROUND),
    inside=st.sampled_from(["", "again"]),
    classes=st.sets(st.sampled_from(["a", "b", "café", "test tube"]), max_size=3),
)
def test_folders_called_like_splits_are_splits_and_never_classes(
    train: str, held_out: str, around: str, inside: str, classes: set[str]
) -> None:
    """`inside`: whether a split's folder has one of its own name in it, as unpacked archives do."""
    with tempfile.TemporaryDirectory() as folder:
        root, names = Path(folder), [around.format(train), around.format(held_out)]
        for name in names:
            above = f"{name}/{name}" if inside else name
            grown(root, *(f"{above}/{c}" for c in classes) if classes else [above])
        tree = read_tree(root)
        for wanted, name, other in (("train", *names), ("heldout", *reversed(names))):
            taken = tree.take(wanted)
            n = 2 * max(1, len(classes))
            assert {file.relative_to(root).parts[0] for file in taken.files} == {name}
            assert set(taken.class_names) == classes
            assert (taken.labels is None) == (not classes)
            assert taken.said["taken"] == f"{name}/ ({n} pictures)"
            assert taken.said["left aside"] == f"{other}/ ({n} pictures)"
            assert "left aside" not in tree.take(wanted, beside="all").said
        assert len(tree.take("all").files) == 2 * n


names = st.sampled_from(["train", "Train", "test", "valid", "cat", "plane", "seg_train", "test1"])


@settings(deadline=None)
@given(paths=st.sets(st.lists(names, max_size=3).map("/".join), min_size=1, max_size=5))
@example({"cat", "plane", "train"})
@example({"cat/train", "cat/test"})
@example({"", "test", "train"})
def test_every_picture_is_taken_or_said_to_be_left_aside_or_the_tree_is_refused(
    paths: set[str],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = grown(Path(folder), *paths)
        try:
            tree = read_tree(root)
            taken = tree.take("train")
        except SourceError:
            assert len(paths) > 1 or next(iter(paths)).count("/")
            return
        splits = {"train", "Train", "test", "valid"} & set(taken.class_names)
        within = [file.relative_to(root).parts for file in taken.files]
        assert len(splits) <= 1
        if splits and "all" in tree.parts:
            assert f"{splits.pop()}/, a class" in taken.said["no split"]
            assert {len(parts) for parts in within} == {2}
        for file in {*tree.walk.files} - {*taken.files}:
            first, *_more = file.relative_to(root).parts
            said = taken.said["not read" if file.parent == root else "left aside"]
            assert ("in no folder" if file.parent == root else f"{first}/ (") in said


@pytest.mark.parametrize(
    ("folders", "named"),
    [
        (
            ("train", "plane", "test"),
            ("test/, train/ beside 2 pictures in plane/", "?tree=classes"),
        ),
        (
            ("train/a", "test/a", "docs"),
            ("test/, train/ beside 2 pictures in docs/", "?tree=splits"),
        ),
        (("train", "test1"), ("train/ beside 2 pictures in test1/",)),
        (("train/a", "cat/a", "dog/a"), ("train/ beside 4 pictures in cat/, dog/",)),
        (("train/a", "."), ("train/ beside 2 pictures in no folder",)),
        (("train/a", "Training/a"), ("Training and train",)),
        (("data/train/a", "data/test/a"), ("data has test/, train/", "give folder:")),
        (("a/train", "a/test", "b"), ("a has test/, train/", "put splits above classes")),
        (("train/a/test", "train/a/train", "test/a"), ("a has test/, train/",)),
        (("train/test/a", "train/train/a", "test/a"), ("train has test/, train/",)),
        (("test/a", "val/a"), ("has test/, val/, but no folder train",)),
        (("train/a", "train", "test/a"), ("train has 2 pictures beside its class folders",)),
        ((".hidden", "a/.hidden"), ("has no pictures", "hidden (2)")),
    ],
)
def test_ambiguous_trees_are_refused_with_their_folders_and_the_fix(
    tmp_path: Path, folders: tuple[str, ...], named: tuple[str, ...]
) -> None:
    with pytest.raises(SourceError) as caught:
        read_tree(grown(tmp_path, *folders)).take("train")
    assert all(part in str(caught.value) for part in named)
    assert "\n" not in str(caught.value)


def test_a_tree_is_what_the_source_says_it_is(tmp_path: Path) -> None:
    grown(tmp_path, "train/a", "test/a", "docs")
    taken = read_tree(tmp_path, "splits").take("train")
    assert below(taken.files, tmp_path) == {"train/a"}
    assert taken.said["not read"] == "2 pictures in docs/, beside the splits"
    assert read_tree(tmp_path, "classes").take("train").class_names == ("docs", "test", "train")
    with pytest.raises(SourceError, match="no folders train and test"):
        read_tree(tmp_path / "docs", "splits")


def test_a_held_out_class_that_training_lacks_changes_no_number_of_a_class(tmp_path: Path) -> None:
    """ImageFolder numbers the classes of the training folder alone."""
    tree = read_tree(grown(tmp_path, "train/b", "train/c", "test/a", "test/c"))
    assert tree.take("train").class_names == ("b", "c")
    held_out = tree.take("heldout")
    assert held_out.class_names == ("b", "c", "a")
    assert held_out.labels == [2, 2, 1, 1]
    assert held_out.said["classes not in train"] == "a"


def test_class_names_are_one_in_every_unicode_form(tmp_path: Path) -> None:
    forms = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    tree = read_tree(grown(tmp_path, *forms, "zoo"))
    taken = tree.take("train")
    assert taken.class_names == (forms[0], "zoo")
    assert taken.labels == [0, 0, 0, 0, 1, 1]
    assert "(1)" in taken.said["one class"]


def test_links_to_folders_are_followed_and_those_that_lead_back_are_said(tmp_path: Path) -> None:
    grown(tmp_path / "elsewhere", "more", n=3)
    grown(tmp_path / "tree", "a", "b/deep")
    (tmp_path / "tree/a/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree/c").symlink_to(tmp_path / "elsewhere/more")
    (tmp_path / "tree/b/deep/back").symlink_to(tmp_path / "tree")
    (tmp_path / "tree/self").symlink_to("self")
    (tmp_path / "elsewhere/more/up").symlink_to(tmp_path / "elsewhere")
    taken = read_tree(tmp_path / "tree").take("train")
    assert taken.class_names == ("a", "b", "c")
    assert taken.labels == [0] * 5 + [1] * 2 + [2] * 3
    said = taken.said["passed over"]
    assert "link back to a folder above (3)" in said
    assert "dangling link (1)" in said


def test_what_is_passed_over_is_counted_by_reason(tmp_path: Path) -> None:
    grown(tmp_path, "a", "empty", n=1)
    (tmp_path / "empty" / "0.png").unlink()
    for name in ("a/1.HEIC", "a/2.heic", "notes", "a/.0.jpg", "a/.DS_Store"):
        (tmp_path / name).touch()
    (tmp_path / "a/gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a/3.JFIF").touch()
    said = read_tree(tmp_path).take("all").said
    assert said["unlike ImageFolder"].endswith("passed over: .jfif (1)")
    walk = pictures_below(tmp_path)
    assert walk.said["passed over"] == (
        ".heic (2), hidden (1), dangling link (1), folder without pictures (1), no ending (1)"
    )
    (tmp_path / "empty" / "x.tga").touch()
    with pytest.raises(SourceError, match=r"but \.tga \(1\)"):
        read_tree(tmp_path / "empty").take("all")


def test_choices_stand_behind_the_path_unless_a_folder_is_called_so(tmp_path: Path) -> None:
    chosen = PicturePath.parse("a/b?orientation=exif&tree=classes")
    assert (str(chosen.path), chosen.decoding.orientation, chosen.tree) == (
        "a/b", "exif", "classes",
    )  # fmt: skip
    (tmp_path / "x?tree=classes").mkdir()
    assert PicturePath.parse(f"{tmp_path}/x?tree=classes").path.name == "x?tree=classes"
    assert PicturePath.parse("what?").path == Path("what?")
    for wrong in ("a?orientation=up", "a?size=3", "a?tree=classes&x"):
        with pytest.raises(SourceError, match=r"is none of orientation=stored\|exif"):
            PicturePath.parse(wrong)

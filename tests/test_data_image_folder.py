from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adtrain import data
from adtrain.data import DataError, DataOptionError, Options, images


def save(path: Path, value: int = 0, size: tuple[int, int] = (3, 4), colour: bool = False) -> Path:
    """Write an image of one value; `size` is (height, width). In colour, green is 255 - value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((*size, 3) if colour else size, value, np.uint8)
    if colour:
        pixels[..., 1] = 255 - value
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes: three images in cat/, one in dog/."""
    for i in range(3):
        save(tmp_path / "cat" / f"{i}.png", i)
    save(tmp_path / "dog" / "a.png", 9)
    return tmp_path


def test_classes_are_the_subfolders_in_sorted_order(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "cat" / ".DS_Store").touch()
    (folder / "README").touch()
    found = images.read_folder(folder, Options())
    assert found.classes == ("cat", "dog")
    assert found.train.labels.tolist() == ["cat", "cat", "cat", "dog"]
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 9]
    assert found.train.images.shape == (4, 1, 3, 4)
    assert found.test is None


def parts(root: Path, *names: str) -> Path:
    """A folder with these parts, of two classes with one image each; the pixels of a part are its number."""
    for number, part in enumerate(names):
        for name in ("cat", "dog"):
            save(root / part / name / "1.png", number)
    return root


def test_train_and_test_folders_are_the_parts(tmp_path: Path) -> None:
    root = parts(tmp_path / "both", "train", "test")
    save(root / "test" / "eel" / "1.jpg", 7)
    found = data.load(path=root)
    assert found.classes == ("cat", "dog", "eel")
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([0, 1], [0, 1, 2])
    assert found.validation_rows == 0


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_folder_beside_train_and_test_has_the_validation_images(tmp_path: Path, name: str) -> None:
    found = data.load(path=parts(tmp_path / "three", "train", name, "test"))
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    assert (found.validation_rows, found.test.images[:, 0, 0, 0].tolist()) == (2, [2, 2])
    for seed in (0, 1):
        train, validation = data.split_validation(found.train, 0.0, seed, found.validation_rows)
        assert validation is not None
        assert (np.asarray(train.images).max(), np.asarray(validation.images).min()) == (0, 1)


def test_a_validation_folder_without_a_test_folder_is_the_test_part_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = parts(tmp_path / "two", "train", "val")
    found = data.load(path=root)
    assert (found.test.images[:, 0, 0, 0].tolist(), found.validation_rows) == ([1, 1], 0)
    (message,) = caplog.messages
    reason = "found no folder test; val, which has validation images, is the test part"
    assert message == f"adtrain: warning: {root}: {reason}"


def test_other_files_in_the_folder_of_a_class_are_skipped_with_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "cat" / "notes.txt").touch()
    (folder / "dog" / "table.csv").write_text("a,b\n")
    assert len(images.read_folder(folder, Options()).train.labels) == 4
    (message,) = caplog.messages
    first = folder / "cat" / "notes.txt"
    assert message == f"adtrain: warning: {folder}: skipped 2 files of other types than PNG and JPEG, such as {first}"


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        save(tmp_path / name / "1.png")
    assert images.read_folder(tmp_path, Options()).classes == ("bus", "train")


def test_one_colour_image_makes_all_images_colour_by_default(folder: Path) -> None:
    save(folder / "dog" / "b.png", 9, colour=True)
    found = images.read_folder(folder, Options()).train.images
    assert found.shape == (5, 3, 3, 4)
    assert found[4, :, 0, 0].tolist() == [9, 246, 9]
    assert images.read_folder(folder, Options(channels=1)).train.images.shape == (5, 1, 3, 4)


def test_images_of_different_sizes_need_image_size(folder: Path) -> None:
    save(folder / "dog" / "b.png", 9, size=(8, 8))
    with pytest.raises(DataOptionError, match=r"data.image_size: missing, expected .*b.png is 8 x 8, .*0.png is 3 x 4"):
        images.read_folder(folder, Options())
    found = images.read_folder(folder, Options(image_size=(5, 6))).train.images
    assert found.shape == (5, 1, 5, 6)
    assert found[4].min() == found[4].max() == 9


@pytest.mark.parametrize("damage", ["no image", "cut short"])
def test_a_broken_image_is_an_error_unless_skip_broken_is_set(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    path = folder / "cat" / "1.png"
    Image.fromarray(noise).save(path)
    path.write_bytes(b"no image" if damage == "no image" else path.read_bytes()[:-30])
    with pytest.raises(DataError, match=rf"^{path}: .*; data.skip_broken: true skips such images"):
        images.read_folder(folder, Options())
    with caplog.at_level(logging.WARNING):
        found = data.load(path=folder, options=Options(skip_broken=True, test=0.4))
    assert sorted([*found.train.labels, *found.test.labels]) == [0, 0, 1]
    (skipped,) = found.skipped
    assert skipped.startswith(f"{path}: ")
    assert caplog.messages == [f"adtrain: warning: skipped {skipped}"]


def test_links_may_not_lead_out_of_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = save(tmp_path_factory.mktemp("outside") / "x.png", 5)
    (folder / "dog" / "inside.png").symlink_to(folder / "cat" / "1.png")
    assert len(images.read_folder(folder, Options()).train.labels) == 5
    for link, target in ((folder / "dog" / "link.png", outside), (folder / "eel", outside.parent)):
        link.symlink_to(target)
        with pytest.raises(DataError, match=f"^{link}: found a link that leads out of {folder}"):
            images.read_folder(folder, Options())
        link.unlink()


def test_empty_and_nested_class_folders_are_refused(folder: Path) -> None:
    (folder / "eel").mkdir()
    with pytest.raises(DataError, match="eel: found an empty folder, expected the images of class 'eel'"):
        images.read_folder(folder, Options())
    (folder / "eel" / "sub").mkdir()
    with pytest.raises(DataError, match="eel/sub: found no regular file, expected an image of class 'eel'"):
        images.read_folder(folder, Options())


@pytest.mark.parametrize("name", ["loop", "cat/loop.png"])
def test_a_link_that_leads_to_itself_is_an_error(folder: Path, name: str) -> None:
    link = folder / name
    link.symlink_to(link.name)
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(Too many levels of symbolic links\)"):
        images.read_folder(folder, Options())

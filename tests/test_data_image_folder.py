from __future__ import annotations

import io
import logging
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adtrain import data
from adtrain.cache import STORE_THREAD
from adtrain.data import DataError, DataOptionError, Options, image_folder, images
from adtrain.data.images import Decoded, ImageFile, Wanted, decode, decode_all
from adtrain.data.part import Parts


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
    found = image_folder.read_folder(folder, Options())
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
    (folder / "dog" / "b.TXT").touch()
    assert len(image_folder.read_folder(folder, Options()).train.labels) == 4
    (message,) = caplog.messages
    skipped = "skipped 3 files of other types than PNG and JPEG: .txt (2), .csv (1)"
    assert message == f"adtrain: warning: {folder}: {skipped}"


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        save(tmp_path / name / "1.png")
    assert image_folder.read_folder(tmp_path, Options()).classes == ("bus", "train")


def test_one_colour_image_makes_all_images_colour_by_default(folder: Path) -> None:
    save(folder / "dog" / "b.png", 9, colour=True)
    found = image_folder.read_folder(folder, Options()).train.images
    assert found.shape == (5, 3, 3, 4)
    assert found[4, :, 0, 0].tolist() == [9, 246, 9]
    assert image_folder.read_folder(folder, Options(channels=1)).train.images.shape == (5, 1, 3, 4)


def test_images_of_different_sizes_need_image_size(folder: Path) -> None:
    save(folder / "dog" / "b.png", 9, size=(8, 8))
    with pytest.raises(DataOptionError, match=r"data.image_size: missing, expected .*b.png is 8 x 8, .*0.png is 3 x 4"):
        image_folder.read_folder(folder, Options())
    found = image_folder.read_folder(folder, Options(image_size=(5, 6))).train.images
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
        image_folder.read_folder(folder, Options())
    with caplog.at_level(logging.WARNING):
        found = data.load(path=folder, options=Options(skip_broken=True, test=0.4))
    assert sorted([*found.train.labels, *found.test.labels]) == [0, 0, 1]
    (skipped,) = found.skipped
    assert skipped.startswith(f"{path}: ")
    what = "skipped 1 image that cannot be read: cat/1.png; adtrain data inspect lists the reasons"
    assert caplog.messages == [f"adtrain: warning: {folder}: {what}"]


def test_broken_images_are_one_warning_in_words_of_adtrain(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pillow's words depend on its version and on the place of the damage."""
    content = next((folder / "dog").iterdir()).read_bytes()
    for i in range(9):
        (folder / "dog" / f"x{i}.png").write_bytes(content[: len(content) - 4 * i - 1])
    found = data.load(path=folder, options=Options(skip_broken=True, test=0.4))
    broken = [line.partition(": ") for line in found.skipped]
    assert {reason for *_, reason in broken} <= {
        "cannot be read (it is damaged or cut short)",
        "found neither a PNG nor a JPEG image",
    }
    (message,) = caplog.messages
    assert f"skipped {len(broken)} images" in message
    assert Path(broken[0][0]).name in message


def test_links_may_not_lead_out_of_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = save(tmp_path_factory.mktemp("outside") / "x.png", 5)
    (folder / "dog" / "inside.png").symlink_to(folder / "cat" / "1.png")
    assert len(image_folder.read_folder(folder, Options()).train.labels) == 5
    for link, target in ((folder / "dog" / "link.png", outside), (folder / "eel", outside.parent)):
        link.symlink_to(target)
        with pytest.raises(DataError, match=f"^{link}: found a link that leads out of {folder}"):
            image_folder.read_folder(folder, Options())
        link.unlink()


def test_an_empty_folder_of_a_class_is_refused(folder: Path) -> None:
    (folder / "eel" / "sub").mkdir(parents=True)
    with pytest.raises(DataError, match="eel: found an empty folder, expected the images of class 'eel'"):
        image_folder.read_folder(folder, Options())


@pytest.mark.parametrize("packed", [False, True])
def test_images_in_subfolders_are_of_the_class_of_the_folder(
    folder: Path, caplog: pytest.LogCaptureFixture, packed: bool
) -> None:
    """They are not if all images are in subfolders: `2023/cat` has the classes of another layout."""
    save(folder / "cat" / "2023" / "May" / "0.png", 7)
    place = archive(folder / "x.tar", folder) if packed else folder
    found = read(place)
    assert (found.classes, found.train.labels.tolist()) == (("cat", "dog"), ["cat", "cat", "cat", "cat", "dog"])
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 7, 9]
    where = "those in " + str(place / "cat/2023/May") + " of cat"
    reason = f"the images in subfolders are of the class of the folder, such as {where}"
    assert caplog.messages == [f"adtrain: warning: {place}: {reason}"]
    for name in ("2022/cat", "2023/cat", "2023/dog"):
        save(folder / "photos" / name / "1.png")
    root = archive(folder / "y.tar", folder / "photos", "photos/") if packed else folder / "photos"
    with pytest.raises(DataError, match=r"photos: found all files in subfolders such as .*/2022/cat, expected"):
        read(root)


def test_a_link_to_a_folder_in_the_folder_of_a_class_is_refused(folder: Path) -> None:
    (folder / "cat" / "again").symlink_to(folder / "cat")
    with pytest.raises(DataError, match="cat/again: found no regular file, expected an image of class 'cat'"):
        image_folder.read_folder(folder, Options())


@pytest.mark.parametrize("name", ["loop", "cat/loop.png"])
def test_a_link_that_leads_to_itself_is_an_error(folder: Path, name: str) -> None:
    link = folder / name
    link.symlink_to(link.name)
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(Too many levels of symbolic links\)"):
        image_folder.read_folder(folder, Options())


@pytest.fixture
def decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    names = list[str]()

    def decode_all(files: Sequence[ImageFile], wanted: Wanted) -> Iterator[Decoded]:
        names.extend(Path(file.name).name for file in files)
        yield from decode(files, wanted)

    monkeypatch.setattr(image_folder, "decode_all", decode_all)
    return names


def read(path: Path, **options: object) -> Parts:
    """The parts at a path; what is to be cached is then in the cache."""
    read = image_folder.read_folder if path.is_dir() else image_folder.read_archive
    found = read(path, Options(**options))  # type: ignore[arg-type]
    for thread in [thread for thread in threading.enumerate() if thread.name == STORE_THREAD]:
        thread.join()
    return found


def assert_equal(found: Parts, expected: Parts) -> None:
    for part, other in ((found.train, expected.train), (found.test, expected.test)):
        assert (part is None) == (other is None)
        if part is not None and other is not None:
            np.testing.assert_array_equal(part.images, other.images)
            assert part.labels.tolist() == other.labels.tolist()
    assert (found.classes, found.skipped, found.validation_rows) == (
        expected.classes,
        expected.skipped,
        expected.validation_rows,
    )


def test_images_are_decoded_once_and_then_read_from_the_cache(
    tmp_path: Path, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    root = parts(tmp_path / "three", "train", "val", "test")
    (root / "train" / "cat" / "notes.txt").touch()
    (root / "test" / "dog" / "2.png").write_bytes(b"no image")
    first, warnings = read(root, skip_broken=True), list(caplog.messages)
    assert len(decoded) == 8
    assert len(warnings) == 2
    caplog.clear()
    assert_equal(read(root, skip_broken=True), first)
    assert len(decoded) == 8
    assert caplog.messages == warnings
    assert read(root, skip_broken=True, channels=3).train.images.shape[1] == 3
    assert len(decoded) == 16


def test_a_relative_path_reads_what_the_absolute_one_has_cached(
    folder: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "dog" / "a.png").write_bytes(b"no image")
    save(folder / "dog" / "b.png")
    first = read(folder, skip_broken=True)
    monkeypatch.chdir(folder.parent)
    found = read(Path(folder.name), skip_broken=True)
    assert len(decoded) == 5
    np.testing.assert_array_equal(found.train.images, first.train.images)
    reason = "dog/a.png: found neither a PNG nor a JPEG image"
    assert (first.skipped, found.skipped) == ((f"{folder}/{reason}",), (f"{folder.name}/{reason}",))
    monkeypatch.chdir(folder)
    assert read(Path(), skip_broken=True).skipped == (reason,)
    assert len(decoded) == 5


def test_a_folder_that_changes_is_decoded_again(folder: Path, decoded: list[str]) -> None:
    read(folder)
    image = folder / "cat" / "1.png"
    status = image.stat()
    save(image, 200)
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert image.stat().st_size == status.st_size  # neither the size nor the time of modification tells
    assert read(folder).train.images[:, 0, 0, 0].tolist() == [0, 200, 2, 9]
    image.rename(folder / "dog" / "1.png")
    assert read(folder).train.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert len(decoded) == 12


def test_a_damaged_entry_of_the_cache_is_made_again(folder: Path, tmp_path: Path, decoded: list[str]) -> None:
    first = read(folder)
    (stored,) = (tmp_path / ".cache/adtrain/data").iterdir()
    stored.write_bytes(stored.read_bytes()[:-1])
    assert_equal(read(folder), first)
    assert len(decoded) == 8


def archive(path: Path, root: Path, inside: str = "") -> Path:
    """An archive of the files of a folder, within the folder `inside`, in an order of their own."""
    files = {f"{inside}{x.relative_to(root)}": x.read_bytes() for x in sorted(root.rglob("*"))[::-1] if x.is_file()}
    files |= {f"__MACOSX/{inside}cat/1.png": b"x", f"{inside}.hidden/1.png": b"x", f"{inside}README": b"x"}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as written:
            for name, content in files.items():
                written.writestr(name, content)
        return path
    modes: dict[str, Any] = {".tar": "w", ".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}
    with tarfile.open(path, modes[path.suffix]) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz", "x.tar.xz", "x.tgz"])
@pytest.mark.parametrize("inside", ["", "outer/cifar/"])
def test_an_archive_is_read_as_its_folder(tmp_path: Path, decoded: list[str], name: str, inside: str) -> None:
    root = parts(tmp_path / "three", "train", "val", "test")
    packed = archive(tmp_path / name, root, inside)
    expected = read(root)
    decoded.clear()
    for _ in range(2):
        assert_equal(read(packed), expected)
    assert len(decoded) == 6
    assert data.load(path=packed).classes == ("cat", "dog")
    assert data.load(path=packed.rename(tmp_path / "any"), options=Options(format="archive")).classes == ("cat", "dog")


def test_an_archive_of_classes_alone_has_no_test_part(folder: Path) -> None:
    assert_equal(read(archive(folder / "x.zip", folder)), read(folder))


def test_a_wrong_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    good = archive(tmp_path / "x.tar.gz", parts(tmp_path / "two", "train", "test"))
    damaged = "it is no zip or tar archive, or it is damaged"
    ended = "Compressed file ended before the end-of-stream marker was reached"
    for content, reason in ((b"", damaged), (b"no archive", damaged), (good.read_bytes()[:80], ended)):
        (tmp_path / "bad.tar.gz").write_bytes(content)
        with pytest.raises(DataError, match=rf"bad.tar.gz: cannot be read \({reason}\)$"):
            read(tmp_path / "bad.tar.gz")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        info = tarfile.TarInfo("cat/1.png")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(DataError, match=r"link.tar: found cat/1.png, a link or device; expected regular files"):
        read(tmp_path / "link.tar")
    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as flat:
        flat.writestr("1.png", b"x")
    with pytest.raises(DataError, match=r"flat.zip: found no folders, expected one per class"):
        read(tmp_path / "flat.zip")


def test_an_archive_larger_than_the_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = archive(folder / "x.tar", folder)
    monkeypatch.setattr(image_folder, "machine_memory", lambda: 100)
    with pytest.raises(DataError, match=r"x.tar: found more than this machine's memory holds; unpack it, "):
        read(packed)


@pytest.mark.parametrize("fails", [False, True])
def test_processes_decode_as_this_one(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    save(folder / "dog" / "b.png", 7, size=(8, 8), colour=True)
    (folder / "dog" / "c.png").write_bytes(b"no image")
    files = [ImageFile(str(path), path.stat().st_size) for path in sorted(folder.rglob("*.png"))]
    files.append(ImageFile("in memory.png", 1, Path(files[0].name).read_bytes()))
    expected = decode(files, Wanted(None, (3, 4)))
    monkeypatch.setattr(images, "CHUNK", 3)
    monkeypatch.setattr(images, "LEAST_SECONDS", 1e-9)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    if fails:
        monkeypatch.setattr(images, "SERVE", "raise SystemExit # {path}")
    else:
        monkeypatch.setattr(images, "decode", None)  # only the processes decode
    found = list(decode_all(files, Wanted(None, (3, 4))))
    assert [type(x) for x in found] == [type(x) for x in expected]
    for image, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(image, other)

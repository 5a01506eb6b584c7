from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from idx_files import write_idx
from npz_files import parts, write_npz

from adtrain import config, data
from adtrain.config import ConfigError
from adtrain.config.document import Data
from adtrain.core.options import fits, words
from adtrain.data import DataError, DataOptionError, Options, formats
from adtrain.data.formats import FORMATS

CSV = "a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(10))


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "x.csv"
    path.write_text(CSV)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": (2, 2)}, "image_size: an option of an archive of images or a folder of images"),
        ({"skip_broken": True}, "skip_broken: an option of an archive of images or a folder of images"),
        ({"test": 0.01}, "test fraction 0.01 of 10 examples: found 0 for test and 10 for training"),
        ({}, "data.test: missing, .*x.csv has no test part: set the fraction to hold out"),
        ({"test_path": "none.csv"}, "none.csv: found nothing, expected a CSV file"),
    ],
)
def test_an_option_that_does_not_fit_the_files_is_refused(csv: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        data.load(path=csv, options=Options(**options))  # type: ignore[arg-type]


def test_options_are_refused_with_a_data_set_of_the_catalogue() -> None:
    with pytest.raises(DataOptionError, match=r"data.label: an option of files at data.path, found the data set mnist"):
        data.load("mnist", options=Options(label=1))


def test_test_path_is_the_test_part_and_must_have_the_same_format(csv: Path) -> None:
    second = csv.with_name("second.csv")
    second.write_text("a,label\n1,0\n")
    found = data.load(path=csv, options=Options(test_path=str(second)))
    assert (len(found.train), len(found.test)) == (10, 1)
    npz = write_npz(csv.with_name("x.npz"), parts(np.zeros((4, 1, 1, 1), np.float32)))
    with pytest.raises(DataOptionError, match=r"test_path: found an NPZ file at .*, expected a CSV file like"):
        data.load(path=csv, options=Options(test_path=str(npz)))
    with pytest.raises(DataOptionError, match=r"test_path: found .*x.csv, but .*x.npz has a test part; remove this"):
        data.load(path=npz, options=Options(test_path=str(csv)))
    with pytest.raises(DataOptionError, match=r"test: found 0.5, but there is a test part; remove this option"):
        data.load(path=npz, options=Options(test=0.5))


def test_the_held_out_part_is_stratified_and_always_the_same(csv: Path) -> None:
    first, again = (data.load(path=csv, options=Options(test=0.4)) for _ in range(2))
    assert np.bincount(first.test.labels).tolist() == [2, 2]
    np.testing.assert_array_equal(first.test.images, again.test.images)
    assert not set(np.asarray(first.test.images).ravel()) & set(np.asarray(first.train.images).ravel())


def test_parts_with_different_dtypes_become_float32(tmp_path: Path) -> None:
    arrays = parts(np.arange(8, dtype=np.int64).reshape(4, 2))
    arrays["x_test"] = arrays["x_test"] + 300
    found = data.load(path=write_npz(tmp_path / "x.npz", arrays))
    assert [part.images.dtype for part in (found.train, found.test)] == [np.float32, np.float32]
    assert np.asarray(found.test.images).ravel().tolist() == [300, 301, 302, 303]


def test_idx_files_may_have_colour_images_and_no_test_part(tmp_path: Path) -> None:
    images = np.arange(90, dtype=np.uint8).reshape(5, 3, 2, 3)
    write_idx(tmp_path / "train-images-idx4-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.array([3, 1, 3, 1, 1], np.uint8))
    found = data.load(path=tmp_path, options=Options(test=0.4))
    assert found.classes == ("1", "3")
    assert found.train.images.shape == (3, 3, 2, 3)
    assert isinstance(found.train.images, data.Rows)
    np.testing.assert_array_equal(found.train.images.base, images)


def test_the_home_of_an_unknown_user_is_a_name_like_any_other(csv: Path) -> None:
    for load in ({"path": "~nobody-here"}, {"path": csv, "options": Options(test_path="~nobody-here/x.csv")}):
        with pytest.raises(DataError, match=r"~nobody-here.*: found nothing, expected a "):
            data.load(**load)


def test_options_are_those_of_all_formats() -> None:
    common = {field.name for field in fields(formats.CommonOptions)}
    assert {field.name for field in fields(Options)} == common.union(*(each.takes for each in FORMATS))


def test_no_two_formats_have_a_name_or_a_suffix_in_common() -> None:
    names, suffixes = [each.name for each in FORMATS], [suffix for each in FORMATS for suffix in each.suffixes]
    assert len(set(names)) == len(names)
    assert len(set(suffixes)) == len(suffixes)


WRONG: dict[str, Any] = {
    "test_path": "",
    "test": 1.0,
    "shape": [1, 28, 0],
    "label": 2**31,
    "target": [],
    "header": 1,
    "delimiter": '"',
    "drop": [1.5],
    "categories": "zone",
    "category_encoding": "onehot",
    "dates": "sold",
    "date_format": "",
    "decimal": ";",
    "missing": "median",
    "missing_values": [True],
    "image_size": [64],
    "channels": 2,
    "skip_broken": "yes",
    "length": 0,
    "unit": "word",
    "documents": "apart",
    "order": "sorted",
    "validation_tokens": 0,
    "vocabulary": 256,
    "tokenizer": "",
    "format": "parquet",
}


@pytest.mark.parametrize("option", [field.name for field in fields(Options)])
def test_the_config_bounds_an_option_as_its_annotation_does(option: str) -> None:
    hint, value = get_type_hints(Options, include_extras=True)[option], WRONG[option]
    assert not fits(tuple(value) if isinstance(value, list) else value, hint)
    with pytest.raises(ConfigError) as caught:
        config.load_data({"path": "x.csv"}, [f"{option}={json.dumps(value)}"])
    assert f"data.{option}" in str(caught.value)
    assert f"expected {words(hint).removesuffix(' or null')}" in str(caught.value)


def test_the_section_has_the_meanings_of_the_options_docstrings() -> None:
    meaning = Data.model_fields["category_encoding"].description
    assert meaning is not None
    assert meaning.startswith("CSV: one_hot: a feature for each category; index: one feature")
    assert meaning.endswith("for a layer embedding; default: one_hot")

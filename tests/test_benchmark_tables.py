"""The speeds in the documents are up to date with the committed results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
assert spec is not None
assert spec.loader is not None
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)
BEGIN, END = tables.MARKERS


def compared(adtrain_ms: float = 0.0314, **medians: float) -> dict[str, Any]:
    """The part of a row of `adtrain bench --against` that the tables use."""
    systems = ["adtrain", *medians]
    return {
        "times": {system: {"median_ms": adtrain_ms} for system in systems},
        "ratios": {system: {"median": x, "low": x * 0.95, "high": x * 1.05} for system, x in medians.items()},
        "peak_mib": {system: 100.0 * i for i, system in enumerate(systems, 1)},
        "different": [],
    }


def step(config: str, precision: str = "float32", **medians: float) -> dict[str, Any]:
    return {"config": config, "batch_size": 64, "precision": precision, **compared(**medians)}


def result(device: str = "cpu", commit: str | None = "abc", **rows: list[dict[str, Any]]) -> dict[str, Any]:
    gpu = device == "gpu"
    about = {
        "device": device,
        "device_name": "H200" if gpu else "EPYC",
        "driver": "580" if gpu else None,
        "threads": 2,
        "commit": commit,
        "versions": {"adtrain": "0.1.0", "torch": "2.11" if gpu else "2.13"},
    }
    return {"kind": "against", "protocol": about, **rows}


@pytest.mark.parametrize("path", tables.DOCUMENTS)
def test_documents_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    made = tables.between_markers(text, tables.DOCUMENTS[path](tables.read(tables.RESULTS)))
    assert made == text, "run python benchmarks/tables.py"


def test_speed_is_the_range_of_the_fastest_form_of_each_peer() -> None:
    rows = [step("mlp", torch_eager=3.0, torch_compile=2.0), step("cnn", torch_eager=5.0, jax=0.97)]
    assert tables.speed({"steps": result(steps=rows)}) == (
        "\n**Speed** of a training step, as another system's time over adtrain's: PyTorch 2.00 to 5.00 on EPYC; JAX "
        "0.97 to 0.97 on EPYC. Above 1 adtrain is faster. Single operations can be slower: "
        "[Performance](docs/performance.md).\n\n"
    )


def test_peer_in_another_precision_is_not_the_fastest() -> None:
    row = step("mlp") | compared(**{"torch-max": 2.0, "torch-max-tf32": 1.0})
    found = {"gpu-mlp": result("gpu", steps=[row])}
    assert "PyTorch 2.00 to 2.00 on H200" in tables.speed(found)
    assert "| `mlp` | torch-max 2.00 | " in tables.tables(found)


def test_summary_has_least_median_and_largest_ratios_of_steps_measured_on_both_devices() -> None:
    ratios = {"a": 3.0, "b": 1.5, "c": 12.0}
    found = {f"cpu-{name}": result(steps=[step(name, torch=x, jax=2 * x)]) for name, x in ratios.items()}
    found |= {f"gpu-{name}": result("gpu", steps=[step(name, torch_graph=2.0, jax=x)]) for name, x in ratios.items()}
    found["cpu-alone"] = result(steps=[step("alone", torch=100.0)])
    assert tables.summary(found) == (
        "| over adtrain's time | least | median | most |\n"
        "| --- | --- | --- | --- |\n"
        "| PyTorch, EPYC | 1.50 (`b`) | 3.00 | 12.0 (`c`) |\n"
        "| JAX, EPYC | 3.00 (`b`) | 6.00 | 24.0 (`c`) |\n"
        "| PyTorch, H200 | 2.00 (`a`) | 2.00 | 2.00 (`c`) |\n"
        "| JAX, H200 | 1.50 (`b`) | 3.00 | 12.0 (`c`) |\n"
    )


def several() -> list[dict[str, Any]]:
    found = [step("mlp", torch=2.0, jax=3.0), step("cnn", "float64", jax=20.0)]
    found[0]["different"] = ["jax"]
    found[1]["times"]["torch"] = {"median_ms": 1.0}
    found[1]["ratios"]["torch"] = {"median": 300.0, "low": 100.0, "high": 1000.0}
    found[1]["peak_mib"]["torch"] = 2000.0
    return found


def test_cpu_table_has_ratios_and_memory_but_no_times() -> None:
    found = {
        "cpu/cpu-mlp-64-sgd": result(steps=[step("mlp", torch=1.0)]),
        "many": result(steps=several(), commit="def"),
    }
    assert tables.tables(found) == (
        "\nEPYC, 2 threads; adtrain 0.1.0, torch 2.13; commit abc, commit def. A peer's number is its time over "
        "adtrain's: above 1 adtrain is faster; in brackets the 95% interval; MiB are the most host memory that the "
        "process needed.\n"
        "\n| step | fastest peer | adtrain | torch | jax |\n"
        "| --- | --- | --: | --: | --: |\n"
        "| `mlp-64-sgd`, abc | torch 1.00 | 100 MiB | 1.00 (0.95 to 1.05), 200 MiB |  |\n"
        "| `mlp`, batch 64, def | torch 2.00 | 100 MiB | 2.00 (1.90 to 2.10), 200 MiB | different results |\n"
        "| `cnn`, batch 64, float64, def | jax 20.0 | 100 MiB | 300 (100 to 1,000), 2,000 MiB | "
        "20.0 (19.0 to 21.0), 200 MiB |\n"
    )


def test_gpu_table_has_times_and_ratios_and_follows_the_cpu() -> None:
    rows = [step("mlp", torch=4.0), step("cnn", torch=1.0)]
    rows[1]["times"]["adtrain"]["median_ms"] = 20.4536
    found = {"gpu-steps": result("gpu", None, steps=rows), "mlp": result(steps=[step("mlp", torch=2.0)])}
    cpu, gpu = tables.tables(found).split("H200")
    assert "EPYC" in cpu
    assert gpu == (
        ", driver 580; adtrain 0.1.0, torch 2.11. A peer's number is its time over adtrain's: above 1 adtrain is "
        "faster; in brackets the 95% interval; MiB are the most host memory that the process needed; adtrain's is the "
        "time of a step.\n"
        "\n| step | fastest peer | adtrain | torch |\n"
        "| --- | --- | --: | --: |\n"
        "| `mlp`, batch 64 | torch 4.00 | 31.4 µs, 100 MiB | 4.00 (3.80 to 4.20), 200 MiB |\n"
        "| `cnn`, batch 64 | torch 1.00 | 20,454 µs, 100 MiB | 1.00 (0.95 to 1.05), 200 MiB |\n"
    )


def test_steps_of_many_networks_have_their_own_table() -> None:
    rows = [{**step("mlp", jax=2.0), "members": 1000}, {**step("mlp", jax=4.0), "members": 10}]
    made = tables.tables({"alone": result("gpu", steps=[step("mlp", torch=3.0)]), "many": result("gpu", steps=rows)})
    assert made.endswith(
        "\n| networks together | adtrain, µs a network and step | jax |\n"
        "| --- | --: | --: |\n"
        "| 10 of `mlp`, batch 64 | 3.14 | 4.00 (3.80 to 4.20) |\n"
        "| 1,000 of `mlp`, batch 64 | 0.0314 | 2.00 (1.90 to 2.10) |\n"
    )
    assert " on " not in tables.speed({"many": result(steps=rows)})


def test_rows_of_several_commits_name_them_and_align_peers() -> None:
    found = {
        "cnn": result(steps=[step("cnn", graph=2.0)]),
        "mlp": result(commit="def", steps=[step("mlp", eager=4.0, graph=3.0)]),
    }
    text = tables.tables(found)
    assert "| step | fastest peer | adtrain | eager | graph |\n" in text
    assert "| `cnn`, abc | graph 2.00 | 100 MiB |  | 2.00 (" in text
    assert "| `mlp`, def | graph 3.00 | 100 MiB | 4.00 (" in text


def test_operations_are_counted_as_faster_slower_or_undecided() -> None:
    rows = [compared(torch=x, numpy=2.0) for x in (0.5, 0.9, 1.0, 3.0, 4.0, 5.0)]
    rows[0]["ratios"].pop("numpy")
    text = tables.tables({"operations": result(operations=rows)})
    assert "against torch: of 6 adtrain is faster in 3 and slower in 2; in 1 the interval contains 1.\n" in text
    assert "against numpy: of 5 adtrain is faster in 5 and slower in 0; in 0 the interval contains 1.\n" in text
    assert "|" not in text


def test_full_tables_list_products_with_speed_and_errors() -> None:
    row = {**compared(torch=4.0), "op": "matmul", "size": "4096", "phase": "forward", "flops": 2 * 4096**3}
    row["times"] = {"adtrain": {"median_ms": 0.5}, "torch": {"median_ms": 2.0}}
    row["off"] = {"adtrain": 2.04e-7, "torch": 1.1e-6}
    found = {"gpu-operations": result("gpu", operations=[row, compared(torch=2.0)])}
    text = tables.tables(found)
    low, high = (f"{row['ratios']['torch'][end]:.2f}" for end in ("low", "high"))
    assert f"| matmul 4096 | forward | 275 | 4.00 ({low} to {high}) | 2.0e-07, 1.1e-06 |\n" in text


def test_only_text_between_the_markers_changes() -> None:
    text = f"# Fast\n{BEGIN}\nold\n{END}\nend | of\n"
    assert tables.between_markers(text, "new\n") == f"# Fast\n{BEGIN}\nnew\n{END}\nend | of\n"


@pytest.mark.parametrize("text", ["none", f"{BEGIN}", f"{END}", f"{BEGIN}{BEGIN}{END}"])
def test_text_without_markers_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected one <!-- performance: begin -->"):
        tables.between_markers(text, "new\n")


def test_results_of_other_kinds_are_ignored(tmp_path: Path) -> None:
    steps, operations = result(steps=[step("mlp")]), result("gpu", operations=[compared(torch=2.0)])
    (tmp_path / "gpu").mkdir()
    for name, found in {"a": steps, "gpu/b": operations, "c": {"kind": "ops"}, "d": {"rows": []}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert tables.read(tmp_path) == {"a": steps, "gpu/b": operations}

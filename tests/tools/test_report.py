"""The report page, viewed in Chromium at several widths."""

import csv
import dataclasses
import importlib.util
import pathlib
import shutil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_rows import PEERS, SHAPE, absent, row, sweep
from npu_ops_tools import report, where
from npu_ops_tools.bench import rows as bench_rows
from npu_ops_tools.cli import app
from npu_ops_tools.report import page, plots, summary
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

pytestmark = pytest.mark.xdist_group("report")  # shares one browser
ROWS = [
    *sweep("l2norm"),
    *sweep("attention", flop=10**6),
    *sweep("l2norm", "cuda", "An Accelerator"),
    absent(),
    row(op="rope", provider="npu-ops", ms=3.0),
    row(op="rope", provider="SDPA, one mask", ms=2.0),
]
TIMED = [r for r in ROWS if r.state != "absent"]
MODEL = (
    "call,kernel,us,low_us,high_us,of_limit,bottleneck,loaded_mb,stored_mb,soc,label,git\n"
    "rope T=512,_rope_kernel,22,22,42.2,0.31,waiting,5.7,5.2,Ascend910B2,npu-model,6a9\n"
)
COMPILED = (
    "op,kernel,soc,core,ub_bytes,scalar_loops,multi_buffer\n"
    "rope,_rope_kernel,Ascend910B3,vector,131072,(),True\n"
    "rope,_rope_kernel,Ascend910B3,vector,65536,\"('a.py:3',)\",True\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    bench_rows.upsert(ROWS, folder)
    (folder / "ops.csv").write_text(MODEL)
    (folder / "compiled.csv").write_text(COMPILED)
    (folder / "other.csv").write_text("a,b\n1,2\n")  # not a file of ours
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(folder / "page")])
    assert done.exit_code == 0, done.output
    return folder / "page"


@pytest.fixture(scope="module")
def browser():
    """Start the system's Chromium, or playwright's (`playwright install chromium`)."""
    system = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        downloaded = pathlib.Path(playwright.chromium.executable_path).exists()
        if not system and not downloaded:
            pytest.skip("no Chromium to look at the page with: apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[1280, 390])
def opened(request, browser, folder):
    """Yield the page at one width with all details open, its requests and its errors."""
    view = browser.new_page(viewport={"width": request.param, "height": 900})
    asked, failed = [], []
    view.on("request", lambda r: asked.append(r.url))
    view.on("pageerror", lambda e: failed.append(str(e)))
    view.on("console", lambda m: failed.append(m.text) if m.type == "error" else None)
    view.goto((folder / "index.html").as_uri())
    view.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    yield view, asked, failed
    view.close()


def test_no_request_leaves_the_page(opened, folder):
    _, asked, failed = opened
    assert asked == [(folder / "index.html").as_uri()] and failed == []


def test_no_element_is_wider_than_the_page(opened):
    view, *_ = opened
    wide = view.evaluate("""() => [...document.body.querySelectorAll("*")]
        .filter(e => !e.closest("svg") || e.matches("svg"))
        .filter(e => { const box = e.getBoundingClientRect();
                       return box.right > innerWidth + 0.5 || box.left < -0.5; })
        .map(e => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`)""")
    assert wide == []
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_there_are_as_many_marks_as_rows(opened):
    view, *_ = opened
    numbers = view.evaluate("[...document.querySelectorAll('[data-row]')].map(e => e.dataset.row)")
    assert len(numbers) == len(TIMED)
    tables = view.locator("table.sortable tbody tr").count()
    assert tables == len(TIMED)
    hollow = view.locator(".mark.hollow[data-row]").count()
    assert hollow == sum(r.state == "unstable" for r in TIMED) > 0


def test_marks_lie_inside_their_plots(opened):
    view, *_ = opened
    outside = view.evaluate("""() => [...document.querySelectorAll("svg.plot")].flatMap(svg => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("path, polygon, text")].filter(e => {
            const box = e.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 ||
                   box.top < frame.top - 1 || box.bottom > frame.bottom + 1; })
        .map(e => `${svg.ariaLabel.slice(0, 50)}: ${e.outerHTML.slice(0, 90)}`) })""")
    assert outside == []


def test_no_labels_overlap(opened):
    view, *_ = opened
    found = view.evaluate("""() => [...document.querySelectorAll("svg.plot")].flatMap(svg => {
        const labels = [...svg.querySelectorAll("text")].map(e => [e, e.getBoundingClientRect()]);
        return labels.flatMap(([a, x], n) => labels.slice(n + 1)
            .filter(([b, y]) => x.left < y.right && y.left < x.right &&
                                x.top + 2 < y.bottom && y.top + 2 < x.bottom)
            .map(([b]) => `${svg.ariaLabel.slice(0, 40)}: ${a.innerHTML}, ${b.innerHTML}`)) })
    """)
    assert found == []
    smallest = view.evaluate("""() => Math.min(...[...document.querySelectorAll("svg.plot text")]
        .map(e => e.getBoundingClientRect().height))""")
    assert smallest >= 11  # font size in pixels


def test_a_screen_reader_finds_words_and_tables(opened):
    view, *_ = opened
    plots = view.locator("svg.plot")
    assert plots.count() == view.locator("svg.plot[role=img][aria-label]").count() > 0
    assert view.locator("html[lang=en]").count() == 1
    # On a phone CSS shows the table as blocks, so screen readers need explicit table roles.
    cells = view.locator("table[role=table] td").count()
    assert cells == view.locator("table[role=table] td[role=cell]").count() > 0
    assert view.get_by_role("cell").count() > len(TIMED)


def test_tables_sort_and_filter(opened):
    view, *_ = opened
    table = view.locator("table.sortable").first
    head = table.locator("th").nth(5)
    head.locator("button").click()
    values = table.locator("tbody tr td:nth-child(6)")
    times = [float(v) for v in values.evaluate_all("all => all.map(e => e.dataset.value)")]
    assert times == sorted(times) and head.get_attribute("aria-sort") == "ascending"
    box = view.get_by_label("Words that a row must have").first
    box.fill("tp4 backward")
    shown = table.locator("tbody tr:not([hidden])").all_inner_texts()
    assert shown and all("TP4" in text and "backward" in text for text in shown)
    box.fill("")


def test_ops_are_folded_and_a_link_unfolds_one(browser, folder):
    view = browser.new_page()
    view.goto((folder / "index.html").as_uri())
    unfolded = view.locator("details.op[open] > summary")
    assert unfolded.all_inner_texts() == ["l2norm"]  # the only op of this device
    view.locator(".matrix a", has_text="rope").click()
    assert sorted(unfolded.all_inner_texts()) == ["l2norm", "rope"]
    view.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(browser, folder, scheme):
    """WCAG requires a contrast of 4.5 for text and 3 for lines."""
    view = browser.new_page(color_scheme=scheme)
    view.goto((folder / "index.html").as_uri())
    names = ["text", "quiet", "good", "bad", *(f"s{n}" for n in range(page.STYLES)), "roof", "page"]
    colours = view.evaluate(
        """names => { const style = getComputedStyle(document.body);
        return Object.fromEntries(names.map(n => [n, style.getPropertyValue("--" + n)])) }""",
        names,
    )
    view.close()
    ground = colours.pop("page")
    poor = {n: c for n, c in colours.items() if contrast(c, ground) < (3 if n == "roof" else 4.5)}
    assert poor == {}


def contrast(one, other):
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    digits = colour.strip().lstrip("#")
    digits = digits if len(digits) == 6 else "".join(2 * d for d in digits)
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


# Contents of the page


def test_devices_never_share_a_plot():
    for device in page.devices(ROWS):
        (kind,) = {r.device for r in device.rows}
        assert device.name.startswith(kind)
        marks = [p.row for s in device.sections for f in s.figures for plot in f.plots
                 for each in plot.series for p in each.points if p.row is not None]  # fmt: skip
        assert sorted(marks) == list(range(len(device.rows)))


def test_means_and_the_least_are_of_stable_rows():
    pair = [row(), row(provider="eager", ms=8.0)]
    other = [row(size=1), row(size=1, provider="eager", ms=1.0)]
    noisy = [row(size=16), row(size=16, provider="eager", ms=999.0, state="unstable")]
    (found,) = summary.against([*pair, *other, *noisy, absent()])
    assert found.mean == pytest.approx((4.0 * 0.5) ** 0.5)
    assert found.worst.ratio == 0.5 and found.worst.ours.size == 1 and found.left_out == 1
    (slow,) = summary.slower([*pair, *other, *noisy])
    assert slower_than(slow) == ("eager", 1)


def slower_than(pair):
    return pair.peer.provider, pair.ours.size


def test_the_best_peer_decides_what_is_slower():
    rows = [row(), row(provider="a", ms=1.5), row(provider="b", ms=1.0), row(provider="c", ms=9.0)]
    (slow,) = summary.slower(rows)
    assert (slow.peer.provider, slow.ratio) == ("b", 0.5)


def test_other_rows_of_ours_are_no_peers():
    assert summary.against([row(), row(provider="npu-ops in parts")]) == []


def test_green_is_what_is_nowhere_slower(tmp_path):
    rows = [row(), row(provider="eager", ms=8.0), row(size=1), row(size=1, provider="eager")]
    green = '<td role="cell" data-name="eager" class="fast">'
    assert green in report.write(tmp_path, rows).read_text()
    slower = [*rows, row(size=16), row(size=16, provider="eager", ms=1.98)]
    assert green not in report.write(tmp_path, slower).read_text()


def test_the_page_says_how_many_rows_vary(tmp_path):
    (device,) = page.devices([row(), row(provider="eager", ms_p80=4.0, ms_p20=2.0)])
    assert device.wide == 1


def test_what_runs_here_is_folded_by_op(tmp_path):
    implementations = [
        {"op": "rope", "device": "cpu", "implementation": name, "why_not": reason}
        for name, reason in (("triton_ascend", "no NPU"), ("cpu", None))
    ]
    found = {"implementations": implementations, "patches": [], "machine": {}, "packages": {}}
    text = report.write(tmp_path, found=found).read_text()
    assert "<summary><b>rope</b>, on cpu: cpu</summary>" in text and "no NPU" in text


def test_the_page_names_what_was_measured(folder):
    text = (folder / "index.html").read_text()
    assert "A Processor, 2 threads" in text and "Commit 0123456789ab" in text
    assert "flash-attn: its kernels run on GPUs alone" in text
    assert "None of these times is an NPU's" in text
    assert "npu-ops bench l2norm --only" in text
    assert "Nothing here was measured" in text and "22 to 42.2" in text
    assert "21,289" in text  # bytes per token, of 512
    assert all(name in text for name in PEERS)


def test_markdown_has_the_same_numbers(folder):
    text = (folder / "report.md").read_text()
    assert "| attention | 6.00 (6.00) | 2.50 (2.50) | 4.00 (4.00) |" in text
    assert "unstable |" in text and page.readable(SHAPE) in text
    assert "0.67" in text  # speed of rope relative to SDPA


def test_shapes_are_readable():
    assert page.readable(SHAPE) == "Qwen3.5-9B, Qwen3-Next-80B, Qwen3.5-35B, TP1"
    assert page.readable("p=0.1 of qwen3-vl-8b tp8") == "p=0.1: Qwen3-VL-8B, TP8"


@pytest.mark.parametrize(
    "values, log, said",
    [
        ([1, 32768], True, ["1", "10", "100", "1000", "10k"]),
        ([0.5, 3], True, ["0.5", "1", "2"]),
        ([0, 9], False, ["0", "2", "4", "6", "8"]),
        ([3.0], True, ["2", "5"]),
        ([0.0], False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([4.0, 4.0], False, ["3.9", "4", "4.1", "4.2"]),
    ],
)
def test_ticks_are_round_and_apart(values, log, said):
    axis = plots._axis(values, log, 0, 300, 30)
    assert [label for _, label in axis.ticks] == said


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e9), min_size=1, max_size=6), st.booleans())
@example([0.25, 0.25], False)
@example([0.0], True)
@example([1e-9, 1.0000000000000003e-09], True)
def test_every_axis_has_room_for_its_values_and_ticks(values, log):
    axis = plots._axis(values, log, 10, 300, 30)
    assert len(axis.ticks) >= 2
    for at in [*map(axis, values), *(at for at, _ in axis.ticks)]:
        assert 10 <= at <= 300


def test_what_is_no_result_is_refused(tmp_path):
    with (tmp_path / "other.csv").open("w") as file:
        csv.writer(file).writerow(["a", "b"])
    for path, said in (
        (tmp_path, ("needs one that npu-ops bench wrote")),
        (tmp_path / "no", "no such"),
    ):
        done = CliRunner().invoke(app, ["report", str(path)])
        assert done.exit_code == 2 and said in done.stderr


def test_curves_of_the_demo():
    plot = report.curves({"alone": [3.0, 2.0, 1.5], "ours": [3.0, 2.1, 1.4]}, "GPT")
    assert [len(each.points) for each in plot.series] == [3, 3]
    assert plot.names == [("s0", "alone"), ("s1", "ours")] and "loss over step" in plot.alt


def cpu_speed():
    spec = importlib.util.spec_from_file_location(
        "cpu_speed", where.ROOT / "benchmarks/cpu_speed.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_numbers_are_stable_rows_with_their_spread():
    made = [r for r in sweep() if r.size <= 8192]
    noisy = [r for r in sweep("gdn_gate") if r.provider == "npu-ops"]
    noisy = [dataclasses.replace(r, state="unstable") for r in noisy]
    text = cpu_speed().table([*made, *noisy, *(r for r in sweep("gdn_gate")[1:2])])
    (line,) = text.splitlines()[2:]
    assert "8192 tokens, forward+backward" in line and "4.92 (4.72 to 5.66)" in line
    assert "**6.0** (5.8 to 6.2) transformers" in line and "**2.5** (2.4 to 2.6)" in line


@pytest.mark.parametrize("changes", [{"dirty": True}, {"commit": "other"}, {"machine": "B"}])
def test_the_published_numbers_are_of_one_clean_commit(changes):
    with pytest.raises(ValueError, match="needs those of one clean commit"):
        cpu_speed().table([*sweep(), row(**changes)])

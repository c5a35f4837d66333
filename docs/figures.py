"""Draws the figures of operators.md, one for each op: `python docs/figures.py`.

One function per figure draws and returns a Sheet. Its unit is a cell, x to the right and y down.
"""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.patches import Rectangle

FOLDER = pathlib.Path(__file__).parent / "assets" / "figures"
# Okabe and Ito's colours, which the colour-blind can tell apart, lightened for black text.
BLUE, ORANGE, GREEN, PINK, GREY = "#9ecae9", "#f5c27a", "#8fd3b6", "#e3b1cf", "#e4e4e4"
WHITE = "#ffffff"


class Sheet:
    """The canvas of a figure. width, height: numbers of cells."""

    def __init__(self, width: float, height: float):
        self.figure, self.axes = pyplot.subplots(figsize=(width * 0.42, height * 0.42))
        self.figure.subplots_adjust(0, 0, 1, 1)
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()

    def cell(self, x, y, label="", color=WHITE, width=1.0, height=1.0):
        box = Rectangle((x, y), width, height, facecolor=color, edgecolor="#444444", linewidth=0.8)
        self.axes.add_patch(box)
        self.say(x + width / 2, y + height / 2, label, "center")

    def row(self, x, y, labels, colors, width=1.0):
        """Draw cells side by side. colors: one for all cells, or a list with one for each."""
        colors = [colors] * len(labels) if isinstance(colors, str) else colors
        for i, (label, color) in enumerate(zip(labels, colors, strict=True)):
            self.cell(x + i * width, y, label, color, width)

    def say(self, x, y, text, align="left"):
        self.axes.text(x, y, text, ha=align, va="center", fontsize=8.5)

    def arrow(self, x, y, to_x, to_y):
        style = {"arrowstyle": "->", "color": "#444444", "linewidth": 0.9}
        self.axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)

    def arc(self, x, y, to_x, to_y, bend):
        style = {"arrowstyle": "<->", "color": "#444444", "linewidth": 0.8, "shrinkA": 0}
        style |= {"connectionstyle": f"arc3,rad={bend}", "shrinkB": 0}
        self.axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)


def bias_dropout_add():
    sheet = Sheet(25, 5.6)
    for x, name, color in (
        (0.5, "x [.., h]", BLUE), (5.5, "bias [h]", ORANGE), (14.5, "residual [.., h]", GREEN),
        (20.4, "out [.., h]", GREY),
    ):  # fmt: skip
        sheet.cell(x, 0.5, name, color, 4)
    for x, sign in ((5, "+"), (14, "+"), (19.4, "=")):
        sheet.say(x, 1, sign, "center")
    sheet.say(9.8, 1, "→ dropout(p) →")
    sheet.say(
        0.5, 2.6, "a row of h: 8 lanes; one Philox call draws for the same column of all eight"
    )
    lanes = [BLUE, GREEN, ORANGE, PINK] * 2
    sheet.row(0.5, 3.3, [f"lane {i}" for i in range(8)], lanes, 3)
    for i in range(8):
        sheet.arrow(12.5, 5.5, 1 + 3 * i, 4.4)
    return sheet


def rope():
    sheet = Sheet(19, 6)
    turn = [BLUE, GREEN, ORANGE, PINK]
    for y, layout, colors in (
        (1, "half", turn * 2),
        (4, "interleaved", [c for c in turn for _ in "ab"]),
    ):
        sheet.row(4.5, y, range(8), colors)
        sheet.row(12.5, y, ["8", "9", "10", "11"], GREY)
        sheet.say(0.2, y + 0.5, f'"{layout}"')
    for i in range(4):
        sheet.arc(5 + i, 1, 9 + i, 1, -0.22)
        sheet.arc(5 + 2 * i, 4, 6 + 2 * i, 4, -0.7)
    sheet.say(14.5, 2.6, "the rest passes through", "center")
    sheet.say(8.5, 2.6, "R = 8 elements rotate in pairs", "center")
    sheet.say(8.5, 5.6, "D = 12: a head", "center")
    return sheet


def mrope():
    sheet = Sheet(17, 5)
    of_axis = {"T": BLUE, "H": ORANGE, "W": GREEN}
    sheet.say(8.5, 0.5, "the frequency of each pair takes its position from")
    for y, layout, owners in ((1.2, "chunked", "TTTTHHWW"), (2.8, "interleaved", "THWTHWTT")):
        sheet.row(8.5, y, owners, [of_axis[axis] for axis in owners])
        sheet.say(4, y + 0.5, f'"{layout}"')
    for y, axis in ((1.0, "T"), (2.0, "H"), (3.0, "W")):
        sheet.cell(0.3, y, f"cos, sin {axis}", of_axis[axis], 3.2)
    sheet.say(8.5, 4.4, "8 frequencies, mrope_section = [4, 2, 2]")
    return sheet


def qk_norm_rope():
    sheet = Sheet(23, 6.4)
    fused = ["q0", "gate0", "q1", "gate1", "k0", "v0"]
    colors = [BLUE, PINK, BLUE, PINK, GREEN, ORANGE]
    sheet.say(0.3, 0.9, "qkv")
    sheet.row(2, 0.4, fused, colors, 3)
    sheet.say(2, 2.1, "heads of D side by side; with gated=True a gate behind each query")
    for y, name, heads, color, made in (
        (2.9, "q", ("q0", "q1"), BLUE, "RMS norm with w or 1 + w, then rotated"),
        (4.0, "k", ("k0",), GREEN, "likewise"),
        (5.1, "v, gate", ("v0", "gate0", "gate1"), ORANGE, "as they are"),
    ):
        sheet.say(0.3, y + 0.5, name)
        shades = [PINK if head.startswith("gate") else color for head in heads]
        sheet.row(2.8, y, heads, shades, 2.5)
        sheet.say(10.8, y + 0.5, made)
    return sheet


def attention():
    sheet = Sheet(28, 7.5)
    rules = (
        ("causal,\nbottom right", lambda i, j: j <= i + 2),
        ("causal,\ntop left", lambda i, j: j <= i),
        ("window (2, 0),\nbottom right", lambda i, j: i <= j <= i + 2),
        ("packed 2 + 2", lambda i, j: j < 4 and i // 2 == j // 2),
    )
    for n, (name, sees) in enumerate(rules):
        left, keys = 1 + 7 * n, 4 if "packed" in name else 6
        for i in range(4):
            for j in range(keys):
                sheet.cell(
                    left + 0.9 * j, 2.4 + i * 0.9, "", BLUE if sees(i, j) else WHITE, 0.9, 0.9
                )
        sheet.say(left, 0.8, name)
        sheet.say(left, 1.9, "keys →")
        sheet.say(left, 6.6, "queries ↓ of 4")
    return sheet


def gdn_gate():
    sheet = Sheet(22, 4)
    sheet.cell(0.3, 0.4, "a [.., HV]", BLUE, 4)
    sheet.cell(0.3, 2.2, "b [.., HV]", GREEN, 4)
    sheet.say(5, 0.9, "→  softplus(a + dt_bias)  ×  -exp(A_log)  →")
    sheet.say(5, 2.7, "→  sigmoid(b)  (doubled with allow_neg_eigval)  →")
    sheet.cell(16.6, 0.4, "g, fp32", BLUE, 4)
    sheet.cell(16.6, 2.2, "beta", GREEN, 4)
    return sheet


def l2norm():
    sheet = Sheet(20, 4)
    for y, color in ((0.4, BLUE), (1.4, GREEN), (2.4, ORANGE)):
        sheet.row(0.4, y, ["", "", "", "", "", ""], color)
        sheet.say(7, y + 0.5, "x / sqrt(sum(x²) + eps): a row by itself, in fp32")
    sheet.say(3.4, 3.7, "D", "center")
    return sheet


def rms_norm():
    sheet = Sheet(23, 4)
    for y, (name, color) in ((0.4, ("x", BLUE)), (1.6, ("residual", GREY))):
        sheet.say(0.2, y + 0.5, name)
        sheet.row(4, y, [""] * 6, color)
    sheet.say(2.6, 2.1, "+")
    sheet.say(10.8, 1.5, "→  y / sqrt(mean(y²) + eps)  ×  weight, or 1 + weight  →")
    sheet.say(4, 3.5, "D: a row by itself, in fp32; y: the sum, rounded to x's dtype")
    return sheet


def swiglu():
    sheet = Sheet(23, 4.2)
    for y, name, color in ((0.4, "gate", BLUE), (1.6, "up", GREEN)):
        sheet.say(0.2, y + 0.5, name)
        sheet.row(2, y, [""] * 6, color)
    sheet.say(8.6, 0.9, "→  gate / (1 + exp(-gate))  ×  up  →")
    sheet.row(16.6, 0.4, [""] * 6, GREY)
    sheet.say(8.6, 2.1, "element by element, in fp32, rounded once")
    sheet.say(0.2, 3.5, "or")
    sheet.row(2, 3, [""] * 12, [BLUE] * 6 + [GREEN] * 6)
    sheet.say(14.6, 3.5, "in one: up behind the gate")
    return sheet


def linear():
    sheet = Sheet(24, 4.6)
    for y, name, color in ((0.4, "a row of x", BLUE), (1.6, "a row of weight", ORANGE)):
        sheet.say(0.2, y + 0.5, name)
        sheet.row(5.5, y, [""] * 9, color)
    for x in (5.5, 8.5, 11.5):
        sheet.cell(x, 2.9, "Σ", GREY, 3)
    sheet.arrow(14.6, 3.4, 16.9, 3.4)
    sheet.cell(17, 2.9, "out", GREEN, 1.6)
    sheet.say(15.2, 1.5, "K, in steps from left to right")
    sheet.say(5.5, 4.3, "the same steps for one row as for thousands")
    return sheet


def grouped_linear():
    sheet = Sheet(23, 4.9)
    sheet.say(0.2, 0.9, "x")
    sheet.row(3, 0.4, [""] * 9, [BLUE] * 3 + [ORANGE] * 5 + [GREY])
    sheet.say(0.2, 2.6, "weight")
    for x, name, color in ((3, "0", BLUE), (7.4, "2", ORANGE)):
        sheet.cell(x, 2.1, f"weight[{name}]ᵀ", color, 2.8)
    sheet.say(0.2, 4.3, "out")
    sheet.row(3, 3.8, [""] * 8 + ["0"], [BLUE] * 3 + [ORANGE] * 5 + [GREY])
    sheet.say(13, 0.9, "rows in groups: offs = 3, 3, 8")
    sheet.say(13, 2.6, "group 1 has no rows")
    sheet.say(13, 4.3, "rows behind the last group are 0")
    return sheet


def rms_norm_gated():
    sheet = Sheet(23, 4.6)
    sheet.say(0.2, 0.9, "x")
    sheet.row(1, 0.4, [""] * 8, [BLUE] * 4 + [GREEN] * 4)
    sheet.say(0.2, 2.4, "z")
    sheet.row(1, 1.9, [""] * 8, PINK)
    sheet.say(9.6, 0.9, "x / sqrt(mean(x²) + eps)  ×  weight")
    sheet.say(9.6, 2.4, "×  silu(z) or sigmoid(z): after the norm or before it")
    sheet.say(1, 3.9, "group_size: each colour has a mean of its own; None: the row has one")
    return sheet


def causal_conv1d():
    sheet = Sheet(22, 6.4)
    sheet.say(0.2, 0.9, "x")
    sheet.row(4.5, 0.4, [f"a{i}" for i in range(5)], BLUE)
    sheet.row(9.5, 0.4, [f"b{i}" for i in range(6)], GREEN)
    sheet.row(1.5, 0.4, ["", "", ""], GREY)
    sheet.say(1.5, 1.8, "state or 0")
    sheet.say(9.5, 1.8, "cu_seqlens = [0, 5, 11]: b does not see a")
    for i in range(4):
        sheet.arrow(4 + i, 1.5, 6.5, 3.4)
    sheet.cell(5.5, 3.5, "Σ w", ORANGE, 2)
    sheet.say(8, 4, "W = 4 taps, the last one at the token itself; SiLU; then y2 of a")
    sheet.say(0.2, 5.6, "y")
    sheet.row(4.5, 5.1, [f"a{i}" for i in range(5)], BLUE)
    sheet.row(9.5, 5.1, [f"b{i}" for i in range(6)], GREEN)
    return sheet


def causal_conv1d_qkv():
    sheet = Sheet(25, 4)
    sheet.say(0.2, 0.9, "x")
    sheet.row(
        1.2,
        0.4,
        ["q heads: HK × K", "k heads: HK × K", "v heads: HV × V"],
        [BLUE, GREEN, ORANGE],
        7,
    )
    sheet.say(1.2, 1.9, "convolution and SiLU, channel by channel")
    sheet.row(1.2, 2.5, ["q / its norm", "k / its norm", "v"], [BLUE, GREEN, ORANGE], 7)
    return sheet


def causal_conv1d_update():
    sheet = Sheet(24, 5.6)
    sheet.say(0.2, 0.7, "conv_state [slots, D, W - 1]")
    for slot in range(4):
        used = slot in (1, 3)
        sheet.row(2.2, 1.3 + slot, ["", "", ""], BLUE if used else GREY)
        sheet.say(0.2, 1.8 + slot, f"slot {slot}")
    for y, name in ((2.3, "new token of sequence 0"), (4.3, "new token of sequence 1")):
        sheet.cell(6.2, y, "", ORANGE)
        sheet.say(7.5, y + 0.5, f"{name}: y, and the columns move one to the left")
        sheet.arrow(6.2, y + 0.5, 5.3, y + 0.5)
    sheet.say(7.5, 1.6, "conv_state_indices = [1, 3]; pad_slot_id skips a sequence")
    return sheet


def chunk_gated_delta_rule():
    sheet = Sheet(25, 6.4)
    for n in range(4):
        x = 1.2 + 6 * n
        sheet.cell(x, 3.6, f"chunk {n}: 64 tokens", GREEN, 4.6)
        sheet.cell(x + 1.3, 0.6, "S [K, V]", BLUE, 2.4, 1.2)
        sheet.arrow(x + 2.5, 1.9, x + 2.5, 3.5)
        if n < 3:
            sheet.arrow(x + 3.8, 1.2, x + 7.2, 1.2)
    sheet.say(1.2, 5.3, "inside a chunk: matrix products and one triangular inverse of 64 × 64")
    sheet.say(
        1.2, 6.0, "between chunks: S decays and takes in the chunk; a sequence's first S is its own"
    )
    return sheet


def chunk_kda():
    sheet = Sheet(25, 6.4)
    for level, half in enumerate((4, 2, 1)):
        for block in range(4 // half):
            x, y = 0.8 + 2 * half * block * 1.5, 0.5 + 1.4 * level
            sheet.cell(x, y, "j" if half == 1 else f"{half} j", BLUE, 1.5 * half)
            sheet.cell(x + 1.5 * half, y, "i" if half == 1 else f"{half} i", GREEN, 1.5 * half)
        sheet.say(13.6, y + 0.5, f"level {half}: in a block of {2 * half} each i meets each j")
    sheet.say(0.8, 5, "r: the first row of a block's second half, j < r <= i")
    sheet.say(0.8, 5.8, "exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j): two decays, for each key")
    return sheet


def fused_recurrent_gated_delta_rule():
    sheet = Sheet(25, 5.5)
    for t in range(4):
        x = 1.2 + 6 * t
        sheet.cell(x, 0.6, "S [K, V]", BLUE, 2.8, 1.2)
        sheet.cell(x, 3.4, f"k, v, q, g, beta of t{t}", GREEN, 5)
        sheet.arrow(x + 1.4, 3.3, x + 1.4, 1.9)
        if t < 3:
            sheet.arrow(x + 2.9, 1.2, x + 5.9, 1.2)
    sheet.say(1.2, 5, "S = exp(g) S + k (beta (v - exp(g) Sᵀk))ᵀ,   o = Sᵀ (scale q)")
    return sheet


def gated_delta_rule_update():
    sheet = Sheet(25, 5.6)
    sheet.say(0.2, 0.7, "state pool [slots, HV, K, V] (state_v_first: [slots, HV, V, K])")
    for slot in range(4):
        sheet.cell(2.2, 1.3 + slot, "S of every head", BLUE if slot == 3 else GREY, 5)
        sheet.say(0.2, 1.8 + slot, f"slot {slot}")
    sheet.cell(10.5, 4.3, "q | k | v, a, b", GREEN, 4.6)
    sheet.arrow(10.4, 4.8, 7.3, 4.8)
    sheet.say(15.5, 4.8, "sequence 0: slots[0] = 3")
    sheet.cell(10.5, 2.3, "q | k | v, a, b", WHITE, 4.6)
    sheet.say(15.5, 2.8, "sequence 1: slots[1] = -1, skipped: o = 0")
    return sheet


FIGURES = {
    draw.__name__: draw
    for draw in (
        bias_dropout_add, rope, mrope, qk_norm_rope, attention, gdn_gate, l2norm, linear,
        grouped_linear, rms_norm, rms_norm_gated, swiglu, causal_conv1d, causal_conv1d_qkv,
        causal_conv1d_update, chunk_gated_delta_rule, chunk_kda, fused_recurrent_gated_delta_rule,
        gated_delta_rule_update,
    )
}  # fmt: skip


def write(folder: pathlib.Path) -> None:
    """Write all figures to `folder`, with the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    # Keep text as text instead of paths: files are small, and the browser chooses the font.
    pyplot.rcParams.update({"svg.hashsalt": "npu-ops", "svg.fonttype": "none"})
    for name, draw in FIGURES.items():
        sheet = draw()
        file = folder / f"{name}.svg"
        sheet.figure.savefig(file, metadata={"Date": None}, facecolor="#ffffff")
        pyplot.close(sheet.figure)


if __name__ == "__main__":
    write(FOLDER)

"""Check that the words of a figure can be read, for the tests of all figures."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text


def texts_of(figure: Figure) -> list[Any]:
    """Every text with something in it, after layout; figures lay out when they are drawn."""
    figure.draw_without_rendering()
    found = []
    for axes in figure.axes:
        found += [child for child in axes.get_children() if isinstance(child, Text)]
        found += [axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_major_ticks()
            found += [tick.label1 for tick in ticks if low - 1e-9 <= tick.get_loc() <= high + 1e-9]
    return [text for text in [*found, *figure.texts] if text.get_text() and text.get_visible()]


def words_of(figure: Figure) -> set[str]:
    """Contents of the texts of a figure."""
    return {text.get_text() for text in texts_of(figure)}


def assert_readable(figure: Figure) -> None:
    """No text overlaps another or leaves the figure."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    assert len(boxes) >= 5
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    inner = np.array([box.padded(-1).extents for _, box in boxes])
    low, high = inner[:, :2], inner[:, 2:]
    overlaps = ((low[:, None] < high) & (low < high[:, None])).all(axis=-1)
    pairs = [f"{boxes[i][0]!r} overlaps {boxes[j][0]!r}" for i, j in np.argwhere(np.triu(overlaps, 1))]
    assert not pairs

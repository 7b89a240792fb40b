"""A paged cache addressed by columns gives every token what the contract of columns gives it."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest

from engines.openvino.columns import Columns
from engines.openvino.graph import PAGE
from engines.openvino.run import Run
from tests.support.integrity import check_pages

ROWS, CAPACITY = 4, 4 * PAGE
Content = list[list[int]]


class Paged:
    """What paged attention does with a run: each token is a hash of itself and of all that it sees."""

    def __init__(self) -> None:
        self.columns = Columns(ROWS, CAPACITY)
        self.pages = defaultdict[int, list[int]](lambda: [0] * PAGE)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        blank, beams = len(self.columns.table.pages.users), self.columns.beams
        for number in itertools.chain(*copies):
            assert number != blank, "a page is used that blanks are written to"
            assert number <= blank + beams.count
        self.pages |= {to: list(self.pages[source]) for source, to in copies}

    def run(self, run: Run) -> list[int]:
        self.copy(run.copies)
        found, given = list[int](), run.feeds
        masks, mask_begins = given["qq_bias"], given["qq_bias_begins"]
        for number, past in enumerate(given["past_lens"]):
            own = given["block_indices"][slice(*given["block_indices_begins"][number : number + 2])]
            begin, end = given["subsequence_begins"][number : number + 2]
            assert end > begin, "a sequence has no tokens"
            size, new = end - begin, list[int]()
            sees = np.tri(size, dtype=bool)
            if len(masks):
                sees = masks[mask_begins[number] : mask_begins[number + 1]].reshape(size, size).astype(bool)
            before = [self.pages[own[at // PAGE]][at % PAGE] for at in range(past)]
            for at in range(size):
                seen = [*before, *(new[other] for other in range(at) if sees[at, other])]
                token, position = (int(given[name][0, begin + at]) for name in ("tokens", "positions"))
                new.append(hash((token, position, *sorted(seen))))
            for at, value in enumerate(new):
                self.pages[own[(past + at) // PAGE]][(past + at) % PAGE] = value
            found += new
        return [found[at] for at in given["keep"]]


class Dense:
    """The contract of `engines.base.Step`, on columns that hold the same hashes."""

    def __init__(self) -> None:
        self.held: Content = [[0] * CAPACITY for _ in range(ROWS)]

    def step(self, tokens: np.ndarray, positions: np.ndarray, write_at: np.ndarray, mask: np.ndarray) -> Content:
        for row, start in enumerate(write_at):
            held = self.held[row]
            for at in range(tokens.shape[1]):
                seen = [held[column] for column in np.flatnonzero(mask[row, at]) if column != start + at]
                held[start + at] = hash((int(tokens[row, at]), int(positions[row, at]), *sorted(seen)))
        return [self.held[row][start : start + tokens.shape[1]] for row, start in enumerate(write_at)]


class Texts:
    """Random texts on both, as the two roles of a decoding loop would run them."""

    def __init__(self, seed: int) -> None:
        self.random, self.paged, self.dense = random.Random(seed), Paged(), Dense()
        self.committed = [0] * ROWS

    def step(self, write_at: list[int], sees: list[list[set[int]]], depth: list[list[int]]) -> None:
        """One step, and whether both gave every token the same that sees itself."""
        count, steps = len(write_at), len(sees[0])
        tokens = np.array([[self.random.randrange(1000) for _ in range(steps)] for _ in range(count)])
        mask = np.zeros((count, steps, CAPACITY), bool)
        for row in range(count):
            for at in range(steps):
                mask[row, at, list(sees[row][at])] = True
        start, positions = np.array(write_at), np.array(depth)
        keep = np.arange(steps)[::-1]
        run = self.paged.columns.plan(tokens, positions, start, mask, keep, 0)
        expected = self.dense.step(tokens, positions, start, mask)
        found = np.array(self.paged.run(run)).reshape(count, steps)[:, ::-1]
        for row, at in np.ndindex(count, steps):
            if mask[row, at, write_at[row] + at]:
                assert found[row, at] == expected[row][at]

    def chain(self, write_at: list[int], steps: int) -> None:
        """A step of which each token sees all before it."""
        columns = [list(range(start, start + steps)) for start in write_at]
        self.step(write_at, [[set(range(end + 1)) for end in row] for row in columns], columns)

    def defer(self, row: int, steps: int) -> None:
        """A piece of a prompt, which a later run computes."""
        start = self.committed[row]
        if row in self.paged.columns.deferred:
            self.paged.run(self.paged.columns.plan_deferred())
        tokens, at = np.array([self.random.randrange(1000) for _ in range(steps)]), np.arange(start, start + steps)
        self.paged.copy(self.paged.columns.defer(tokens, at, start, row))
        held = self.dense.held[row]
        for token, column in zip(tokens, at, strict=True):
            held[column] = hash((int(token), int(column), *sorted(held[:column])))
        self.committed[row] += steps

    def block(self, rows: int, width: int, levels: int, commit: int | None = None) -> None:
        """Draft a tree of levels over the last two tokens, keep a path of it.

        Some rows are narrower than the batch: the slots that no beam of theirs is in see nothing of the tree.

        Args:
            commit: tokens to commit of each path; by default, at random.
        """
        self.chain([committed - 2 for committed in self.committed[:rows]], 2)
        widths = [width if commit else self.random.randint(1, width) for _ in range(rows)]
        nodes: list[list[set[int]]] = [[set(range(self.committed[row]))] for row in range(rows)]
        paths: list[Content] = [[[]] for _ in range(rows)]
        for level in range(levels):
            start = [self.committed[row] + level * widths[row] for row in range(rows)]
            parents = [[self.random.randrange(len(nodes[row])) for _ in range(widths[row])] for row in range(rows)]
            nodes = [
                [nodes[row][parent] | {start[row] + slot} for slot, parent in enumerate(parents[row])]
                for row in range(rows)
            ]
            paths = [
                [[*paths[row][parent], start[row] + slot] for slot, parent in enumerate(parents[row])]
                for row in range(rows)
            ]
            blank = [[set(range(self.committed[row]))] * (width - widths[row]) for row in range(rows)]
            sees = [[*nodes[row], *blank[row]] for row in range(rows)]
            self.step(start, sees, [[self.committed[row] + level] * width for row in range(rows)])
        self.keep([row[self.random.randrange(len(row))] for row in paths], commit)

    def keep(self, paths: list[list[int]], commit: int | None = None) -> None:
        source = np.array(paths)
        to = np.array(self.committed[: len(paths)])[:, None] + np.arange(source.shape[1])
        self.paged.copy(self.paged.columns.move(source, to))
        for row, path in enumerate(paths):
            self.dense.held[row][to[row, 0] : to[row, -1] + 1] = [self.dense.held[row][column] for column in path]
            self.committed[row] += commit or self.random.randint(1, len(path))

    def cut(self, row: int, start: int) -> None:
        for page in self.paged.columns.cut(row, start):
            self.paged.pages[page] = [-1] * PAGE
        self.committed[row] = start

    def copy(self, source: int, to: int, columns: int) -> None:
        self.paged.columns.copy(source, to, columns)
        self.dense.held[to][:columns] = self.dense.held[source][:columns]
        self.committed[to] = columns


@pytest.mark.parametrize("seed", range(20))
def test_every_token_of_random_drafts_sees_what_its_mask_says(seed: int) -> None:
    texts = Texts(seed)
    texts.chain([0] * ROWS, PAGE + 9)
    texts.committed = [texts.random.randint(3, PAGE + 9) for _ in range(ROWS)]
    for _ in range(8):
        width, levels, rows = texts.random.choice([1, 2, 4]), texts.random.randint(1, 4), texts.random.randint(1, ROWS)
        if max(texts.committed) + width * levels < CAPACITY:
            texts.block(rows, width, levels)
        if texts.random.random() < 0.4:
            source, to = texts.random.sample(range(ROWS), 2)
            columns = max(3, texts.committed[source] - 2)
            if texts.random.random() < 0.5:
                texts.cut(source, columns)
            texts.copy(source, to, columns)
        row, steps = texts.random.randrange(ROWS), texts.random.randint(1, PAGE)
        if texts.random.random() < 0.4 and texts.committed[row] + steps < CAPACITY - 20:
            texts.defer(row, steps)
        check(texts.paged.columns)


@pytest.mark.parametrize("start", [10, PAGE - 2, PAGE])
def test_a_draft_runs_each_node_once_and_its_accepted_path_not_again(start: int) -> None:
    """Also where its paths begin a page, or go on on the next."""
    texts, ran = Texts(3), list[tuple[int, list[int]]]()
    texts.chain([0, 0], start)
    texts.committed = [start, start]
    plain = texts.paged.run

    def record(run: Run) -> list[int]:
        ran.append((run.feeds["tokens"].shape[1], sorted({*run.feeds["past_lens"].tolist()})))
        return plain(run)

    texts.paged.run = record  # type: ignore[method-assign]
    texts.block(2, 4, 4, commit=4)
    assert ran[0] == (4, [start - 2])
    more_pages = 0 if start != PAGE - 2 else 2 * 4 * 2  # where beams get their second page, paths are run once more
    assert ran[1:] == [
        (8, [start]),
        (8, [start + 1]),
        (8 + more_pages, [start + 2 * (not more_pages)]),
        (8, [start + 3]),
    ]
    texts.chain([committed - 2 for committed in texts.committed[:2]], 2)
    assert ran[-1][0] == 4


def test_a_row_that_was_not_brought_up_to_date_changes_nothing() -> None:
    texts = Texts(0)
    texts.chain([0], 10)
    texts.paged.columns.plan(*_chain(40, 2), 0)
    texts.chain([10], 4)
    check(texts.paged.columns)


def test_a_block_without_a_draft_leaves_what_an_earlier_ones_beams_held_alone() -> None:
    """A caller may say what was accepted although nothing was drafted: then each column is where it was."""
    texts = Texts(0)
    texts.chain([0], 10)
    texts.committed = [10]
    texts.block(1, 4, 3, commit=2)
    columns = texts.paged.columns
    to = np.array([[12, 13, 14]])
    assert columns.move(to, to) == []
    texts.chain([10], 4)


def test_what_a_run_that_fails_was_to_store_is_run_again() -> None:
    texts = Texts(0)
    texts.defer(0, 20)
    texts.defer(1, 9)
    texts.chain([20], 2)
    texts.defer(1, 5)
    texts.committed = [22, 14]
    texts.block(2, 2, 2)
    (committed, other), columns = texts.committed[:2], texts.paged.columns
    tree = np.arange(CAPACITY) < [[[committed], [committed]], [[other], [other]]]
    tree[[0, 0, 1, 1], [0, 1, 0, 1], [committed, committed + 1, other, other + 1]] = True
    none, starts = np.zeros((2, 2), np.int64), np.array([committed, other])
    columns.take_back(columns.plan(none, none, starts, tree, np.arange(2), 0))
    check(columns)
    texts.chain([committed, other], 4)


def test_a_text_of_trees_whose_paths_do_not_lie_in_place_is_as_its_masks_say() -> None:
    texts = Texts(0)
    texts.chain([0] * ROWS, 3)
    texts.committed = [3] * ROWS
    while max(texts.committed) < CAPACITY - 12:  # root and tree in one step, and no path lies in place
        starts = [committed - 1 for committed in texts.committed]
        seen_by = [(start, set(range(start + 1))) for start in starts]
        sees = [[seen, seen | {at + 1}, seen | {at + 2}, seen | {at + 2, at + 3}] for at, seen in seen_by]
        texts.step(starts, sees, [[at, at + 1, at + 1, at + 2] for at in starts])
        texts.keep([[at + 2, at + 3] for at in starts])


def check(columns: Columns) -> None:
    """Invariants of the pages and of the account."""
    check_pages(columns.table)
    assert (columns._stored <= columns._known).all(), "a column is stored whose token is not known"
    assert (columns._base <= columns._stored).all(), "a tree begins behind what is stored"
    deferred = all(columns._stored[row] < columns._known[row] for row in columns.deferred)
    assert deferred, "a row is deferred that is stored"


def _chain(start: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    columns = np.arange(start, start + steps)
    mask = np.arange(CAPACITY) <= columns[:, None]
    return columns[None], columns[None], np.array([start]), mask[None], np.arange(steps)

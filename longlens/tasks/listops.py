"""ListOps: nested list operations on digits, as sequences of tokens (Nangia & Bowman 2018; Tay et al. 2021).

``[MAX 2 9 [MIN 4 7 ] 0 ]`` is 9. The arena's rules: a tree of depth at most 10, in which a node is a digit with
probability 3/4 and else one of MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10) of 2 to 10 nodes;
only trees of more than 500 and fewer than 2000 tokens count. Brackets are tokens, ``]`` written as ``X``.

Trees are grown level by level, thousands at a time, and evaluated from their tokens, level by level too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from longlens.tasks.base import SPLITS, Spec, SplitName, register
from longlens.tasks.datasets import Samples, Sequences, offsets_of
from longlens.tasks.generate import Block, GeneratedTask
from longlens.tasks.sources import ARENA, Source
from longlens.tasks.store import Details, Writer
from longlens.tasks.stream import Stream

VOCABULARY = ("<pad>", "<unk>", "<eos>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X")
EOS, ZERO, MIN, MAX, MED, SM, CLOSE = (
    VOCABULARY.index(symbol) for symbol in ("<eos>", "0", "[MIN", "[MAX", "[MED", "[SM", "X")
)
DIGIT_SHARE = 0.75  # of the nodes below the root
_IDS = {symbol: index for index, symbol in enumerate(VOCABULARY)}


@register("listops")
@dataclass(frozen=True, kw_only=True)
class ListOps(GeneratedTask):
    """Evaluate nested list operations.

    Args:
        sizes: samples for training, validation and test.
        min_length: expressions have more tokens than this,
        max_length: and fewer than this.
        max_depth: levels of nesting, the digits included.
        max_args: the most arguments of an operation.
        release: the files of the arena's release, imported with --from, instead of generated expressions.
    """

    sizes: tuple[int, int, int] = (96_000, 2_000, 2_000)
    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10
    release: bool = False

    summary: ClassVar[str] = "evaluate nested list operations on digits"
    block_size: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.release:
            return self.refuse_with_release("seed", "min_length", "max_depth", "max_args")
        if self.max_args < 2 or self.max_depth < 2:
            raise ValueError(
                f"max_args is {self.max_args} and max_depth is {self.max_depth}; both must be at least 2, or there is "
                "nothing to compute"
            )
        longest = (self.max_args ** (self.max_depth - 1) * (self.max_args + 1) - 2) // (self.max_args - 1)
        if max(self.min_length + 1, 4) > min(self.max_length - 1, longest):
            raise ValueError(
                f"no expression of depth {self.max_depth} with up to {self.max_args} arguments has more than "
                f"min_length={self.min_length} and fewer than max_length={self.max_length} tokens: the "
                f"shortest has 4, the longest {longest:,}"
            )

    @property
    def spec(self) -> Spec:
        return Spec("tokens", len(VOCABULARY), self.max_length, self.head, 10, self.metric)

    def load(self, name: SplitName, epoch: int) -> Sequences:
        split = self.sequences(name, end=EOS)
        if (longest := split.lengths.max()) > self.max_length:  # a part of an expression has another value
            raise ValueError(f"max_length is {self.max_length}, but an expression and its end have {longest} tokens")
        return split

    def vocabulary(self) -> list[str]:
        return list(VOCABULARY)

    def recipe(self) -> dict[str, Any]:
        if self.release:
            return {"task": self.name, "version": self.version, "release": True, "sizes": self.sizes}
        return super().recipe()

    def build(self, writer: Writer, source: Path | None, workers: int | None) -> Details:
        return _import_release(writer, source, self.sizes) if self.release else super().build(writer, source, workers)

    def block(self, index: int) -> Block:
        stream = Stream(self.name, self.version, self.seed, index)
        found: list[Block] = []
        tries = missing = self.block_size
        while missing > 0:
            grown = _grow(stream, 2 * self.block_size, self)
            found.append(grown)
            missing -= len(grown.lengths)
            tries -= 1
            if tries == 0:
                raise ValueError(
                    f"expressions with {self.min_length} < tokens < {self.max_length} are too rare "
                    f"at depth {self.max_depth} with up to {self.max_args} arguments: widen the range, or go deeper"
                )
        lengths = np.concatenate([part.lengths for part in found])[: self.block_size]
        values = np.concatenate([part.values for part in found])[: lengths.sum()]
        return Block(values, lengths, evaluate(values, lengths))

    def render(self, samples: Samples, row: int) -> str:
        tokens = samples.inputs[row, : samples.lengths[row]]
        return f"{draw_tree(tokens[tokens != EOS])}\n= {samples.targets[row]}"


class _Level(NamedTuple):
    """The nodes of all trees at one depth, the children of one node side by side."""

    tree: np.ndarray
    token: np.ndarray
    arguments: np.ndarray  # of its operations, in order


def _grow(stream: Stream, count: int, rules: ListOps) -> Block:
    """The trees with a length in the range, of ``count`` grown from an operation (a digit would be too short)."""
    levels: list[_Level] = []
    lengths = np.zeros(count, dtype=np.int64)
    tree = np.arange(count)
    for depth in range(1, rules.max_depth + 1):
        if depth == rules.max_depth:
            is_operation = np.zeros(len(tree), dtype=bool)
        elif depth == 1:
            is_operation = np.ones(len(tree), dtype=bool)
        else:
            is_operation = stream.uniform(len(tree)) >= DIGIT_SHARE
        operations = MIN + stream.integers(4, len(tree))
        token = np.where(is_operation, operations, ZERO + stream.integers(10, len(tree))).astype(np.uint8)
        lengths += np.bincount(tree, weights=1 + is_operation, minlength=count).astype(np.int64)
        arguments = 2 + stream.integers(rules.max_args - 1, int(is_operation.sum()))
        levels.append(_Level(tree, token, arguments))
        # A tree that is too long already needs no more levels.
        open_tree = tree[is_operation]
        going_on = lengths[open_tree] < rules.max_length
        tree = np.repeat(open_tree[going_on], arguments[going_on])
    good = (lengths > rules.min_length) & (lengths < rules.max_length)
    return _write_out([_keep(level, good) for level in levels], lengths[good])


def _keep(level: _Level, good: np.ndarray) -> _Level:
    """The nodes of good trees. All children of theirs are there, since such a tree was never cut short."""
    kept = good[level.tree]
    is_operation = level.token >= MIN
    return _Level(level.tree[kept], level.token[kept], level.arguments[kept[is_operation]])


def _write_out(levels: list[_Level], lengths: np.ndarray) -> Block:
    """Trees as sequences: sizes of the subtrees from the leaves up, then places of the tokens from the root down."""
    sizes = [np.ones(len(level.token), dtype=np.int64) for level in levels]
    for size, level, child_size in zip(sizes[-2::-1], levels[-2::-1], sizes[:0:-1], strict=True):
        if len(level.arguments):
            size[level.token >= MIN] = 2 + np.add.reduceat(child_size, offsets_of(level.arguments)[:-1])
    values = np.full(lengths.sum(), CLOSE, dtype=np.uint8)
    place = offsets_of(lengths)[:-1]
    for depth, level in enumerate(levels):
        values[place] = level.token
        if depth + 1 < len(levels) and len(level.arguments):
            before = offsets_of(sizes[depth + 1])[:-1]  # sizes of all nodes to the left, in this level
            first = np.repeat(before[offsets_of(level.arguments)[:-1]], level.arguments)
            place = np.repeat(place[level.token >= MIN], level.arguments) + 1 + before - first
        else:
            place = place[:0]
    return Block(values, lengths, np.empty(0, dtype=np.uint8))


def evaluate(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The value of each of N expressions, given as tokens one after another.

    Args:
        values: (total,) token ids.
        lengths: (N,) tokens of each expression.

    Returns:
        (N,) uint8, each 0 … 9. An expression that is not well formed raises ValueError with its number.
    """
    is_operation = (values >= MIN) & (values <= SM)
    depth = np.cumsum(is_operation.astype(np.int32) - (values == CLOSE))
    _check(values, lengths, is_operation, depth)
    nodes = np.flatnonzero(values != CLOSE)
    level = (depth - is_operation)[nodes].astype(np.int16)  # two bytes are sorted by counting
    in_levels = nodes[np.argsort(level, kind="stable")]  # where the nodes of each level are, in the order of the text
    bounds = offsets_of(np.bincount(level))
    result = values.astype(np.int64) - ZERO
    children = np.empty(0, dtype=np.int64)
    for low, high in zip(bounds[-2::-1], bounds[:0:-1], strict=True):
        here = in_levels[low:high]
        parents = here[is_operation[here]]
        if len(parents):
            result[parents] = _apply(values[parents], result[children], np.searchsorted(children, parents))
        children = here
    return result[offsets_of(lengths)[:-1]].astype(np.uint8)


def _apply(operation: np.ndarray, arguments: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Each operation on its arguments, which begin at ``starts``."""
    counts = np.diff(starts, append=len(arguments))
    groups = np.repeat(np.arange(len(starts)), counts)
    ordered = np.sort(16 * groups + arguments) % 16  # within each operation
    median = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
    total = np.add.reduceat(arguments, starts) % 10
    smallest, largest = ordered[starts], ordered[starts + counts - 1]
    return np.select([operation == MIN, operation == MAX, operation == MED], [smallest, largest, median], total)


def _check(values: np.ndarray, lengths: np.ndarray, is_operation: np.ndarray, depth: np.ndarray) -> None:
    """Each expression is one digit or one operation that ends with its last token, and no operation is empty."""
    ends = offsets_of(lengths)[1:]
    starts = ends - lengths
    known = ((values >= ZERO) & (values < MIN)) | is_operation | (values == CLOSE)
    faults = {
        "it is empty": np.flatnonzero(lengths < 1),
        "it has a token that is not of ListOps": _expression_of(np.flatnonzero(~known), ends),
        "an operation has no arguments": _expression_of(
            np.flatnonzero(is_operation[:-1] & (values[1:] == CLOSE)), ends
        ),
    }
    if all(len(where) == 0 for where in faults.values()):
        inside = np.ones(len(values), dtype=bool)
        inside[ends - 1] = False  # at its last token, and only there, an expression is closed
        wrong = np.where(inside, depth <= 0, depth != 0)
        faults["its brackets are not balanced"] = _expression_of(np.flatnonzero(wrong), ends)
        faults["it begins with a bracket that closes"] = np.flatnonzero(values[starts] == CLOSE)
    for reason, where in faults.items():
        if len(where):
            raise ValueError(f"expression {where[0] + 1} cannot be evaluated: {reason}")


def _expression_of(place: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return np.searchsorted(ends, place, side="right")


def evaluate_reference(tokens: Sequence[str]) -> int:
    """The value of one expression, as its definition reads."""
    stack: list[list] = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token in ("X", "]"):
            operation, *arguments = stack.pop()
            ordered = sorted(arguments)
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
            values = {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": middle, "[SM": sum(arguments) % 10}
            stack[-1].append(values[operation])
        else:
            stack[-1].append(int(token))
    return stack[0][0]


def tokenize(text: str) -> np.ndarray:
    """The tokens of a written expression: parentheses are deleted, ``]`` becomes ``X``, brackets are never dropped."""
    symbols = text.replace("(", " ").replace(")", " ").replace("]", " X ").split()
    try:
        return np.array([_IDS[symbol] for symbol in symbols], dtype=np.uint8)
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is not a symbol of ListOps") from None


def draw_tree(tokens: np.ndarray) -> str:
    """An expression as a tree: a line for each operation, its value behind it, and its digits beside it."""
    lines: list[str] = []
    _draw(list(tokens), 0, "", lines)
    return "\n".join(lines)


def _draw(tokens: list[int], start: int, indent: str, lines: list[str]) -> tuple[int, int]:
    """Draw the node at ``start``; its value and where it ends."""
    if tokens[start] < MIN:
        return tokens[start] - ZERO, start + 1
    place, at, shown, values = len(lines), start + 1, "", []
    lines.append("")
    while tokens[at] != CLOSE:
        shown += " ·" if tokens[at] >= MIN else f" {tokens[at] - ZERO}"
        value, at = _draw(tokens, at, indent + "  ", lines)
        values.append(str(value))
    name = VOCABULARY[tokens[start]]
    result = evaluate_reference([name, *values, "X"])
    lines[place] = f"{indent}{name[1:]}{shown}  = {result}"
    return result, at + 1


def _import_release(writer: Writer, source: Path | None, sizes: tuple[int, int, int]) -> Details:
    """The arena's own files, every label computed again."""
    if source is None:
        raise ValueError(
            f"the arena's ListOps files are in {ARENA}: unpack it, and give its folder with --from, "
            "or leave out --release to generate some by the same rules"
        )
    files = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
    for split, file, size in zip(SPLITS, files, sizes, strict=True):
        tokens, labels = [], []
        for number, line in enumerate(Source(source).read(file).decode(errors="replace").splitlines()):
            expression, _, label = line.partition("\t")
            if number == 0 and label == "Target":
                continue
            try:
                tokens.append(tokenize(expression))
            except ValueError as error:
                raise ValueError(f"{file}, line {number + 1}: {error}") from None
            if len(label) != 1 or label not in "0123456789":
                raise ValueError(f"{file}, line {number + 1}: the label is {label!r}; it must be a digit")
            labels.append(int(label))
        if len(labels) != size:
            raise ValueError(f"{file} in {source} has {len(labels):,} expressions, and sizes ask for {size:,}")
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        values = np.concatenate(tokens)
        wrong = np.flatnonzero(evaluate(values, lengths) != np.array(labels, dtype=np.uint8))
        if len(wrong):
            raise ValueError(
                f"{file}: the label of expression {wrong[0] + 1} is not its value; {len(wrong):,} are wrong"
            )
        writer.append(split, "values", values)
        writer.append(split, "lengths", lengths)
        writer.append(split, "labels", np.array(labels, dtype=np.uint8))
    return {"sizes": dict(zip(SPLITS, sizes, strict=True)), "source": str(source)}

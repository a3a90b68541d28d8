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

from longlens.data.datasets import SPLITS, Samples, Sequences, SplitName, Stream, offsets_of
from longlens.data.generate import Shard
from longlens.data.sources import ARENA, Source
from longlens.data.store import Writer
from longlens.errors import BadInput
from longlens.options import Count, Several, shorten
from longlens.tasks.base import Length, ReleasedTask, Sizes, Spec, register

VOCABULARY = ("<pad>", "<unk>", "<eos>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X")
EOS, ZERO, MIN, MAX, MED, SM, CLOSE = (
    VOCABULARY.index(symbol) for symbol in ("<eos>", "0", "[MIN", "[MAX", "[MED", "[SM", "X")
)
DIGIT_PROBABILITY = 0.75  # of a node below the root
MOST_NODES = 10_000_000  # of a level of all trees that grow together: more take minutes and gigabytes
MOST_INDENTED = 40  # levels of a drawn tree
REPLACED = (("(", " "), (")", " "), ("]", " X "))  # in a written expression, before it is split into symbols
FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")  # of the arena's release
_IDS = {symbol: index for index, symbol in enumerate(VOCABULARY)}


@register("listops")
@dataclass(frozen=True, kw_only=True)
class ListOps(ReleasedTask):
    """Evaluate nested list operations.

    Args:
        min_length: Shortest expression, in tokens (exclusive).
        max_length: Longest expression, in tokens (exclusive).
        max_depth: Levels of nesting, including the digits.
        max_args: Largest number of arguments of an operation.
        release: Import the files of the arena's release with --from, instead of generating expressions.
    """

    sizes: Sizes = (96_000, 2_000, 2_000)
    min_length: Count = 500
    max_length: Length = 2000
    max_depth: Several = 10
    max_args: Several = 10

    summary: ClassVar[str] = "evaluate nested list operations on digits"
    shard_size: ClassVar[int] = 1000
    generator_options: ClassVar[tuple[str, ...]] = ("seed", "min_length", "max_depth", "max_args")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.release:
            return
        longest = _longest(self.max_args, self.max_depth, self.max_length)
        if max(self.min_length + 1, 4) > min(self.max_length - 1, longest):
            given = f"no expression of depth {self.max_depth} with up to {self.max_args} arguments"
            wanted = f"more than min_length={self.min_length} and fewer than max_length={self.max_length} tokens"
            raise BadInput(f"{given} has {wanted}: the shortest has 4, the longest {longest:,}")
        nodes = _largest_level(self.max_args, self.max_depth, self.max_length)
        if 2 * self.shard_size * nodes > MOST_NODES:
            wanted = f"smaller with max_depth={self.max_depth} and max_length={self.max_length}"
            raise BadInput(f"max_args must be {wanted}, got {self.max_args}: a level would have {nodes:,.0f} tokens")

    @property
    def spec(self) -> Spec:
        return Spec("tokens", len(VOCABULARY), self.max_length, self.head, 10, self.metric)

    def load(self, name: SplitName, epoch: int) -> Sequences:
        split = self.sequences(name, end=EOS)
        if (longest := split.lengths.max()) > self.max_length:  # a part of an expression has another value
            wanted = f"at least {longest}, the longest expression and its end"
            raise BadInput(f"max_length must be {wanted}, got {self.max_length}")
        return split

    def vocabulary(self) -> list[str]:
        return list(VOCABULARY)

    def codec(self) -> dict[str, Any]:
        return {
            "form": "words",
            "symbols": self.vocabulary(),
            "specials": ZERO,
            "end": EOS,
            "replace": REPLACED,
            "classes": list("0123456789"),
        }

    def identity(self) -> dict[str, Any]:
        if self.release:
            return {"task": self.name, "version": self.version, "release": True, "sizes": self.sizes}
        return super().identity()

    def shard(self, index: int) -> Shard:
        stream = Stream(self.name, self.version, self.seed, index)
        found: list[Shard] = []
        count = tries = 0
        while count < self.shard_size:
            found.append(_grow(stream, 2 * self.shard_size, self))
            count += len(found[-1].lengths)
            tries += 1
            if 4 * count < tries and tries >= 40:  # at this rate a shard takes thousands of tries
                rare = f"{self.min_length} < tokens < {self.max_length} are too rare at depth {self.max_depth}"
                raise BadInput(f"expressions with {rare}: widen the range, or raise max_depth or max_args")
        lengths = np.concatenate([part.lengths for part in found])[: self.shard_size]
        values = np.concatenate([part.values for part in found])[: lengths.sum()]
        return Shard(values, lengths, evaluate(values, lengths))

    def import_release(self, writer: Writer, source: Path) -> None:
        """The arena's own files, every label computed again."""
        for split, file, size in zip(SPLITS, FILES, self.sizes, strict=True):
            tokens, labels = _read_release(Source(source, ARENA), file, size)
            lengths = np.array([len(t) for t in tokens], dtype=np.int64)
            values = np.concatenate(tokens)
            try:
                wrong = np.flatnonzero(evaluate(values, lengths) != labels)
            except BadInput as error:
                raise BadInput(f"{file} in {source}: {error}") from None
            if len(wrong):
                first = f"the label of expression {wrong[0] + 1} is not its value"
                raise BadInput(f"{file} in {source}: {first}; {len(wrong):,} are wrong")
            writer.append(split, values=values, lengths=lengths, labels=labels)

    def render(self, samples: Samples, row: int) -> str:
        tokens = samples.inputs[row, : samples.lengths[row]]
        return f"{draw_tree(tokens[tokens != EOS])}\n= {samples.targets[row]}"


def _longest(max_args: int, max_depth: int, limit: int) -> int:
    """Tokens of the longest expression; any number above ``limit`` stands for those above it."""
    tokens, nodes = 0, 1
    for _ in range(max_depth - 1):
        tokens, nodes = tokens + 2 * nodes, nodes * max_args
        if tokens > limit:
            break
    return tokens + nodes


def _largest_level(max_args: int, max_depth: int, max_length: int) -> float:
    """Nodes of the largest level that a tree is expected to have before it has grown too long."""
    arguments = (2 + max_args) / 2
    nodes, tokens = arguments, 2 + arguments
    for _ in range(max_depth - 2):
        if tokens >= max_length:
            break
        nodes *= max(1.0, (1 - DIGIT_PROBABILITY) * arguments)
        tokens += nodes
    return nodes


class _Level(NamedTuple):
    """The nodes of all trees at one depth, the children of one node side by side."""

    tree: np.ndarray
    token: np.ndarray
    arguments: np.ndarray  # of its operations, in order


def _grow(stream: Stream, count: int, rules: ListOps) -> Shard:
    """The trees with a length in the range, of ``count`` grown from an operation (a digit would be too short)."""
    levels: list[_Level] = []
    lengths = np.zeros(count, dtype=np.int64)
    tree = np.arange(count)
    for depth in range(1, rules.max_depth + 1):
        if depth in (1, rules.max_depth):
            is_operation = np.full(len(tree), depth == 1)
        else:
            is_operation = stream.uniform(len(tree)) >= DIGIT_PROBABILITY
        operations = MIN + stream.integers(4, len(tree))
        token = np.where(is_operation, operations, ZERO + stream.integers(10, len(tree))).astype(np.uint8)
        lengths += np.bincount(tree, weights=1 + is_operation, minlength=count).astype(np.int64)
        arguments = 2 + stream.integers(rules.max_args - 1, int(is_operation.sum()))
        levels.append(_Level(tree, token, arguments))
        # A tree that is too long already needs no more levels.
        open_tree = tree[is_operation]
        grows = lengths[open_tree] < rules.max_length
        tree = np.repeat(open_tree[grows], arguments[grows])
        if not len(tree):
            break
    good = (lengths > rules.min_length) & (lengths < rules.max_length)
    for i, (tree, token, arguments) in enumerate(levels):  # all children of theirs are there: they were never cut short
        kept = good[tree]
        levels[i] = _Level(tree[kept], token[kept], arguments[kept[token >= MIN]])
    return _write_out(levels, lengths[good])


def _write_out(levels: list[_Level], lengths: np.ndarray) -> Shard:
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
    return Shard(values, lengths, np.empty(0, dtype=np.uint8))


def evaluate(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The values (N,) uint8 of N expressions of these lengths (N,), given as token ids (total,) one after another.

    An expression that is not well formed raises BadInput with its number.
    """
    is_operation = (values >= MIN) & (values <= SM)
    depth = np.cumsum(is_operation.astype(np.int32) - (values == CLOSE))
    _check(values, lengths, is_operation, depth)
    nodes = np.flatnonzero(values != CLOSE)
    level = (depth - is_operation)[nodes]
    level = level.astype(np.int16 if level.max(initial=0) < 2**15 else np.int32)  # two bytes are sorted by counting
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

    def with_a(token: np.ndarray) -> np.ndarray:
        return np.searchsorted(ends, np.flatnonzero(token), side="right")

    faults = {
        "it is empty": np.flatnonzero(lengths < 1),
        "it has a token that is not of ListOps": with_a((values < ZERO) | (values > CLOSE)),
        "an operation has no arguments": with_a(is_operation[:-1] & (values[1:] == CLOSE)),
    }
    if not any(map(len, faults.values())):
        inside = np.ones(len(values), dtype=bool)
        inside[ends - 1] = False  # at its last token, and only there, an expression is closed
        faults["its brackets are not balanced"] = with_a(np.where(inside, depth <= 0, depth != 0))
        faults["it begins with a bracket that closes"] = np.flatnonzero(values[ends - lengths] == CLOSE)
    for reason, where in faults.items():
        if len(where):
            raise BadInput(f"expression {where[0] + 1} cannot be evaluated: {reason}")


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
    for old, new in REPLACED:
        text = text.replace(old, new)
    try:
        return np.array([_IDS[symbol] for symbol in text.split()], dtype=np.uint8)
    except KeyError as error:
        raise BadInput(f"{shorten(error.args[0])!r} is not a symbol of ListOps") from None


def draw_tree(tokens: np.ndarray) -> str:
    """An expression as a tree: a line for each operation, its value behind it, and its digits beside it."""
    lines: list[str] = []
    above: list[tuple[int, list[str], list[str]]] = []  # operations not yet closed: line, what it shows, expression
    for symbol in (VOCABULARY[token] for token in tokens.tolist()):
        if symbol.startswith("["):
            if above:
                above[-1][1].append("·")
            above.append((len(lines), [symbol[1:]], [symbol]))
            lines.append("")
            continue
        value = symbol
        if symbol == "X":
            line, shown, expression = above.pop()
            value = str(evaluate_reference([*expression, "X"]))
            lines[line] = f"{'  ' * min(len(above), MOST_INDENTED)}{' '.join(shown)}  = {value}"
        elif above:
            above[-1][1].append(value)
        if above:
            above[-1][2].append(value)
    return "\n".join(lines)


def _read_release(source: Source, file: str, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The tokens and labels of a file of the release."""
    tokens: list[np.ndarray] = []
    labels: list[int] = []
    for number, line in enumerate(source.lines(file), start=1):
        expression, _, label = line.removesuffix("\r").partition("\t")
        if number == 1 and label == "Target":
            continue
        place = f"{file} in {source.path}, line {number}"
        if len(label) != 1 or label not in "0123456789":
            raise BadInput(f"{place}: the label must be a digit, got {shorten(label)!r}")
        if len(labels) == size:
            raise BadInput(f"{place} is one more than the {size:,} expressions that sizes ask for")
        try:
            tokens.append(tokenize(expression))
        except BadInput as error:
            raise BadInput(f"{place}: {error}") from None
        labels.append(int(label))
    if len(labels) != size:
        raise BadInput(f"{file} in {source.path} has {len(labels):,} expressions, and sizes ask for {size:,}")
    return tokens, np.array(labels, dtype=np.uint8)

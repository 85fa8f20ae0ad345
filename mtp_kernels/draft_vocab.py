"""A draft vocabulary: the tokens that a draft head scores, the most frequent ones of a text.

A head that scores M tokens reads M of the V rows of its weight. Verification is of the whole
vocabulary, so what is generated stays the same; a token outside is only never drafted.

The file is text: one token id per line, most frequent first, so that its first M ids are the
pruning to M. Lines that begin with `#` are comments. `mtp-kernels draft-vocab` makes one.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

# Characters that are read, and tokenized, at a time.
CHUNK = 1 << 16

# Where tokenizers begin a new token, best first: line breaks and the blanks after them make tokens
# of their own ("\n\n", "\n    "), so a line that begins with a blank stays with the one before.
_BOUNDARIES = (re.compile(r"\n(?=\S)"), re.compile(r"\S(?= \S)"))

_ID = re.compile(r"-?[0-9]{1,19}")


def read(path: str | Path, vocab_size: int, size: int | None = None) -> list[int]:
    """The token ids of a draft vocabulary file, most frequent first.

    vocab_size: ids are in [0, vocab_size).
    size: how many, from the first on. None: all.

    Raises:
        ValueError: a line is no id, or outside of the vocabulary, or there twice; or there are
            no ids, or fewer than size. Names the file, and the line. All lines are looked at.
        OSError: the file cannot be read.
    """
    line_of: dict[int, int] = {}
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            at = f"{path}, line {number}"
            if not _ID.fullmatch(text):
                raise ValueError(f"{at}: expected a token id, got {text[:40]!r}")
            token = int(text)
            if not 0 <= token < vocab_size:
                raise ValueError(f"{at}: expected a token id in [0, {vocab_size}), got {token}")
            if token in line_of:
                raise ValueError(f"{at}: token id {token} is already in line {line_of[token]}")
            line_of[token] = number
    if not line_of:
        raise ValueError(f"{path}: expected token ids, got none")
    if size is not None and not 1 <= size <= len(line_of):
        raise ValueError(f"{path}: expected a size in [1, {len(line_of)}], got {size}")
    return list(line_of)[:size]


def write(path: str | Path, ids: Iterable[int], comment: str = "") -> None:
    """Write a draft vocabulary file, `ids` in their order after the lines of the comment."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += map(str, ids)
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def most_frequent(ids: Iterable[int]) -> list[tuple[int, int]]:
    """(id, count) of all ids, the most frequent first, the lowest id of equals."""
    counts = Counter(ids)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def chunks(file: TextIO, size: int) -> Iterator[str]:
    """The text in parts of about `size` characters, cut where a new token begins.

    Where there is no such place, in a word longer than that, it is cut anywhere.
    """
    rest = ""
    while block := file.read(size):
        rest += block
        ends = (max((m.end() for m in b.finditer(rest)), default=0) for b in _BOUNDARIES)
        end = next(filter(None, ends), len(rest) if len(rest) >= size else 0)
        if end:
            yield rest[:end]
        rest = rest[end:]
    if rest:
        yield rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Count the tokens of text files and write their ids, most frequent first. Before them come "
        "the ids that end a text, those of --always, and the tokenizer's other special ids, so "
        "that they are in every pruning."
    )
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="UTF-8 text files")
    parser.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="checkpoint folder, or model name"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="to be written")
    parser.add_argument(
        "--size", type=int, metavar="M", help="how many ids (default: all that occur)"
    )
    parser.add_argument(
        "--always", type=int, action="append", default=[], metavar="ID",
        help="an id that is in whatever its count; may be given again",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: argparse.Namespace) -> int:
    """Make the file; returns the exit code: 1 when there is none."""
    try:
        _make(args)
    except (ValueError, OSError) as error:
        print(f"draft-vocab: {error}", file=sys.stderr)
        return 1
    return 0


def _make(args: argparse.Namespace) -> None:
    # What can be known at once is not said after an hour of counting.
    for path in args.texts:
        if not path.is_file():
            raise ValueError(f"{path} not found")
    if args.output.is_dir() or args.output.resolve() in [path.resolve() for path in args.texts]:
        raise ValueError(f"{args.output} is a folder or one of the texts, not a file to write")
    if args.output.exists() and not args.force:
        raise ValueError(f"{args.output} exists; --force overwrites it")
    if not args.output.resolve().parent.is_dir():
        raise ValueError(f"{args.output.parent} is no folder")
    if args.size is not None and args.size < 1:
        raise ValueError(f"--size expected a number >= 1, got {args.size}")
    tokenizer = _load_tokenizer(args.tokenizer)
    first = _always(tokenizer, args.tokenizer, args.always)
    if args.size is not None and args.size < len(first):
        raise ValueError(
            f"--size expected a number >= {len(first)}, the ids that are always in, got {args.size}"
        )

    tokenized = (_tokenized(path, tokenizer) for path in args.texts)
    counts = dict(most_frequent(token for parts in tokenized for ids in parts for token in ids))
    total = sum(counts.values())
    if total == 0:
        raise ValueError("the text files are empty: nothing counted")
    ids = list(dict.fromkeys([*first, *counts]))
    if args.size is not None and args.size > len(ids):
        raise ValueError(
            f"--size expected a number <= {len(ids)}, the distinct ids of the text and those "
            f"always in, got {args.size}; FILE is not written"
        )
    ids = ids[: args.size]

    def share(size: int) -> str:
        return f"{sum(counts.get(token, 0) for token in ids[:size]) / total:.2%}"

    write(
        args.output,
        ids,
        f"Draft vocabulary: token ids, {len(first)} that are always in, then most frequent first.\n"
        f"Counted: {total} tokens, {len(counts)} distinct, of {_names(args.texts)}\n"
        f"Covered: {share(len(ids))} of the tokens by {len(ids)} ids",
    )
    print(f"{total} tokens counted, {len(counts)} distinct ids")
    powers = [1 << i for i in range(len(ids).bit_length()) if len(first) <= 1 << i < len(ids)]
    for size in (*powers[-6:], len(ids)):
        print(f"  {size:>7} ids cover {share(size):>7} of the tokens")
    print(f"{len(ids)} ids written to {args.output}")


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(" ".join(path.name.split()) for path in paths)


def _load_tokenizer(model: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"transformers is needed and cannot be imported: {error}") from error
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # of a dozen types, by what the checkpoint lacks
        raise ValueError(
            f"no tokenizer could be loaded from {model}: {type(error).__name__}: {error}"
        ) from error


def _always(tokenizer: Any, model: str, asked: Sequence[int]) -> list[int]:
    """Ids that are in whatever their counts: those that end a text, `asked`, the special ones."""
    from transformers import GenerationConfig

    vocab_size = 1 + max(tokenizer.get_vocab().values())
    for token in asked:
        if not 0 <= token < vocab_size:
            raise ValueError(f"--always expected ids in [0, {vocab_size}), got {token}")
    try:  # chat models end a turn with a token that their tokenizer may not call eos
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except (OSError, ValueError):
        ends = None
    ends = ends if isinstance(ends, list) else [ends]
    ids = dict.fromkeys([tokenizer.eos_token_id, *ends, *asked, *sorted(tokenizer.all_special_ids)])
    return [token for token in ids if token is not None and 0 <= token < vocab_size]


def _tokenized(path: Path, tokenizer: Any) -> Iterator[list[int]]:
    """The ids of a text file, part by part."""
    # newline="": line breaks reach the tokenizer as they are.
    with path.open(encoding="utf-8", newline="") as file:
        try:
            for chunk in chunks(file, CHUNK):
                # verbose: not warned that a part is longer than the model's context
                yield tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error

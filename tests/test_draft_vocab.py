"""The draft vocabulary's file, and the command that makes one with the tiny checkpoint."""

import builtins
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from mtp_kernels import cli, draft_vocab

CHECKPOINT = Path(__file__).parent.parent / "examples" / "tiny_mimo_v2" / "checkpoint"
BOS, EOS, PAD = 256, 257, 258  # of the checkpoint, whose other tokens are the 256 bytes


# ---- The file -----------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    draft_vocab.write(path, [7, 0, 319, 3], "of two\n\nlines")
    assert path.read_text() == "# of two\n#\n# lines\n7\n0\n319\n3\n"
    assert draft_vocab.read(path, 320) == [7, 0, 319, 3]
    assert draft_vocab.read(str(path), 320, size=4) == [7, 0, 319, 3]
    assert draft_vocab.read(path, 320, size=2) == [7, 0]
    path.write_bytes(b"\xef\xbb\xbf 5 \r\n\r\n#1\r\n  # 2\r\n1")  # as another editor leaves it
    assert draft_vocab.read(path, 6) == [5, 1]


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        (b"1\nx\n", None, ", line 2: expected a token id, got 'x'"),
        (b"1 2\n", None, ", line 1: expected a token id, got '1 2'"),
        (b"1.0\n", None, ", line 1: expected a token id, got '1.0'"),
        (b"1_0\n", None, ", line 1: expected a token id, got '1_0'"),
        (b"\xff\n", None, ", line 1: expected a token id, got '\ufffd'"),
        (b"9" * 5000, None, f", line 1: expected a token id, got '{'9' * 40}'"),
        (b"# a\n9\n10\n", None, ", line 3: expected a token id in [0, 10), got 10"),
        (b"-1\n", None, ", line 1: expected a token id in [0, 10), got -1"),
        (b"3\n# a\n4\n3\n", None, ", line 4: token id 3 is already in line 1"),
        (b"3\n03\n", None, ", line 2: token id 3 is already in line 1"),
        (b"3\nx\n", 1, ", line 2: expected a token id, got 'x'"),  # what is not used is looked at
        (b"", None, ": expected token ids, got none"),
        (b"# a\n\n", 3, ": expected token ids, got none"),
        (b"1\n2\n", 3, ": expected a size in [1, 2], got 3"),
        (b"1\n2\n", 0, ": expected a size in [1, 2], got 0"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, text: bytes, size: int | None, message: str
) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(text)
    with pytest.raises(ValueError) as error:
        draft_vocab.read(path, 10, size)
    assert str(error.value) == f"{path}{message}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        draft_vocab.read(tmp_path / "missing.txt", 10)


def test_the_lowest_id_of_equal_counts_is_first() -> None:
    assert draft_vocab.most_frequent(iter([9, 4, 7, 4, 9, 1])) == [(4, 2), (9, 2), (1, 1), (7, 1)]
    assert draft_vocab.most_frequent([]) == []


# ---- Parts of a text ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_parts_make_up_the_text_and_are_small(size: int) -> None:
    texts = ["", "word", "x" * 50, "a b  c\n\n  d\ne f\r\n\r\ng" * 9, "\n" * 30, " a" * 40]
    for text in texts:
        parts = list(draft_vocab.chunks(io.StringIO(text, newline=""), size))
        assert "".join(parts) == text
        assert all(0 < len(part) <= 3 * size for part in parts)


def test_parts_begin_where_a_token_does() -> None:
    """Not between line breaks, nor before the blanks that indent a line."""
    text = "if a:\n    b = 1\n\n\nc = 2\n\n    d e f\n" * 30
    parts = list(draft_vocab.chunks(io.StringIO(text), 64))
    assert len(parts) > 10
    for part in parts[:-1]:
        assert part.endswith("\n")
    for part in parts[1:]:
        assert not part[0].isspace()
    words = list(draft_vocab.chunks(io.StringIO("some words " * 100), 64))
    assert len(words) > 10
    for part in words[1:]:
        assert part[0] == " " and part[1] != " "


def test_parts_have_the_tokens_of_the_whole() -> None:
    """With the splitting rule of Qwen and MiMo; line by line, "\\n\\n" would be two tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    pre, train = tokenizers.pre_tokenizers, tokenizers.trainers.BpeTrainer
    rule = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre.Sequence(
        [
            pre.Split(tokenizers.Regex(rule), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    text = Path(draft_vocab.__file__).read_text() + Path(__file__).read_text()
    tokenizer.train_from_iterator([text], train(vocab_size=900, show_progress=False))

    def ids(parts: Iterable[str]) -> list[int]:
        return [token for part in parts for token in tokenizer.encode(part).ids]

    parts = list(draft_vocab.chunks(io.StringIO(text), 2048))
    assert len(parts) > 5
    assert ids(parts) == ids([text])
    assert ids(text.splitlines(keepends=True)) != ids([text])


# ---- The command --------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command in an empty folder; returns (exit code, ids of the file or None)."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def make(*arguments: str, tokenizer: Path = CHECKPOINT) -> tuple[int, list[int] | None]:
        command = ["draft-vocab", "--tokenizer", str(tokenizer), "--output", "out.txt"]
        code = cli.main([*command, *arguments])
        out = Path("out.txt")
        return code, draft_vocab.read(out, 320) if out.exists() else None

    return make


def test_counts_are_those_of_the_text(made, capsys, monkeypatch) -> None:
    monkeypatch.setattr(draft_vocab, "CHUNK", 16)
    first, second = "abba\r\n\n\n" * 40, "a\u00e9 \U0001f600 b"
    Path("first.txt").write_bytes(first.encode())
    Path("second, odd\nname.txt").write_bytes(second.encode())
    code, ids = made("first.txt", "second, odd\nname.txt")
    counts = Counter((first + second).encode())  # of a tokenizer whose tokens are bytes
    assert code == 0
    ranked = sorted(counts, key=lambda byte: (-counts[byte], byte))
    assert ids == [EOS, BOS, PAD, *ranked]
    total = len((first + second).encode())
    comments = [line for line in Path("out.txt").read_text().splitlines() if line.startswith("#")]
    assert comments == [
        "# Draft vocabulary: token ids, 3 that are always in, then most frequent first.",
        f"# Counted: {total} tokens, {len(counts)} distinct, of first.txt, second, odd name.txt",
        f"# Covered: 100.00% of the tokens by {len(ids)} ids",
    ]
    printed = capsys.readouterr().out
    assert f"{total} tokens counted, {len(counts)} distinct ids" in printed
    four = sum(sorted(counts.values())[-1:]) / total  # three are in for other reasons
    assert f"4 ids cover  {four:.2%}" in printed
    assert f"{len(ids)} ids cover 100.00%" in printed


def test_the_first_ids_are_the_smaller_pruning(made) -> None:
    Path("a.txt").write_text("aaabbc<|bos|><|bos|>" * 3)
    _, whole = made("a.txt")
    assert whole == [EOS, BOS, PAD, *b"abc"]
    _, ids = made("a.txt", "--size", "5", "--force")
    assert ids == whole[:5] == draft_vocab.read("out.txt", 320, 5)
    text = Path("out.txt").read_text()
    assert f"Covered: {7 / 8:.2%} of the tokens by 5 ids" in text  # the bos of the text too


def test_ids_that_are_always_in_follow_the_end(made) -> None:
    Path("a.txt").write_text("aab")
    code, ids = made(
        "--always", "98", "--always", "10", "--always", str(EOS), "--size", "6", "a.txt"
    )
    assert (code, ids) == (0, [EOS, 98, 10, BOS, PAD, 97])


def test_ends_of_the_generation_config_are_in(made, tmp_path: Path) -> None:
    """Chat models end a turn with a token that their tokenizer may not call eos."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((CHECKPOINT / name).read_bytes())
    Path("a.txt").write_text("aab")
    assert made("a.txt", tokenizer=model)[1] == [EOS, BOS, PAD, *b"ab"]  # there is no such file
    (model / "generation_config.json").write_text('{"eos_token_id": [98, 257, 300]}')
    assert made("a.txt", "--force", tokenizer=model)[1] == [EOS, 98, BOS, PAD, 97]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt not found"),
        (["a.txt", "."], ". not found"),
        (["empty.txt", "empty.txt"], "the text files are empty: nothing counted"),
        (["latin.txt"], "latin.txt is not UTF-8: 'utf-8' codec can't decode byte 0xe9"),
        (["a.txt", "--size", "6"], "--size expected a number <= 5, the distinct ids of the text"),
        (["a.txt", "--size", "2"], "--size expected a number >= 3, the ids that are always in"),
        (["a.txt", "--size", "0"], "--size expected a number >= 1, got 0"),
        (["a.txt", "--always", "259"], "--always expected ids in [0, 259), got 259"),
        (["a.txt", "--force", "--output", "a.txt"], "a.txt is a folder or one of the texts"),
        (["a.txt", "--force", "--output", "."], ". is a folder or one of the texts"),
        (["a.txt", "--always", "-1"], "--always expected ids in [0, 259), got -1"),
        (["a.txt", "--output", "no/out.txt"], "no is no folder"),
        (["a.txt", "--tokenizer", "."], "no tokenizer could be loaded from .: "),
    ],
)
def test_nothing_is_written_when(made, capsys, arguments: list[str], message: str) -> None:
    Path("a.txt").write_text("aab")
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("\u00e9".encode("latin-1"))
    assert made(*arguments) == (1, None)
    captured = capsys.readouterr()
    assert captured.err.startswith(f"draft-vocab: {message}") and not captured.out


def test_a_file_is_overwritten_by_force_only(made, capsys) -> None:
    Path("a.txt").write_text("aab")
    Path("out.txt").write_text("7\n")
    assert made("a.txt") == (1, [7])
    assert capsys.readouterr().err == "draft-vocab: out.txt exists; --force overwrites it\n"
    assert made("a.txt", "--force") == (0, [EOS, BOS, PAD, *b"ab"])


def test_without_transformers_it_says_so(made, capsys, monkeypatch) -> None:
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    Path("a.txt").write_text("aab")
    assert made("a.txt") == (1, None)
    assert "transformers is needed and cannot be imported" in capsys.readouterr().err

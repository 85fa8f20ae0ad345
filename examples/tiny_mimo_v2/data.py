"""Makes the two kinds of text the tiny checkpoint is trained on.

Arithmetic word problems come from templates. A problem's *content* is its kind and numbers; the
content's checksum says whether it is held out, so no held-out combination of numbers is ever
trained on, whatever the names in it. Python text is the running interpreter's own standard
library (top-level modules); a module's name says whether it is held out.

    python data.py        # rewrites heldout_arithmetic.jsonl and heldout_python.jsonl
"""

import json
import random
import re
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

BOS, EOS, PAD = 256, 257, 258  # ids below 256 are the bytes themselves
MAX_BYTES = 250  # a whole problem with its BOS and EOS fits one training row
HELDOUT_ONE_IN = 8
# Loss weights. Names and numbers of a question cannot be predicted: they would drown the rest.
# Results are the few bytes that take calculating.
QUESTION_WEIGHT = 0.1
RESULT_WEIGHT = 3.0
HERE = Path(__file__).resolve().parent

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jana Karl Lea Mia Nils Olga Pia Rosa Sam Tom Uma"
ITEMS = "apples books cards coins eggs keys lamps maps nuts pens plums rings shells stamps tiles"
BOXES = "bags boxes crates jars packs trays"


@dataclass(frozen=True)
class Problem:
    """prompt ends with "A:"; text is prompt plus the reference working and answer."""

    prompt: str
    answer: int
    text: str


class _Draw:
    """The random choices of one problem; remembers its numbers, which are its content."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers: list[int] = []
        self.a, self.b = rng.sample(NAMES.split(), 2)
        self.item = rng.choice(ITEMS.split())
        self.box = rng.choice(BOXES.split())

    def n(self, low: int, high: int) -> int:
        value = self.rng.randint(low, high)
        self.numbers.append(value)
        return value

    def say(self, *phrasings: str) -> str:
        return self.rng.choice(phrasings)


# Each kind returns question, working (steps shown), answer.
Kind = Callable[[_Draw], tuple[str, str, int]]


def _buy_and_give(d: _Draw) -> tuple[str, str, int]:
    start, boxes, each = d.n(10, 50), d.n(2, 9), d.n(2, 9)
    bought = boxes * each
    total = start + bought
    given = d.n(2, min(total - 1, 40))
    left = total - given
    question = (
        d.say(f"{d.a} has {start} {d.item}", f"{d.a} starts with {start} {d.item}")
        + d.say(" and buys", " and gets", ", then buys")
        + f" {boxes} {d.box} of {each}. "
        + d.say(f"{d.a} gives {given} to {d.b}. ", f"{d.b} takes {given} of them. ")
        + d.say(f"How many {d.item} are left?", f"How many {d.item} does {d.a} have now?")
    )
    working = (
        f"The {d.box} hold {boxes} * {each} = {bought} {d.item}. "
        f"Now {d.a} has {start} + {bought} = {total}. "
        f"After {given} are gone, {total} - {given} = {left}."
    )
    return question, working, left


def _more_than(d: _Draw) -> tuple[str, str, int]:
    first, more = d.n(11, 49), d.n(3, 30)
    second = first + more
    total = first + second
    question = (
        d.say(f"{d.a} found {first} {d.item}. ", f"{d.a} owns {first} {d.item}. ")
        + d.say(f"{d.b} has {more} more than {d.a}. ", f"{d.b} has {more} more. ")
        + d.say("How many do they have together?", f"How many {d.item} are there in all?")
    )
    working = (
        f"{d.b} has {first} + {more} = {second} {d.item}. Together {first} + {second} = {total}."
    )
    return question, working, total


def _change(d: _Draw) -> tuple[str, str, int]:
    price, count = d.n(2, 9), d.n(2, 6)
    cost = price * count
    note = cost + d.n(1, 40)
    question = d.say(
        f"{d.a} buys {count} {d.item} at {price} dollars each",
        f"{d.item.capitalize()} cost {price} dollars each and {d.a} takes {count}",
    )
    question += d.say(f". {d.a} pays with {note} dollars. ", f", paying with {note} dollars. ")
    question += d.say("How much change is due?", f"What change does {d.a} get?")
    working = f"The {d.item} cost {count} * {price} = {cost}. The change is {note} - {cost}"
    return question, f"{working} = {note - cost}.", note - cost


def _share(d: _Draw) -> tuple[str, str, int]:
    people, each, extra = d.n(2, 9), d.n(3, 12), d.n(2, 30)
    total = people * each
    question = (
        d.say(f"{d.a} splits {total} {d.item}", f"{total} {d.item} are split")
        + d.say(f" evenly among {people} friends. ", f" among {people} friends. ")
        + d.say(f"{d.b}, one of them, already had {extra}. ", f"{d.b} is one and had {extra}. ")
        + d.say(f"How many does {d.b} have now?", f"How many {d.item} does {d.b} hold?")
    )
    working = (
        f"Each friend gets {total} / {people} = {each} {d.item}. "
        f"{d.b} now has {each} + {extra} = {each + extra}."
    )
    return question, working, each + extra


def _seats(d: _Draw) -> tuple[str, str, int]:
    rows, seats = d.n(3, 9), d.n(3, 9)
    total = rows * seats
    taken = d.n(2, total - 1)
    question = (
        d.say(f"A hall has {rows} rows of {seats} seats", f"There are {rows} rows of {seats} seats")
        + d.say(f" and {taken} are taken. ", f". People fill {taken} of them. ")
        + d.say("How many seats are free?", "How many stay empty?")
    )
    working = f"There are {rows} * {seats} = {total} seats. Free are {total} - {taken}"
    return question, f"{working} = {total - taken}.", total - taken


def _trip(d: _Draw) -> tuple[str, str, int]:
    speed, hours, walk = d.n(5, 20), d.n(2, 5), d.n(2, 40)
    ridden = speed * hours
    question = (
        d.say(
            f"{d.a} rides {hours} hours at {speed} km an hour",
            f"{d.a} bikes at {speed} km an hour for {hours} hours",
        )
        + d.say(f", then walks {walk} km. ", f" and walks {walk} km more. ")
        + d.say("How far is that in all?", f"How many km did {d.a} cover?")
    )
    working = f"The ride is {speed} * {hours} = {ridden} km. With the walk {ridden} + {walk}"
    return question, f"{working} = {ridden + walk} km.", ridden + walk


def _fence(d: _Draw) -> tuple[str, str, int]:
    long, wide = d.n(8, 50), d.n(3, 30)
    half = long + wide
    question = (
        d.say("A garden", "A field", f"{d.a}'s yard")
        + d.say(f" is {long} m long and {wide} m wide. ", f" measures {long} m by {wide} m. ")
        + d.say("How long is the fence around it?", "What is the way around it?")
    )
    working = f"Two sides make {long} + {wide} = {half} m. All four make 2 * {half} = {2 * half} m."
    return question, working, 2 * half


KINDS: tuple[Kind, ...] = (_buy_and_give, _more_than, _change, _share, _seats, _trip, _fence)


def make_problem(rng: random.Random, heldout: bool) -> Problem:
    """One problem from the held-out or the training part of the content space."""
    while True:
        kind = rng.randrange(len(KINDS))
        draw = _Draw(rng)
        question, working, answer = KINDS[kind](draw)
        prompt = f"Q: {question}\nA:"
        text = f"{prompt} {working}\nAnswer: {answer}\n"
        content = repr((kind, draw.numbers)).encode()
        if (zlib.crc32(content) % HELDOUT_ONE_IN == 0) == heldout and len(text) <= MAX_BYTES:
            return Problem(prompt, answer, text)


def heldout_problems(count: int, seed: int = 1) -> list[Problem]:
    """`count` distinct held-out problems."""
    rng = random.Random(f"heldout-{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = make_problem(rng, heldout=True)
        found[problem.prompt] = problem
    return list(found.values())


def python_modules(heldout: bool) -> dict[str, bytes]:
    """Module file name -> source bytes, from the running interpreter's standard library."""
    modules = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if (zlib.crc32(path.name.encode()) % HELDOUT_ONE_IN == 0) == heldout:
            modules[path.name] = path.read_bytes()
    return modules


def python_window(rng: random.Random, source: bytes, size: int) -> bytes:
    """Up to `size` bytes of `source`, starting at the beginning of a line."""
    near = rng.randrange(max(1, len(source) - size))
    start = source.rfind(b"\n", 0, near) + 1
    return source[start : start + size]


def heldout_python_prompts(count: int, size: int = 96, seed: int = 1) -> list[dict[str, str]]:
    """Short ASCII pieces of held-out modules: {"module", "prompt"}."""
    rng = random.Random(f"python-{seed}")
    # These prompts are redistributed (see NOTICE): none from modules with a notice of their own.
    modules = {
        name: source
        for name, source in python_modules(heldout=True).items()
        if b"copyright" not in source.lower()
    }
    prompts: list[dict[str, str]] = []
    while len(prompts) < count:
        name = rng.choice(list(modules))
        window = python_window(rng, modules[name], size)
        # Tests and tools read the prompts as text, so one byte must stay one character.
        if len(window) == size and window.isascii() and window.strip():
            prompts.append({"module": name, "prompt": window.decode()})
    return prompts


class Rows:
    """Endless training rows of one fixed length.

    A row is whole documents of one kind, the last one cut, so that the model also sees what
    follows an EOS. Kinds: a problem; a drill, the bare equations of other training problems (a
    problem alone has two or three, too few to learn to calculate from); Python text. Some
    documents come without BOS: clients may not send it.
    """

    def __init__(self, seed: int, length: int, drill_share: float, python_share: float) -> None:
        self.rng = random.Random(f"train-{seed}")
        self.length = length
        self.shares = {
            self._problem: 1 - drill_share - python_share,
            self._drill: drill_share,
            self._python: python_share,
        }
        self.modules = list(python_modules(heldout=False).values())
        self.module_weights = [len(m) for m in self.modules]

    def next_row(self) -> tuple[list[int], list[float]]:
        """ids [length] and the loss weight of each id as a target."""
        make = self.rng.choices(list(self.shares), list(self.shares.values()))[0]
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < self.length:
            if self.rng.random() < 0.9:
                ids.append(BOS)
                weights.append(1.0)
            body, body_weights = make()
            ids += [*body, EOS]
            weights += [*body_weights, 1.0]
        return ids[: self.length], weights[: self.length]

    def _problem(self) -> tuple[bytes, list[float]]:
        problem = make_problem(self.rng, heldout=False)
        split = len(problem.prompt)
        weights = [QUESTION_WEIGHT] * split + [1.0] * (len(problem.text) - split)
        for result in re.finditer(r"= \d+", problem.text):
            for i in range(result.start() + 2, result.end()):
                weights[i] = RESULT_WEIGHT
        return problem.text.encode(), weights

    def _drill(self) -> tuple[bytes, list[float]]:
        text, weights = "", []
        while len(text) < self.length:
            working = make_problem(self.rng, heldout=False).text
            for operands, result in re.findall(r"(\d+ [-+*/] \d+ = )(\d+)", working):
                text += f"{operands}{result}. "
                weights += [QUESTION_WEIGHT] * len(operands) + [RESULT_WEIGHT] * len(result)
                weights += [1.0] * 2
        return text.encode(), weights

    def _python(self) -> tuple[bytes, list[float]]:
        source = self.rng.choices(self.modules, self.module_weights)[0]
        window = python_window(self.rng, source, self.length)
        return window, [1.0] * len(window)


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    _write_jsonl(HERE / "heldout_arithmetic.jsonl", [asdict(p) for p in heldout_problems(256)])
    _write_jsonl(HERE / "heldout_python.jsonl", heldout_python_prompts(32))


if __name__ == "__main__":
    main()

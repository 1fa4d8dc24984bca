"""A text of our own, made by a small grammar: for tests and for the study's quickest scale.

Nothing in it means anything, but there is something to learn at every distance: function words follow rules, a verb
agrees in number with its subject across a clause between them, and every paragraph keeps to a few names and nouns,
which its heading begins with. Its style is that of WikiText: headings between `=`, one line a paragraph, blank lines.
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from robust_attention import _checks

_ONSETS = ("b", "br", "d", "f", "g", "gl", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "tr", "v", "z", "sh")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("", "n", "r", "l", "s", "m", "nd", "rt")
_NUM_NOUNS, _NUM_VERBS, _NUM_ADJECTIVES, _NUM_NAMES = 150, 60, 60, 60


class _Lexicon(NamedTuple):
    """Words of each kind, the frequent ones first."""

    nouns: list[str]
    verbs: list[str]
    adjectives: list[str]
    names: list[str]


def paragraphs(number: int, seed: int = 0) -> Iterator[str]:
    """So many lines of text, headings and blank lines among them; equal seeds give equal lines, more only go on.

    The words are the same for every seed.
    """
    _checks.whole("number", number, least=1)
    lexicon, random = _lexicon(), Random(f"text {seed}")
    lines = _articles(lexicon, random)
    for _ in range(number):
        yield next(lines)


def _lexicon() -> _Lexicon:
    random, known = Random("words"), set()

    def word(syllables: int) -> str:
        while True:
            made = "".join(_of(random, _ONSETS) + _of(random, _VOWELS) for _ in range(syllables)) + _of(random, _CODAS)
            if made not in known:
                known.add(made)
                return made

    return _Lexicon(
        [word(2) for _ in range(_NUM_NOUNS)],
        [word(2) for _ in range(_NUM_VERBS)],
        [word(2) + "ic" for _ in range(_NUM_ADJECTIVES)],
        [word(2).capitalize() for _ in range(_NUM_NAMES)],
    )


def _articles(lexicon: _Lexicon, random: Random) -> Iterator[str]:
    while True:
        name, nouns = _of(random, lexicon.names), [_frequent(random, lexicon.nouns) for _ in range(4)]
        yield ""
        yield f" = {name} {nouns[0].capitalize()} = "
        yield ""
        for _ in range(2 + int(3 * random.random())):
            sentences = [_sentence(lexicon, random, name, nouns) for _ in range(2 + int(5 * random.random()))]
            yield f" {' '.join(sentences)} "


def _sentence(lexicon: _Lexicon, random: Random, name: str, nouns: list[str]) -> str:
    plural = random.random() < 0.5
    subject = name if not plural and random.random() < 0.4 else _noun_phrase(lexicon, random, nouns, plural)
    between = ""
    if random.random() < 0.3:
        between = f"that {name} {_verb(lexicon, random, False)}"
    rest = [_verb(lexicon, random, plural), _noun_phrase(lexicon, random, nouns, random.random() < 0.5)]
    if random.random() < 0.4:
        rest += [_of(random, ("in", "with", "under", "near")), _noun_phrase(lexicon, random, nouns, False)]
    words = " ".join(part for part in (subject, between, *rest, ".") if part)
    return words[0].upper() + words[1:]


def _noun_phrase(lexicon: _Lexicon, random: Random, nouns: list[str], plural: bool) -> str:
    noun = _of(random, nouns) if random.random() < 0.7 else _frequent(random, lexicon.nouns)
    adjective = _frequent(random, lexicon.adjectives) if random.random() < 0.3 else ""
    article = _of(random, ("the", "these", "some")) if plural else _of(random, ("the", "the", "every"))
    return " ".join(part for part in (article, adjective, noun + ("es" if plural else "")) if part)


def _verb(lexicon: _Lexicon, random: Random, plural: bool) -> str:
    return _frequent(random, lexicon.verbs) + ("" if plural else "t")


def _frequent(random: Random, words: list[str]) -> str:
    """One of them, early ones more often."""
    return words[int(len(words) * random.random() ** 3)]


def _of(random: Random, words: tuple[str, ...] | list[str]) -> str:
    # Not random.choice: only random() promises the same numbers in every version of Python.
    return words[int(len(words) * random.random())]

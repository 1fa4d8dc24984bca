"""Damaged `.ts` files without end, for the tests of the reader and for longer runs by hand:

python tests/ts_fuzz.py 100000
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator

from robust_attention.data.ts import TSError, TSFile, parse_ts

WAVES = b"""# two dimensions, lengths as they come
@problemName Waves
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true low high
@data
1.25,-2.5,3:0.1,?,0.3:low
4,5e-1:.4,5.:high
-7.25,8,9,+1e3:1,2,3,4:low
"""
GESTURES = b"""%other comments
@problemname Gestures\r
@timestamps false\r
@missing false\r
@univariate true\r
@equallength true\r
@serieslength 3\r
@classlabel true 1.0 2.0 3.0\r
@data\r
0.31745,0.31745,-0.48569:1.0\r
1.0,2.0,3.0:3.0\r
"""
PLAIN = b"@classLabel false\n@dimension 3\n\n@data\n1:2:3\n\n4:5:6"
SEEDS = (WAVES, GESTURES, PLAIN)
WORDS = (
    b"1e999", b"-1e39", b"nan", b"inf", b"-Infinity", b"?", b":", b",", b",,", b"::", b"@data", b"@classLabel true a",
    b"@dimensions 0", b"@dimensions 99999999999", b"@seriesLength 2", b"@missing false", b"@timeStamps true", b"\r",
    b"\n", b"\r\n", b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x0b", b"\xd9\xa1", b"1_0", b"0x1",
    b"1 2", b"#", b"%", b" ", b"\t", b"(0,1)", b"low", b"true", b"false", b"9" * 400, b"1e-999", b"--1", b"e", b".",
    b"\xc2\xa0", b"@univariate true", b"@equalLength true", b"@problemName",
)  # fmt: skip


def damaged(number: int, seed: int) -> Iterator[bytes]:
    """So many files: mutations of those above, parts of two joined, and random bytes."""
    random_ = random.Random(seed)
    for _ in range(number):
        kind = random_.random()
        if kind < 0.1:
            yield random_.randbytes(random_.randrange(200))
        else:
            data = random_.choice(SEEDS)
            if kind < 0.2:
                other = random_.choice(SEEDS)
                data = data[: random_.randrange(len(data))] + other[random_.randrange(len(other)) :]
            for _ in range(random_.randrange(4)):
                data = mutated(data, random_)
            yield data


def mutated(data: bytes, random_: random.Random) -> bytes:
    start, end = sorted(random_.randrange(len(data) + 1) for _ in range(2))
    near = min(end, start + random_.randrange(6))
    lines = data.split(b"\n")
    line = random_.randrange(len(lines))
    choice = random_.randrange(7)
    if choice == 0:
        return data[:start] + random_.choice(WORDS) + data[start:]
    if choice == 1:
        return data[:start] + random_.choice(WORDS) + data[near:]
    if choice == 2:
        return data[:start] + random_.randbytes(1) + data[start + 1 :]
    if choice == 3:
        return data[:start] + data[near:]
    if choice == 4:
        return data[:start]
    if choice == 5:
        return b"\n".join((*lines[:line], lines[line], *lines[line:]))
    return b"\n".join((*lines[:line], *lines[line + 1 :], lines[line]))


def check(file: TSFile, missing: str) -> None:
    """What holds for every file that is taken."""
    assert file.series
    assert file.labels is None or len(file.labels) == len(file.series)
    assert file.labels is None or all(0 <= label < len(file.classes) for label in file.labels)
    for series in file.series:
        assert series.ndim == 2
        assert series.shape[0] >= 1
        assert series.shape[1] == file.channels
        assert (series.isfinite() | (series.isnan() if missing == "mask" else False)).all()
        assert missing != "mask" or (~series.isnan().any(1)).any()


def fuzz(number: int, seed: int) -> Counter[str]:
    """Read so many; counts those taken, refused, and refused at a place that is not there. All but TSError gets out."""
    found: Counter[str] = Counter()
    for place, data in enumerate(damaged(number, seed)):
        missing = ("fail", "zero", "interpolate", "mask")[place % 4]
        try:
            check(parse_ts(data, missing=missing), missing)  # type: ignore[arg-type]
            found["taken"] += 1
        except TSError as error:
            found["refused"] += 1
            found["nowhere"] += not (error.line or 0) <= len(data.splitlines()) or (error.column or 1) < 1
    return found


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), seed=1))

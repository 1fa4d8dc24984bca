"""The reader of `.ts` files takes what the archive has, and refuses everything else with its place."""

import gzip
import lzma
import pickle
from pathlib import Path

import pytest
import torch
from ts_fuzz import GESTURES, PLAIN, WAVES, damaged, fuzz

from robust_attention.data.ts import TSError, parse_ts, read_ts

HEAD = b"@problemName P\n@timeStamps false\n@missing true\n@univariate false\n@dimensions 2\n@equalLength false\n"
CLASSES = b"@classLabel true a b\n@data\n"


def message(data: bytes, missing: str = "fail") -> str:
    with pytest.raises(TSError) as caught:
        parse_ts(data, path="P.ts", missing=missing)  # type: ignore[arg-type]
    return str(caught.value)


def test_ts_reads_series_classes_and_names() -> None:
    file = parse_ts(WAVES.replace(b"?", b"0.2"))
    assert (file.name, file.classes, file.channels, file.labels) == ("Waves", ("low", "high"), 2, (0, 1, 0))
    assert [len(series) for series in file.series] == [3, 2, 4]
    torch.testing.assert_close(file.series[0], torch.tensor([[1.25, 0.1], [-2.5, 0.2], [3, 0.3]]))
    torch.testing.assert_close(file.series[1], torch.tensor([[4, 0.4], [0.5, 5]]))
    assert all(series.dtype == torch.float32 and series.is_contiguous() for series in file.series)


def test_ts_reads_univariate_unlabelled_and_undeclared_dimensions() -> None:
    file = parse_ts(GESTURES)
    assert (file.channels, file.classes, file.labels) == (1, ("1.0", "2.0", "3.0"), (0, 2))
    plain = parse_ts(PLAIN)
    assert (plain.channels, plain.labels, plain.classes) == (3, None, ())
    assert parse_ts(b"@classLabel true a\n@data\n1:2:a\n3:4:a").channels == 2


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_ts_line_ends_and_a_byte_order_mark_change_nothing(end: bytes) -> None:
    file = parse_ts(b"\xef\xbb\xbf" + WAVES.replace(b"?", b"0.2").replace(b"\n", end))
    assert file.labels == (0, 1, 0)


def test_ts_comments_may_be_in_any_encoding() -> None:
    assert parse_ts(b"# 1\x9631 caf\xe9\n" + WAVES.replace(b"?", b"0")).name == "Waves"


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_ts_packed_files_read_alike(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"W.ts{suffix}"
    path.write_bytes(pack(GESTURES))  # type: ignore[operator]
    assert read_ts(path).labels == (0, 2)
    if suffix:
        path.write_bytes(pack(GESTURES)[:-9])  # type: ignore[operator]
        with pytest.raises(TSError, match=r"W\.ts\.\wz: must be a \.ts file that can be read"):
            read_ts(path)
        packed = pack(GESTURES)  # type: ignore[operator]
        path.write_bytes(packed[:10] + b"\xff" * 20 + packed[30:])
        with pytest.raises(TSError, match=r"must be a \.ts file that can be read"):
            read_ts(path)
        path.write_bytes(b"no such thing")
        with pytest.raises(TSError, match=r"must be a \.ts file that can be read"):
            read_ts(path)


def test_ts_missing_file_fails_clearly(tmp_path: Path) -> None:
    with pytest.raises(TSError, match=r"P\.ts: must be a \.ts file that can be read, got No such file"):
        read_ts(tmp_path / "P.ts")


def test_ts_values_are_exact_to_float32() -> None:
    words = ["0.1", "-3.4028234663852886e38", "1e-45", "+.5", "16777217", "1e-999"]
    file = parse_ts(f"@classLabel false\n@data\n{' , '.join(words)}".encode())
    assert torch.equal(file.series[0][:, 0], torch.tensor([float(word) for word in words], dtype=torch.float32))


def test_ts_missing_values_follow_the_policy() -> None:
    data = HEAD + CLASSES + b"?,1,?,?,4,?:1,2,3,4,?,6:b\n"
    nan = torch.nan
    assert parse_ts(data, missing="zero").series[0].T.tolist() == [[0, 1, 0, 0, 4, 0], [1, 2, 3, 4, 0, 6]]
    between = parse_ts(data, missing="interpolate").series[0]
    torch.testing.assert_close(between.T, torch.tensor([[1.0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 5, 6]]))
    kept = parse_ts(data, missing="mask").series[0]
    torch.testing.assert_close(kept.T, torch.tensor([[nan, 1, nan, nan, 4, nan], [1, 2, 3, 4, nan, 6]]), equal_nan=True)
    assert message(data).startswith('P.ts:9:1: a value is missing ("?")')
    assert message(data.replace(b"@missing true", b"@missing false"), "zero").startswith("P.ts:9:1: no value may")
    assert "must have some value to interpolate from, got none in dimension 2" in message(
        HEAD + CLASSES + b"1,2:?,?:a", "interpolate"
    )
    assert "must have a step without missing values" in message(HEAD + CLASSES + b"1,?:?,2:a", "mask")


def test_ts_interpolation_survives_the_ends_of_float32() -> None:
    file = parse_ts(b"@classLabel false\n@data\n-3e38,?,3e38", missing="interpolate")
    assert file.series[0][:, 0].tolist() == pytest.approx([-3e38, 0, 3e38], abs=1e31)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "P.ts: must have @data and at least one series"),
        (b"# nothing else\n", "P.ts:1: must have @data"),
        (HEAD + CLASSES, "P.ts:8: must have at least one series after @data"),
        (HEAD + CLASSES + b"1:2:", "P.ts:9:5: a series must end in its class, got nothing"),
        (HEAD + CLASSES + b"1:2", "P.ts:9:4: a series must have 2 dimensions and a class, parted by colons, got 2"),
        (HEAD + CLASSES + b"1:2:3:a", "P.ts:9:8: a series must have 2 dimensions"),
        (HEAD + CLASSES + b"1:2:c", "P.ts:9:5: a class must be one of those declared (a, b), got 'c'"),
        (HEAD + CLASSES + b"1,1e999:2,3:a", "P.ts:9:3: a number must fit into float32, up to 3.403e+38, got '1e999'"),
        (HEAD + CLASSES + b"1,2:-1e39,3:a", "P.ts:9:5: a number must fit into float32"),
        (HEAD + CLASSES + b"1, nan:2,3:a", "P.ts:9:4: must be a decimal number"),
        (HEAD + CLASSES + b"1,2:2,-inf:a", "P.ts:9:7: must be a decimal number"),
        (HEAD + CLASSES + b"1,2:2,1_0:a", "P.ts:9:7: must be a decimal number"),
        (HEAD + CLASSES + "1,2:2,١:a".encode(), "P.ts:9:7: must be a decimal number"),
        (HEAD + CLASSES + b"1,2,:2,1,3:a", "P.ts:9:5: a number must stand before and after each comma"),
        (HEAD + CLASSES + b"1,,2:2,1,3:a", "P.ts:9:3: a number must stand before and after each comma"),
        (HEAD + CLASSES + b"1,2:1,2,3:a", "P.ts:9:5: all dimensions of a series must be 2 long, got 3"),
        (HEAD + CLASSES + b"1:2:a\n# late:1:a", "P.ts:10:1: must be a decimal number"),
        (HEAD + CLASSES + b"1:2:a\n@data", "P.ts:10:6: a series must end in a colon and its class"),
        (HEAD + b"@data\n1:2:a", "P.ts:7:1: @classLabel must come before @data"),
        (HEAD + b"@classLabel true\n@data\n", "P.ts:7:17: @classLabel true must list the classes"),
        (HEAD + b"@classLabel true a a\n", "P.ts:7:20: a class must be listed once"),
        (HEAD + b"@classLabel true a:b\n", "P.ts:7:18: a class must have no colon"),
        (HEAD + b"@classLabel false a\n", "P.ts:7:19: no class must follow @classLabel false"),
        (HEAD + b"1:2:a\n" + CLASSES, "P.ts:7:1: must be a comment (#) or a declaration (@) before @data"),
        (HEAD + b"@missing true\n", "P.ts:7:1: @missing must be declared once, got it again after line 3"),
        (HEAD + b"@dimension 2\n", "P.ts:7:1: @dimensions must be declared once, got it again after line 5"),
        (HEAD + b"@size 3\n", "P.ts:7:1: must be one of @problemname, @timestamps"),
        (HEAD + b"@classLabel true a\n@data now\n", "P.ts:8:7: @data must stand alone"),
        (HEAD + b"@classLabel yes a\n", "P.ts:7:13: must be true or false, got 'yes'"),
        (b"@timeStamps true\n", "P.ts:1:13: @timeStamps must be false, got true; time stamps are not read"),
        (b"@timeStamps\n", "P.ts:1:12: must be true or false, got 0 words"),
        (b"@dimensions 0\n", "P.ts:1:13: must be a whole number from 1"),
        (b"@dimensions 12345678901234567890\n", "P.ts:1:13: must be a whole number from 1"),
        (b"@dimensions 2\n@univariate true\n" + CLASSES, "P.ts:4:1: @dimensions must be 1 where @univariate is true"),
        (b"@equalLength true\n" + CLASSES + b"1,2:a\n1:b", "P.ts:5:1: every series must be 2 long"),
        (b"@seriesLength 3\n" + CLASSES + b"1,2:a", "P.ts:4:1: every series must be 3 long"),
        (HEAD + CLASSES + b"1:2\xff:a", "P.ts:9:4: must be UTF-8, got the byte 0xff"),
        (b"@problemName \xc3\xa9\xff", "P.ts:1:15: must be UTF-8"),
    ],
)
def test_ts_damage_fails_clearly(data: bytes, wanted: str) -> None:
    assert message(data).startswith(wanted), message(data)


def test_ts_unequal_lengths_are_taken_where_declared() -> None:
    data = b"@seriesLength 3\n@equalLength false\n" + CLASSES + b"1,2:a\n1:b"
    assert [len(series) for series in parse_ts(data).series] == [2, 1]


def test_ts_file_beyond_the_limit_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robust_attention.data.ts.MOST_BYTES", 1000)
    path = tmp_path / "P.ts.xz"
    path.write_bytes(lzma.compress(b"#" * 10**6))
    with pytest.raises(TSError, match="must hold at most 1000 bytes"):
        read_ts(path)


def test_ts_error_passes_between_processes() -> None:
    error = pickle.loads(pickle.dumps(TSError("P.ts", 3, 4, "no")))
    assert (str(error), error.line, error.column) == ("P.ts:3:4: no", 3, 4)


def test_ts_unknown_policy_fails_clearly() -> None:
    with pytest.raises(ValueError, match="missing must be one of"):
        parse_ts(WAVES, missing="guess")  # type: ignore[arg-type]


def test_ts_fuzzed_files_raise_nothing_but_the_reader_s_own_error() -> None:
    found = fuzz(3000, seed=0)
    assert found["taken"] > 300  # else the damage would hide what lies behind it
    assert found["refused"] > 1500
    assert found["nowhere"] == 0


def test_fuzz_makes_equal_files_from_equal_seeds() -> None:
    assert list(damaged(50, 3)) == list(damaged(50, 3)) != list(damaged(50, 4))

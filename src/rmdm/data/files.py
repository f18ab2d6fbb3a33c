"""Local corpora: which files a path names, how they are cut in parts, and how each kind is read.

Files are read as streams: a compressed file is never unpacked to disk (save Parquet inside a compressor, which needs
random access), and no more than one block and one record are held at a time.
"""

import csv
import glob
import gzip
import hashlib
import json
import lzma
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rmdm.errors import DataError, StoppedError

KINDS = (".txt", ".jsonl", ".csv", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")
BLOCK_BYTES = 1 << 20
"""Text in a block. Resuming counts blocks, so a change of this number calls for a new shard format."""
SPLIT_BYTES = 256 << 20
"""Plain line-by-line files larger than this are cut in several parts."""
JOIN_BYTES = 4 << 20
"""Neighbouring files are joined in one part up to this size, so that a folder of small files has few parts."""
MAX_PARTS = 256
"""Aim of both rules above for very large corpora: each part costs a reader up to two open memory maps."""
Document = Literal["line", "paragraph", "file"]


def kind_of(path: str) -> tuple[str, str] | None:
    """(kind, compression) by the file's name, such as (".jsonl", ".xz"); None when it is no corpus file."""
    stem, compression = path.lower(), ""
    for suffix in COMPRESSIONS:
        if stem.endswith(suffix):
            stem, compression = stem.removesuffix(suffix), suffix
            break
    return next(((kind, compression) for kind in KINDS if stem.endswith(kind)), None)


def corpus_files(path: str) -> list[Path]:
    """The files a path, folder or glob names, in the order they are read."""
    known = f"{' '.join(KINDS)} (and {' '.join(COMPRESSIONS)})"
    place = Path(os.path.expanduser(path))  # as it is, where there is no such user
    if place.is_file():
        if kind_of(place.name) is None:
            raise DataError(f"{path} is no corpus file: its name must end in {known}; rename or convert it")
        return [place]
    if place.is_dir():
        found, how = [p for p in place.rglob("*") if p.is_file() and not p.name.startswith(".")], "the folder holds"
    elif glob.has_magic(path):
        found, how = [Path(p) for p in glob.glob(str(place), recursive=True) if Path(p).is_file()], "the glob matches"
    elif place.exists():
        raise DataError(f"{path} is no regular file (a pipe or a device); write its text to a file and give that")
    else:
        raise DataError(f"{path} does not exist; give a file, a folder or a glob of {known}")
    files = sorted((p for p in found if kind_of(p.name)), key=lambda p: p.as_posix())
    if not files:
        raise DataError(f"no corpus in {path}: {how} no file that ends in {known}")
    return files


def fingerprint_files(files: list[Path]) -> str:
    """Names, sizes and content of the files, blind to where they lie.

    Files up to 16 MiB are hashed whole, larger ones at 256 evenly spaced blocks of 64 KiB: an edit that changes neither
    the size nor any of these blocks goes unseen.
    """
    block, blocks = 1 << 16, 256
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= block * blocks:
                digest.update(file.read())
                continue
            for number in range(blocks):
                file.seek((size - block) * number // (blocks - 1))
                digest.update(file.read(block))
    return digest.hexdigest()


@dataclass(frozen=True)
class TextBlock:
    """Raw records of one stretch of a file: lines, paragraphs or a whole file, not yet decoded."""

    file: str
    kind: str
    document: Document
    column: str
    first_line: int
    raw: bytes
    consumed: int

    def documents(self) -> list[str]:
        """The documents of the block, blank ones left out."""
        if self.kind == ".jsonl":
            return self._jsonl()
        if self.document == "line":
            texts = [self._decode(line, n) for n, line in enumerate(self.raw.split(b"\n"), self.first_line)]
        else:
            texts = [self._decode(self.raw, self.first_line).replace("\r\n", "\n")]
            if self.document == "paragraph":
                texts = _paragraphs(texts[0])
        return [text for text in (text.strip("\r\n") for text in texts) if not text.isspace() and text]

    def _decode(self, raw: bytes, line: int) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(self.file, line + raw[: error.start].count(b"\n"), raw[error.start]) from None

    def _jsonl(self) -> list[str]:
        texts = []
        for number, line in enumerate(self.raw.split(b"\n"), self.first_line):
            if not line or line.isspace():
                continue
            where = f"{self.file}, line {number}"
            try:
                record = json.loads(self._decode(line, number))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where} is not JSON ({error.msg} at column {error.colno}); fix or remove it"
                ) from None
            except (
                ValueError,
                RecursionError,
            ) as error:  # numbers of thousands of digits, nesting of thousands of levels
                raise DataError(f"{where} cannot be read as JSON ({error}); fix or remove it") from None
            if not isinstance(record, dict):
                raise DataError(
                    f"{where} is a JSON {type(record).__name__}, not an object with a field {self.column!r}; fix it"
                )
            if self.column not in record:
                raise no_column(where, self.column, record)
            text = record[self.column]
            if text is None:
                continue
            if not isinstance(text, str):
                raise DataError(
                    f"{where}: column {self.column!r} holds {type(text).__name__}, not text; set data.column"
                )
            if text and not text.isspace():
                texts.append(_without_lone_surrogates(text) if b"\\u" in line else text)
        return texts


@dataclass(frozen=True)
class ListBlock:
    """Documents that were parsed as they were read (CSV, Parquet, Hugging Face)."""

    texts: list[str]
    consumed: int

    def documents(self) -> list[str]:
        """The documents of the block, blank ones left out."""
        return [text for text in self.texts if text and not text.isspace()]


def no_column(where: str, column: str, existing: Any) -> DataError:
    """The error for a record without the configured text column."""
    names = ", ".join(map(str, existing)) or "none"
    return DataError(f"{where} has no column {column!r}; set data.column to one of: {names}")


def _damaged(file: str, error: Exception) -> DataError:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return DataError(f"{file} is truncated or damaged ({reason}); fetch the file again")


def _not_utf8(file: str, line: int, byte: int) -> DataError:
    return DataError(f"{file}, line {line}: byte 0x{byte:02x} is not UTF-8 text; convert the file to UTF-8")


@dataclass(frozen=True)
class FileRange:
    """The lines of a file that begin in [start, stop); stop None is the end of the file."""

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class FilePart:
    """One or several neighbouring files, or a stretch of a large one."""

    ranges: tuple[FileRange, ...]
    column: str
    document: Document
    size: int
    """Bytes on disk."""

    def blocks(self) -> Iterator[TextBlock | ListBlock]:
        """Blocks in order, the same every time."""
        for piece in self.ranges:
            try:
                yield from self._blocks_of(piece)
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                raise _damaged(piece.path, error) from None
            except OSError as error:
                if error.errno is None:  # not the system's: Arrow has some of its own for pages it cannot unpack
                    raise _damaged(piece.path, error) from None
                kind, compression = kind_of(piece.path) or ("", "")
                room = " and the room in TMPDIR, where it is unpacked" if kind == ".parquet" and compression else ""
                raise StoppedError(
                    f"{piece.path} cannot be read ({error.strerror}); check the file{room}; "
                    "the same command goes on where it stopped"
                ) from None

    def _blocks_of(self, piece: FileRange) -> Iterator[TextBlock | ListBlock]:
        found = kind_of(piece.path)
        assert found is not None, piece.path
        kind, compression = found
        with open(piece.path, "rb") as file:
            if kind == ".parquet":
                yield from self._parquet(piece.path, file, compression)
            elif kind == ".csv":
                yield from self._csv(piece.path, file, compression)
            elif kind == ".txt" and self.document == "file":
                raw = b"".join(_chunks(file, compression)).removeprefix(b"\xef\xbb\xbf")
                yield TextBlock(piece.path, kind, "file", self.column, 1, raw, file.tell())
            else:
                yield from self._lines(piece, file, kind, compression)

    def _lines(self, piece: FileRange, file: IO[bytes], kind: str, compression: str) -> Iterator[TextBlock | ListBlock]:
        document: Document = self.document if kind == ".txt" else "line"
        line, position = 1, piece.start
        name = piece.path if piece.start == 0 else f"{piece.path}, from byte {piece.start}"
        for raw in _whole_records(_range_chunks(piece, file, compression), document):
            if line == 1 and piece.start == 0:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            consumed, position = file.tell() - position, file.tell()
            yield TextBlock(name, kind, document, self.column, line, raw, consumed)
            line += raw.count(b"\n")

    def _csv(self, path: str, file: IO[bytes], compression: str) -> Iterator[TextBlock | ListBlock]:
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(_text_lines(path, _chunks(file, compression)), strict=True)
        try:
            header = next(reader, [])
            if self.column not in header:
                if len(header) == 1 and any(sign in header[0] for sign in ";\t|"):
                    raise DataError(f"{path} has one column, {header[0]!r}: only commas separate; save it with commas")
                raise no_column(path, self.column, header)
            column = header.index(self.column)

            def cells() -> Iterator[tuple[list[str], int]]:
                for row in reader:
                    if row and len(row) <= column:
                        raise DataError(
                            f"{path}, line {reader.line_num} has {len(row)} fields, column {self.column!r} is number "
                            f"{column + 1}; fix or remove the line"
                        )
                    yield row[column : column + 1], file.tell()

            yield from list_blocks(cells())
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num} is not CSV ({error}); fix or remove it") from None

    def _parquet(self, path: str, file: IO[bytes], compression: str) -> Iterator[TextBlock | ListBlock]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with tempfile.TemporaryFile() as unpacked:
            if compression:
                for chunk in _chunks(file, compression):
                    unpacked.write(chunk)
                unpacked.seek(0)
            try:
                table = pq.ParquetFile(unpacked if compression else file)
                if self.column not in table.schema_arrow.names:
                    raise no_column(path, self.column, table.schema_arrow.names)
                size, rows = Path(path).stat().st_size, max(1, table.metadata.num_rows)

                def batches() -> Iterator[tuple[list[str], int]]:
                    done = 0
                    for batch in table.iter_batches(batch_size=256, columns=[self.column]):
                        done += len(batch)
                        yield text_list(path, self.column, batch.column(0)), size * done // rows

                yield from list_blocks(batches())
            except pa.ArrowException as error:
                raise _damaged(path, error) from None


def list_blocks(batches: Iterator[tuple[list[str], int]]) -> Iterator[ListBlock]:
    """Join small batches of (texts, source bytes consumed so far) to blocks."""
    texts: list[str] = []
    size = last = position = 0
    for more, position in batches:
        texts += more
        size += sum(map(len, more))
        if size >= BLOCK_BYTES:
            yield ListBlock(texts, position - last)
            texts, size, last = [], 0, position
    if texts:
        yield ListBlock(texts, position - last)


def text_list(where: str, column: str, array: Any) -> list[str]:
    """The strings of an Arrow column; nulls become blank documents."""
    import pyarrow as pa

    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"{where}: column {column!r} holds {kind}, not text; set data.column")
    try:
        return [text or "" for text in array.to_pylist()]
    except UnicodeDecodeError as error:  # Arrow takes a writer's word for it
        raise DataError(f"{where}: column {column!r} holds text that is not UTF-8 ({error}); write it anew") from None


def file_parts(files: list[Path], column: str, document: Document) -> list[FilePart]:
    """Cut files in parts of comparable size, in order; a function of the files alone."""
    sizes = [path.stat().st_size for path in files]
    join, cut = max(JOIN_BYTES, sum(sizes) // MAX_PARTS), max(SPLIT_BYTES, sum(sizes) // MAX_PARTS)
    parts: list[FilePart] = []
    open_ranges: list[FileRange] = []
    open_size = 0

    def close() -> None:
        nonlocal open_size
        if open_ranges:
            parts.append(FilePart(tuple(open_ranges), column, document, open_size))
            open_ranges.clear()
            open_size = 0

    for path, size in zip(files, sizes, strict=True):
        kind, compression = kind_of(path.name) or ("", "")
        by_line = not compression and (kind == ".jsonl" or (kind == ".txt" and document == "line"))
        if by_line and size > cut:
            close()
            count = -(-size // cut)
            edges = [size * i // count for i in range(count)]
            for i, start in enumerate(edges):
                stop = edges[i + 1] if i + 1 < count else None
                length = (stop or size) - start
                parts.append(FilePart((FileRange(str(path), start, stop),), column, document, length))
            continue
        if open_size + size > join:
            close()
        open_ranges.append(FileRange(str(path)))
        open_size += size
    close()
    return parts


def _without_lone_surrogates(text: str) -> str:
    """JSON can escape half a surrogate pair, which no encoding can carry; it becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _chunks(file: IO[bytes], compression: str) -> Iterator[bytes]:
    """The decompressed bytes of a file; an unfinished stream raises EOFError."""
    if compression == ".zst":
        yield from _zst_chunks(file)
        return
    stream: Any = {"": lambda f: f, ".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}[compression]
    reader = stream(fileobj=file) if compression == ".gz" else stream(file)
    while chunk := reader.read(BLOCK_BYTES):
        yield chunk


def _zst_chunks(file: IO[bytes]) -> Iterator[bytes]:
    # The library's own stream reader takes a cut file for a complete one, so the frames are followed by hand.
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, raw, inside = context.decompressobj(), b"", False
    try:
        # Little at a time: all that one read unpacks to is held at once, and a kilobyte may unpack to 32 MB.
        while raw or (raw := file.read(1 << 10)):
            inside = True
            if chunk := frame.decompress(raw):
                yield chunk
            raw = b""
            if frame.eof:
                raw, frame, inside = frame.unused_data, context.decompressobj(), False
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None
    if inside:
        raise EOFError("compressed file ended before the end of its last frame")


def _range_chunks(piece: FileRange, file: IO[bytes], compression: str) -> Iterator[bytes]:
    """The bytes of all lines that begin inside the range (which only plain files are cut in)."""
    if piece.start == 0 and piece.stop is None:
        yield from _chunks(file, compression)
        return
    if piece.start:
        file.seek(piece.start - 1)
        file.readline()
    stop = piece.stop
    while stop is None or file.tell() < stop:
        want = BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - file.tell())
        chunk = file.read(want)
        if not chunk:
            return
        if stop is not None and file.tell() >= stop and not chunk.endswith(b"\n"):
            chunk += file.readline()
        yield chunk


def _whole_records(chunks: Iterator[bytes], document: Document) -> Iterator[bytes]:
    """Join and cut chunks to blocks that end where a record ends; a record longer than a block makes a longer block."""
    mark = b"\n\n" if document == "paragraph" else b"\n"
    kept: list[bytes] = []
    size = 0
    for chunk in chunks:
        chunk = chunk.replace(b"\r\n", b"\n") if document == "paragraph" else chunk
        kept.append(chunk)
        size += len(chunk)
        if size >= BLOCK_BYTES and (cut := chunk.rfind(mark) + 1):
            kept[-1] = chunk[:cut]
            yield b"".join(kept)
            kept, size = [chunk[cut:]], len(chunk) - cut
    if rest := b"".join(kept):
        yield rest


def _paragraphs(text: str) -> list[str]:
    """Runs of lines between blank lines."""
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    return ["\n".join(lines) for lines in paragraphs if lines]


def _text_lines(path: str, chunks: Iterator[bytes]) -> Iterator[str]:
    """Decoded lines with their line ends, for the CSV reader."""
    number = 0
    for raw in _whole_records(chunks, "line"):
        for line in raw.splitlines(keepends=True):
            number += 1
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, line[error.start]) from None

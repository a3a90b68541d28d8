"""Downloads that break, and archives that lie."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longlens.data import sources
from longlens.data.sources import Remote, Source, official
from longlens.data.store import CacheError
from longlens.errors import BadInput

DATA = bytes(range(256)) * 40_000  # ten megabytes
MD5 = "md5:" + hashlib.md5(DATA).hexdigest()
COMMAND = "longlens data prepare some --from DIR"
ENOUGH = 10**6


class Server(ThreadingHTTPServer):
    """Serves DATA at /file; /broken ends after a quarter of it; /old knows no ranges; /other is something else;
    /odd lies about its length."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.requests.append(f"{self.path} {asked or 'all'}")
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nhello\r\n99")
            return
        data = b"x" * 1000 if self.path == "/other" else DATA
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.path != "/old" else 0
        if first >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", "abc" if self.path == "/odd" else str(len(data) - first))
        self.end_headers()
        rest = data[first:]
        self.wfile.write(rest[: len(rest) // 4] if self.path == "/broken" and not first else rest)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def test_a_download_is_kept_and_not_repeated(server, home):
    remote = Remote("data.bin", (server.url("file"),), MD5)
    assert remote.fetch(COMMAND).read_bytes() == DATA
    assert remote.fetch(COMMAND) == home / "downloads" / "data.bin"
    assert server.requests == ["/file all"]


def test_a_broken_download_goes_on_where_it_stopped(server):
    assert Remote("data.bin", (server.url("broken"),), MD5).fetch(COMMAND).read_bytes() == DATA
    assert server.requests == ["/broken all", f"/broken bytes={len(DATA) // 4}-"]


def test_a_download_that_was_killed_goes_on(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(DATA[:12345])
    assert Remote("data.bin", (server.url("file"),), MD5).fetch(COMMAND).read_bytes() == DATA
    assert server.requests == ["/file bytes=12345-"]


def test_a_server_without_ranges_begins_anew(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(b"rubbish")
    assert Remote("data.bin", (server.url("old"),), MD5).fetch(COMMAND).read_bytes() == DATA


def test_a_part_of_something_else_is_not_trusted_twice(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(b"rubbish")
    assert Remote("data.bin", (server.url("file"),), MD5).fetch(COMMAND).read_bytes() == DATA
    assert server.requests == ["/file bytes=7-", "/file all"]


def test_an_answer_that_breaks_off_in_chunks(server):
    assert Remote("data.bin", (server.url("chunks"), server.url("file")), MD5).fetch(COMMAND).read_bytes() == DATA


def test_a_cache_folder_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="cannot write to the cache folder"):
        Remote("data.bin", (server.url("file"),), MD5).fetch(COMMAND)


def test_a_part_that_was_complete_is_used(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(DATA)
    assert Remote("data.bin", (server.url("file"),), MD5).fetch(COMMAND).read_bytes() == DATA


@pytest.mark.parametrize("bad", ["missing", "other"])
def test_the_next_address_is_tried(server, bad):
    assert Remote("data.bin", (server.url(bad), server.url("file")), MD5).fetch(COMMAND).read_bytes() == DATA


@pytest.mark.parametrize("keep", [0, 1000, len(DATA)])
def test_a_damaged_download_is_downloaded_again(server, home, capsys, keep):
    """Cut short, or with a changed bit; later commands do not have to be told."""
    target = home / "downloads" / "data.bin"
    target.parent.mkdir(parents=True)
    target.write_bytes(DATA[:keep] if keep < len(DATA) else b"x" + DATA[1:])
    assert Remote("data.bin", (server.url("file"),), MD5).fetch(COMMAND).read_bytes() == DATA
    assert f"{target} is damaged: downloading it again" in capsys.readouterr().err
    assert sorted(path.name for path in target.parent.iterdir()) == ["data.bin", "data.bin.lock"]


def test_a_damaged_download_without_a_network(home, monkeypatch):
    monkeypatch.setattr(sources, "TRIES", 1)
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin").write_bytes(DATA[:-1])
    with pytest.raises(BadInput, match=r"data.bin cannot be downloaded: run 'longlens data prepare some --from DIR'"):
        Remote("data.bin", ("http://127.0.0.1:9/x",), MD5).fetch(COMMAND)
    assert (home / "downloads" / "data.bin.part").read_bytes() == DATA[:-1]  # the rest will be enough


def test_a_server_that_lies_about_the_length(server):
    assert Remote("data.bin", (server.url("odd"),), MD5).fetch(COMMAND).read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing(server, home):
    with pytest.raises(BadInput, match=r"data.bin cannot be downloaded: .*--from.*checksum is md5:"):
        Remote("data.bin", (server.url("other"),), MD5).fetch(COMMAND)
    assert [path.suffix for path in (home / "downloads").iterdir()] == [".lock"]


def test_no_network(monkeypatch):
    monkeypatch.setattr(sources, "TRIES", 1)
    advice = "run 'longlens data prepare some --from DIR', where DIR is a folder that has it, or try again"
    with pytest.raises(BadInput, match=rf"cannot be downloaded: {advice}; it is at http://127.0.0.1:9/x \(.*refused"):
        Remote("data.bin", ("http://127.0.0.1:9/x",), MD5).fetch(COMMAND)


def tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zipped(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


MEMBERS = {"set/a.txt": b"first", "set/b.txt": b"second", "set/c.bin": b"third"}


def test_folders_and_archives_read_alike(tmp_path):
    for name, data in MEMBERS.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(data)
    for path in (tmp_path / "folder", tar(tmp_path / "x.tar.gz", MEMBERS), zipped(tmp_path / "x.zip", MEMBERS)):
        found = Source(path, "the attic").files(r"set/\w\.txt", limit=6)
        assert dict(found) == {"set/a.txt": b"first", "set/b.txt": b"second"}
        assert Source(path).read("nothing", "c.bin", limit=ENOUGH) == b"third"
        with pytest.raises(BadInput, match=r"there is no file z or y in .*: it is in the attic"):
            Source(path, "the attic").read("z", "y", limit=ENOUGH)
        with pytest.raises(BadInput, match="there is no file z in"):
            list(Source(path).lines("z"))


@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_come_one_at_a_time(tmp_path, end):
    text = f"first\n\nthïrd \u2028 \r\nlast{end}"
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    (tmp_path / "plain" / "a.txt").write_bytes(text.encode())
    (tmp_path / "packed" / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    paths = (tar(tmp_path / "x.tar.gz", {"a.txt": text.encode()}), zipped(tmp_path / "x.zip", {"a.txt": text.encode()}))
    for path in (tmp_path / "plain", tmp_path / "packed", *paths):
        assert list(Source(path).lines("b.txt", "a.txt")) == ["first", "", "thïrd \u2028 \r", "last"]


def test_lines_that_are_too_long_or_not_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 100)
    (tmp_path / "a.txt").write_bytes(b"short\n" + bytes(1000))
    with pytest.raises(BadInput, match=r"a.txt, line 2 is too long"):
        list(Source(tmp_path).lines("a.txt"))
    (tmp_path / "a.txt").write_bytes(b"short\n\xff\n")
    with pytest.raises(BadInput, match=r"a.txt, line 2 is not UTF-8 text"):
        list(Source(tmp_path).lines("a.txt"))


def test_gz_files_are_unpacked(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"hello"))
    assert Source(tmp_path).read("a", limit=ENOUGH) == b"hello"
    assert Source(tmp_path / "a.gz").read("a", limit=ENOUGH) == b"hello"


def test_a_file_that_unpacks_to_more_than_it_should(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(10**7)))
    with pytest.raises(ValueError, match="more than the 1,000 bytes"):
        Source(tmp_path).read("a", limit=1000)
    for path in (tar(tmp_path / "x.tar.gz", {"a": bytes(2000)}), zipped(tmp_path / "x.zip", {"a": bytes(2000)})):
        with pytest.raises(ValueError, match=r"a in .* has more than the 1,000 bytes"):
            Source(path).read("a", limit=1000)


def test_many_files_that_are_more_than_they_should(tmp_path):
    path = tar(tmp_path / "x.tar.gz", {f"{i}.txt": bytes(1000) for i in range(20)})
    assert len(list(Source(path).files(r".*\.txt", limit=1000, total=20_000))) == 20
    with pytest.raises(BadInput, match=r"x.tar.gz has more than the 19,999 bytes"):
        list(Source(path).files(r".*\.txt", limit=1000, total=19_999))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_small_tar_that_unpacks_to_much(tmp_path, kind):
    """A member, or a header, of 100 MB in 500 kB: no more of it is read than the limit."""
    import tracemalloc

    with tarfile.open(tmp_path / "x.tar.gz", "w:gz", compresslevel=1) as archive:
        info = tarfile.TarInfo("a.txt")
        info.size, info.type = 100_000_000, kind
        archive.fileobj.write(info.tobuf())
        for _ in range(100):
            archive.fileobj.write(bytes(1_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=r"more than the 1,000,000 bytes|a header of 100,000,000 bytes"):
            list(Source(tmp_path / "x.tar.gz").files(".*", limit=1_000_000))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_linked_folders_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_bytes(b"hello")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    assert Source(tmp_path / "here").read("a", limit=ENOUGH) == b"hello"
    (tmp_path / "there" / "back").symlink_to(tmp_path / "here")
    (tmp_path / "there" / "again").symlink_to(tmp_path / "there")
    assert len(list(Source(tmp_path / "here").files(".*", limit=ENOUGH))) == 1  # and no folder twice


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/outside.txt", "set/../../outside.txt", "..\\outside.txt"])
@pytest.mark.parametrize("make", [tar, zipped])
def test_members_that_point_outside(tmp_path, make, name):
    path = make(tmp_path / ("x.zip" if make is zipped else "x.tar.gz"), {name: b"evil", **MEMBERS})
    with pytest.raises(ValueError, match="points outside of the archive"):
        Source(path).read("a.txt", limit=ENOUGH)
    assert not list(tmp_path.parent.glob("**/outside.txt"))


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_archives_cut_short(tmp_path, keep):
    import random

    noise = {f"set/{i}.txt": random.Random(i).randbytes(5000) for i in range(20)}
    for path in (tar(tmp_path / "x.tar.gz", noise), tar(tmp_path / "x.tar", noise, "w")):
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        with pytest.raises(ValueError, match="is damaged or incomplete"):
            list(Source(path).files(".*", limit=ENOUGH))
    path = zipped(tmp_path / "x.zip", noise)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        list(Source(path).files(".*", limit=ENOUGH))
    (tmp_path / "a.gz").write_bytes(gzip.compress(noise["set/0.txt"])[: int(keep * 5000)])
    if keep:
        with pytest.raises(ValueError, match="is damaged or incomplete"):
            Source(tmp_path).read("a", limit=ENOUGH)


def damaged_zip(path, method, at=0.5):
    """A zip with a changed byte in the content of its member."""
    content = b"".join(f"{i * i}\n".encode() for i in range(20_000))
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.txt", content)
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zips_with_damaged_members(tmp_path, method):
    path = damaged_zip(tmp_path / "x.zip", method)
    for use in (lambda: Source(path).read("a.txt", limit=ENOUGH), lambda: list(Source(path).lines("a.txt"))):
        with pytest.raises(BadInput, match=r"a.txt in .*x.zip(, line \d+)? is "):
            use()


def test_a_zip_that_says_another_method_than_it_has(tmp_path):
    path = zipped(tmp_path / "x.zip", {"a.txt": b"hello" * 100})
    data = path.read_bytes()
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99):
        local, central = data.index(b"PK\x03\x04") + 8, data.index(b"PK\x01\x02") + 10
        changed = bytearray(data)
        changed[local : local + 2] = changed[central : central + 2] = method.to_bytes(2, "little")
        path.write_bytes(changed)
        with pytest.raises(BadInput, match=r"x.zip is damaged"):
            Source(path).read("a.txt", limit=ENOUGH)


def test_an_encrypted_zip(tmp_path):
    path = zipped(tmp_path / "x.zip", {"a.txt": b"hello" * 100})
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"x.zip is damaged or incomplete .*password required"):
        Source(path).read("a.txt", limit=ENOUGH)


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["tar", "tar.gz", "tar.xz", "zip"]), changes=st.integers(1, 20))
def test_any_damage_of_an_archive_is_one_sentence(tmp_path_factory, seed, kind, changes):
    import random

    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("damaged")
    members = {f"set/{i}.txt": draw.randbytes(300) for i in range(5)}
    path = folder / f"x.{kind}"
    mode = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}
    zipped(path, members) if kind == "zip" else tar(path, members, mode[kind])
    data = bytearray(path.read_bytes())
    for _ in range(changes):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)
    with suppress(BadInput):
        list(Source(path).files(".*", limit=1000))


def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    for name in ("a.txt", "b.txt"):
        with pytest.raises(BadInput, match=rf"{name} is not a file that can be read"):
            Source(tmp_path).read(name, limit=ENOUGH)
        with pytest.raises(BadInput, match="is not a file"):
            list(Source(tmp_path).lines(name))
        with pytest.raises(BadInput, match="there is no folder or archive"):
            Source(tmp_path / name)


def test_links_in_archives_are_not_followed(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        link = tarfile.TarInfo("set/a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(ValueError, match="there is no file"):
        Source(tmp_path / "x.tar").read("a.txt", limit=ENOUGH)


def test_the_archive_in_a_folder_is_found(tmp_path):
    remote = Remote("x.tar.gz", ("http://there",), "md5:")
    (tmp_path / "below").mkdir()
    path = tar(tmp_path / "below" / "x.tar.gz", MEMBERS)
    assert official(tmp_path, remote, COMMAND).path == path
    assert official(tmp_path / "below", remote, COMMAND).path == path
    assert official(path, remote, COMMAND).path == path


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no folder or archive"):
        Source(tmp_path / "none")

"""Downloads that break, and archives that lie."""

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longlens.tasks import sources
from longlens.tasks.sources import Remote, Source, official
from longlens.tasks.store import CacheError

DATA = bytes(range(256)) * 40_000  # ten megabytes
MD5 = "md5:" + hashlib.md5(DATA).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves DATA at /file; /broken ends after a quarter of it; /old knows no ranges; /other is something else."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

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
        self.send_header("Content-Length", str(len(data) - first))
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
    assert remote.fetch().read_bytes() == DATA
    assert remote.fetch() == home / "downloads" / "data.bin"
    assert server.requests == ["/file all"]


def test_a_broken_download_goes_on_where_it_stopped(server):
    assert Remote("data.bin", (server.url("broken"),), MD5).fetch().read_bytes() == DATA
    assert server.requests == ["/broken all", f"/broken bytes={len(DATA) // 4}-"]


def test_a_download_that_was_killed_goes_on(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(DATA[:12345])
    assert Remote("data.bin", (server.url("file"),), MD5).fetch().read_bytes() == DATA
    assert server.requests == ["/file bytes=12345-"]


def test_a_server_without_ranges_begins_anew(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(b"rubbish")
    assert Remote("data.bin", (server.url("old"),), MD5).fetch().read_bytes() == DATA


def test_a_part_of_something_else_is_not_trusted_twice(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(b"rubbish")
    assert Remote("data.bin", (server.url("file"),), MD5).fetch().read_bytes() == DATA
    assert server.requests == ["/file bytes=7-", "/file all"]


def test_an_answer_that_breaks_off_in_chunks(server):
    assert Remote("data.bin", (server.url("chunks"), server.url("file")), MD5).fetch().read_bytes() == DATA


def test_a_cache_folder_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="cannot write to the cache folder"):
        Remote("data.bin", (server.url("file"),), MD5).fetch()


def test_a_part_that_was_complete_is_used(server, home):
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "data.bin.part").write_bytes(DATA)
    assert Remote("data.bin", (server.url("file"),), MD5).fetch().read_bytes() == DATA


@pytest.mark.parametrize("bad", ["missing", "other"])
def test_the_next_address_is_tried(server, bad):
    assert Remote("data.bin", (server.url(bad), server.url("file")), MD5).fetch().read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing(server, home):
    with pytest.raises(ValueError, match=r"could not download data.bin: .*checksum is md5:.*--from"):
        Remote("data.bin", (server.url("other"),), MD5).fetch()
    assert [path.suffix for path in (home / "downloads").iterdir()] == [".lock"]


def test_no_network(monkeypatch):
    monkeypatch.setattr(sources, "TRIES", 1)
    with pytest.raises(ValueError, match=r"could not download data.bin: http://127.0.0.1:9/x \(.*refused.*--from"):
        Remote("data.bin", ("http://127.0.0.1:9/x",), MD5).fetch()


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
        assert dict(Source(path).files(r"set/\w\.txt")) == {"set/a.txt": b"first", "set/b.txt": b"second"}
        assert Source(path).read("nothing", "c.bin") == b"third"
        with pytest.raises(ValueError, match="there is no file z or y in"):
            Source(path).read("z", "y")


def test_gz_files_are_unpacked(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"hello"))
    assert Source(tmp_path).read("a") == b"hello"
    assert Source(tmp_path / "a.gz").read("a") == b"hello"


def test_a_file_that_unpacks_to_more_than_it_should(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(10**7)))
    with pytest.raises(ValueError, match="more than the 1,000 bytes"):
        Source(tmp_path).read("a", limit=1000)
    for path in (tar(tmp_path / "x.tar.gz", {"a": bytes(2000)}), zipped(tmp_path / "x.zip", {"a": bytes(2000)})):
        with pytest.raises(ValueError, match=r"a in .* has more than the 1,000 bytes"):
            Source(path).read("a", limit=1000)


def test_linked_folders_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_bytes(b"hello")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    assert Source(tmp_path / "here").read("a") == b"hello"
    with Source(tmp_path / "here").open("a") as stream:
        assert stream.read() == b"hello"


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/outside.txt", "set/../../outside.txt", "..\\outside.txt"])
@pytest.mark.parametrize("make", [tar, zipped])
def test_members_that_point_outside(tmp_path, make, name):
    path = make(tmp_path / ("x.zip" if make is zipped else "x.tar.gz"), {name: b"evil", **MEMBERS})
    with pytest.raises(ValueError, match="points outside of the archive"):
        Source(path).read("a.txt")
    assert not list(tmp_path.parent.glob("**/outside.txt"))


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_archives_cut_short(tmp_path, keep):
    import random

    noise = {f"set/{i}.txt": random.Random(i).randbytes(5000) for i in range(20)}
    for path in (tar(tmp_path / "x.tar.gz", noise), tar(tmp_path / "x.tar", noise, "w")):
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        with pytest.raises(ValueError, match="is damaged or incomplete"):
            list(Source(path).files(".*"))
    path = zipped(tmp_path / "x.zip", noise)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        list(Source(path).files(".*"))
    (tmp_path / "a.gz").write_bytes(gzip.compress(noise["set/0.txt"])[: int(keep * 5000)])
    if keep:
        with pytest.raises(ValueError, match="is damaged or incomplete"):
            Source(tmp_path).read("a")


def test_links_in_archives_are_not_followed(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        link = tarfile.TarInfo("set/a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(ValueError, match="there is no file"):
        Source(tmp_path / "x.tar").read("a.txt")


def test_the_archive_in_a_folder_is_found(tmp_path):
    remote = Remote("x.tar.gz", (), "md5:")
    (tmp_path / "below").mkdir()
    path = tar(tmp_path / "below" / "x.tar.gz", MEMBERS)
    assert official(tmp_path, remote).path == path
    assert official(tmp_path / "below", remote).path == path
    assert official(path, remote).path == path


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no folder or archive"):
        Source(tmp_path / "none")

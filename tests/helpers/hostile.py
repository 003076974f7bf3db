"""Files that name other files or places, and what a process opens."""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HOSTILE = {
    "ffconcat": "ffconcat version 1.0\nfile {other}\n",
    "concat of itself": "ffconcat version 1.0\nfile {self}\nfile {self}\n",
    "concat with a FIFO": "ffconcat version 1.0\nfile {fifo}\n",
    "HLS": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{other}\n#EXT-X-ENDLIST\n",
    "HLS with a FIFO": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{fifo}\n#EXT-X-ENDLIST\n",
    "DASH": '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT2S"><Period><AdaptationSet><Representation id="1" bandwidth="1">'
    "<BaseURL>{other}</BaseURL></Representation></AdaptationSet></Period></MPD>\n",
    "SDP": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 50010 RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n",
}


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """The files in a folder that are opened by any process, as the kernel tells them."""
    libc, found = ctypes.CDLL(None, use_errno=True), []
    watch = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(watch, os.fsencode(folder), 0x20)  # IN_OPEN
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError):
                data = os.read(watch, 1 << 16)
                while data:
                    length = int.from_bytes(data[12:16], "little")
                    found.append(str(folder / os.fsdecode(data[16 : 16 + length].rstrip(b"\0"))))
                    data = data[16 + length :]
            time.sleep(0.01)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        os.close(watch)

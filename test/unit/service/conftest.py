"""A service in this process for each test that asks for one, and files to send."""

import pytest
from helpers import picture_frames, tone, write_film, write_sound
from PIL import Image


@pytest.fixture
def service(tmp_path):
    from service_app import opened

    with opened(tmp_path, page=True) as service:
        yield service


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("files")
    samples = (tone(8000, 6.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(folder / "sound.wav", samples, 8000, "pcm_s16le", "stereo", "s16")
    film = picture_frames(57, 64, 96, 1)
    write_film(folder / "film.mp4", film)
    write_film(folder / "heard.mkv", film, sound=tone(48000, 57 / 24))
    write_film(folder / "long.mkv", film, sound=tone(48000, 3.0))
    write_film(folder / "other.mp4", picture_frames(9, 64, 64, 1))
    Image.new("RGB", (64, 64)).save(folder / "picture.png")
    (folder / "text.txt").write_text("a text\n" * 100)
    (folder / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{folder}/sound.wav\n")
    return {path.name: path.read_bytes() for path in folder.iterdir()}

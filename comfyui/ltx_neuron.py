"""A ComfyUI node that generates a video with sound on an ltx-neuron service.

Copy this file into ComfyUI's folder custom_nodes and restart ComfyUI. The node is "LTX-2
(ltx-neuron)" in the category "video". If the service needs a token, set LTX_NEURON_TOKEN in
ComfyUI's environment: ComfyUI saves the node's inputs, also `token`, in its output files.
"""

import contextlib
import io
import json
import os
import time
import urllib.error
import urllib.request
import uuid
import wave

import comfy.model_management
import comfy.utils
import folder_paths
from comfy_api.latest import InputImpl
from PIL import Image

TIMEOUT_SECONDS = 60  # of one request
ATTEMPTS = 3  # if the connection fails
POLL_SECONDS = 0.5  # if the service sends no interval


class LTXNeuronVideo:
    """Posts a job to /v1/videos, waits for it, and downloads the video."""

    CATEGORY = "video"
    DESCRIPTION = (
        "Generates a video with sound on an ltx-neuron service from text, image and sound."
    )
    RETURN_TYPES, RETURN_NAMES = ("VIDEO", "STRING"), ("video", "path")
    FUNCTION = "generate"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {
            "required": {
                "server": ("STRING", {"default": "http://127.0.0.1:8000"}),
                "prompt": ("STRING", {"multiline": True}),
                "width": ("INT", {"default": 768, "min": 32, "max": 16384, "step": 32}),
                "height": ("INT", {"default": 512, "min": 32, "max": 16384, "step": 32}),
                "frames": ("INT", {"default": 121, "min": 1, "max": 100_000, "step": 8}),
                "seed": (
                    "INT",
                    {"default": 10, "min": 0, "max": 2**64 - 1, "control_after_generate": True},
                ),
            },
            "optional": {
                "image": ("IMAGE", {"tooltip": "Condition at frame 0"}),
                "audio": ("AUDIO", {"tooltip": "Sound of the video"}),
                "token": ("STRING", {"default": "", "tooltip": "ComfyUI saves it in its files"}),
            },
        }

    def generate(
        self, server, prompt, width, height, frames, seed, image=None, audio=None, token=""
    ):
        """Returns a VIDEO and its path. Raises RuntimeError with the service's message."""
        service = Service(server, token or os.environ.get("LTX_NEURON_TOKEN"))
        fields = {"prompt": prompt, "size": f"{width}x{height}", "num_frames": frames, "seed": seed}
        files = {}
        if image is not None:
            files["input_reference"] = "image.png", png_of(image)
        if audio is not None:
            files["audio_reference"] = "audio.wav", wav_of(audio)
        progress = comfy.utils.ProgressBar(100)
        video, wait = service.create(fields, files)
        try:
            while video["status"] in ("queued", "in_progress"):
                until = time.monotonic() + wait
                while time.monotonic() < until:
                    comfy.model_management.throw_exception_if_processing_interrupted()
                    time.sleep(0.1)
                video, wait = service.ask(f"/{video['id']}")
                progress.update_absolute(video["progress"])
        except BaseException:  # interrupted in ComfyUI, or no answer: cancel the job
            service.delete(video["id"])
            raise
        if video["status"] != "completed":
            raise RuntimeError(f"{server}: {video['error']['message']}")
        os.makedirs(folder_paths.get_temp_directory(), exist_ok=True)
        path = os.path.join(folder_paths.get_temp_directory(), f"{video['id']}.mp4")
        with open(path, "wb") as file:
            file.write(service.request("GET", f"/{video['id']}/content")[0])
        return InputImpl.VideoFromFile(path), path


class Service:
    """The API of an ltx-neuron service."""

    def __init__(self, server: str, token: str | None):
        if not server.startswith(("http://", "https://")):
            raise RuntimeError(f"server {server!r}: type an address as http://127.0.0.1:8000")
        self.server, self.token = server, token
        self.url = server.rstrip("/").removesuffix("/v1") + "/v1/videos"

    def create(self, fields: dict, files: dict) -> tuple[dict, float]:
        """A new video's object, and the seconds to wait. files: (name, content) by field."""
        boundary = uuid.uuid4().hex
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="'
        parts = [f'{head}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
        for field, (name, content) in files.items():
            parts += [f'{head}{field}"; filename="{name}"\r\n\r\n'.encode(), content, b"\r\n"]
        parts.append(f"--{boundary}--\r\n".encode())
        kind = f"multipart/form-data; boundary={boundary}"
        return self.ask("", method="POST", body=b"".join(parts), kind=kind)

    def ask(self, path: str, method: str = "GET", **more) -> tuple[dict, float]:
        """A video's object, and the seconds until the next poll."""
        content, headers = self.request(method, path, **more)
        wait = headers.get("openai-poll-after-ms")
        return json.loads(content), float(wait) / 1000 if wait else POLL_SECONDS

    def delete(self, id: str) -> None:
        """Cancel a job, if it and the service still exist."""
        with contextlib.suppress(RuntimeError):
            self.request("DELETE", f"/{id}")

    def request(self, method: str, path: str, body=None, kind=None) -> tuple[bytes, dict]:
        """An answer's content and headers."""
        request = urllib.request.Request(self.url + path, body, method=method)
        if kind:
            request.add_header("Content-Type", kind)
            request.add_header("Idempotency-Key", uuid.uuid4().hex)  # sent again: the same job
        if self.token:
            # Unlike other headers it is not sent to the target of a redirect.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        for left in reversed(range(ATTEMPTS)):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                    return answer.read(), answer.headers
            except urllib.error.HTTPError as error:
                try:
                    message = json.loads(error.read())["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    message = str(error)
                raise RuntimeError(f"{self.server}: {message}") from None
            except OSError as error:
                if not left:
                    reason = getattr(error, "reason", error)
                    raise RuntimeError(f"{self.server} does not answer: {reason}") from None
                time.sleep(POLL_SECONDS)
        raise AssertionError


def png_of(image) -> bytes:
    """The first picture of an IMAGE, float (N, H, W, 3) in [0, 1], as PNG."""
    pixels = image[0].clamp(0, 1).mul(255).round().byte().cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def wav_of(audio) -> bytes:
    """The first sound of an AUDIO, float (N, channels, samples) in [-1, 1], as WAV of 16 bits."""
    samples = audio["waveform"][0].clamp(-1, 1).mul(32767).round().short().cpu()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[0])
        writer.setsampwidth(2)
        writer.setframerate(audio["sample_rate"])
        writer.writeframes(samples.T.contiguous().numpy().tobytes())
    return file.getvalue()


NODE_CLASS_MAPPINGS = {"LTXNeuronVideo": LTXNeuronVideo}
NODE_DISPLAY_NAME_MAPPINGS = {"LTXNeuronVideo": "LTX-2 (ltx-neuron)"}

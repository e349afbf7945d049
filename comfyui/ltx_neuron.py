"""A ComfyUI node that generates a video with sound on an ltx-neuron service (LTX-2.3, LTX-2.5).

README.md in this folder says how to install it. It needs ComfyUI, its Pillow, and nothing else.
"""

import base64
import contextlib
import functools
import io
import json
import os
import re
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
from server import PromptServer

SERVER = os.environ.get("LTX_NEURON_SERVER", "http://127.0.0.1:8000")
TIMEOUT_SECONDS = 60  # of one request
ATTEMPTS = 3  # if the connection fails
POLL_SECONDS = 0.5  # if the service sends no interval
# ComfyUI asks for the node's inputs at the start, at R (refresh), and before every run.
LISTED_SECONDS, LISTING_TIMEOUT_SECONDS = 10, 2
PREVIEW_PIXELS = 512
DEFAULT, TYPED = "the service's default", "typed below"
_SIZE = re.compile(r"(\d+x\d+), (\d+) frames, ([\d.]+) fps, (one|two) stages?, (\w+)")


class LTXNeuronVideo:
    """Posts a job to /v1/videos, waits for it, and downloads the video."""

    CATEGORY = "video"
    DESCRIPTION = (
        "Generates a video with sound on an ltx-neuron service (LTX-2.3, LTX-2.5) from text, images"
        " and sound."
    )
    RETURN_TYPES, RETURN_NAMES = ("VIDEO", "STRING", "STRING"), ("video", "path", "notes")
    FUNCTION = "generate"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        sizes, lora_sets = listed(int(time.monotonic() / LISTED_SECONDS))
        compiled = f"The compiled sizes of {SERVER}; press R to list them again"
        typed = {"tooltip": f'For size "{TYPED}"'}
        return {
            "required": {
                "server": ("STRING", {"default": SERVER}),
                "prompt": ("STRING", {"multiline": True}),
                "size": ([DEFAULT, *sizes, TYPED], {"default": DEFAULT, "tooltip": compiled}),
                "seed": (
                    "INT",
                    {"default": 10, "min": 0, "max": 2**64 - 1, "control_after_generate": True},
                ),
            },
            "optional": {
                "image": ("IMAGE", {"tooltip": "First frame"}),
                "last_image": ("IMAGE", {"tooltip": "Last frame; needs graphs made with --image"}),
                "audio": ("AUDIO", {"tooltip": "Sound of the video"}),
                "width": ("INT", {"default": 768, "min": 32, "max": 16384, "step": 32, **typed}),
                "height": ("INT", {"default": 512, "min": 32, "max": 16384, "step": 32, **typed}),
                "frames": ("INT", {"default": 121, "min": 1, "max": 100_000, "step": 8, **typed}),
                "frame_rate": (
                    "FLOAT",
                    {"default": 24.0, "min": 1.0, "max": 120.0, "step": 0.001, **typed},
                ),
                "two_stage": ("BOOLEAN", {"default": False, **typed}),
                "negative_prompt": (
                    "STRING",
                    {"default": "", "tooltip": "What to avoid; needs graphs made with --nag-scale"},
                ),
                "nag_scale": (
                    "FLOAT",
                    {"default": 11.0, "min": 1.0, "tooltip": "Of negative_prompt; 1: dev recipe"},
                ),
                "lora_set": (lora_sets, {"default": "default", "tooltip": "LoRAs of the service"}),
                "token": ("STRING", {"default": "", "tooltip": "ComfyUI saves it in its files"}),
            },
            "hidden": {"node": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, size, lora_set="default"):
        """Leave the choices to the service, which may be another one than the list's."""
        return True

    def generate(self, server, prompt, size=DEFAULT, seed=10, node=None, token="", **inputs):
        """Returns a VIDEO, its path and the service's notes, which the node shows too. Raises
        RuntimeError with the service's message."""
        service = Service(server, token or os.environ.get("LTX_NEURON_TOKEN"))
        fields = {"prompt": prompt, "seed": seed, **size_fields(size, inputs)}
        if text := inputs.get("negative_prompt"):
            scale = inputs.get("nag_scale", 11.0)
            fields |= {"negative_prompt": text} | ({"nag_scale": scale} if scale > 1 else {})
        if inputs.get("lora_set", "default") != "default":
            fields["lora_set"] = inputs["lora_set"]
        files = {}
        if (image := inputs.get("image")) is not None:
            files["input_reference"] = "image.png", png_of(image)
        if (image := inputs.get("last_image")) is not None:
            url = f"data:image/png;base64,{base64.b64encode(png_of(image)).decode()}"
            fields["images"] = json.dumps([{"image_url": url, "frame": -1}])
        if (audio := inputs.get("audio")) is not None:
            files["audio_reference"] = "audio.wav", wav_of(audio)
        video, wait = service.create(fields, files)
        progress = comfy.utils.ProgressBar(100, node_id=node)
        try:
            while video["status"] in ("queued", "in_progress"):
                until = time.monotonic() + wait
                while time.monotonic() < until:
                    comfy.model_management.throw_exception_if_processing_interrupted()
                    time.sleep(0.1)
                video, wait = service.ask(f"/videos/{video['id']}")
                progress.update_absolute(video["progress"], 100, service.preview(video))
        except BaseException:  # interrupted in ComfyUI, or no answer: cancel the job
            service.delete(video["id"])
            raise
        if video["status"] != "completed":
            raise RuntimeError(f"{server}: {video['error']['message']}")
        notes = "\n".join(video.get("notes") or [])
        if notes and node:
            PromptServer.instance.send_progress_text(notes, node)  # on the node
        os.makedirs(folder_paths.get_temp_directory(), exist_ok=True)
        path = os.path.join(folder_paths.get_temp_directory(), f"{video['id']}.mp4")
        with open(path, "wb") as file:
            file.write(service.request("GET", f"/videos/{video['id']}/content")[0])
        return {
            "ui": {"text": [notes] if notes else []},
            "result": (InputImpl.VideoFromFile(path), path, notes),
        }


@functools.lru_cache(1)
def listed(moment: int) -> tuple[list[str], list[str]]:
    """The compiled sizes and the LoRA sets of SERVER, as the node's choices. moment: another one
    asks again."""
    try:
        service = Service(SERVER, os.environ.get("LTX_NEURON_TOKEN"), LISTING_TIMEOUT_SECONDS, 1)
        (model,) = json.loads(service.request("GET", "/models")[0])["data"]
    except (RuntimeError, ValueError, KeyError):  # the run has a message
        return [], ["default"]
    sizes = [
        f"{size['size']}, {size['num_frames']} frames, {size['fps']:g} fps,"
        f" {'two stages' if size['two_stage'] else 'one stage'}, {size['recipe']}"
        for size in model["sizes"]
    ]
    return sizes, [*dict.fromkeys(["default", *model["lora_sets"]])]


def size_fields(size: str, inputs: dict) -> dict:
    """A request's fields for a choice of `size`."""
    if size == DEFAULT:
        return {}
    if match := _SIZE.fullmatch(size):
        pixels, frames, rate, stages, recipe = match.groups()
    else:
        pixels, frames = f"{inputs['width']}x{inputs['height']}", inputs["frames"]
        rate, stages = inputs["frame_rate"], "two" if inputs["two_stage"] else "one"
        recipe = ""  # the service's
    two = str(stages == "two").lower()
    return {"size": pixels, "num_frames": frames, "fps": rate, "two_stage": two, "recipe": recipe}


class Service:
    """The API of an ltx-neuron service."""

    def __init__(self, server, token, timeout=TIMEOUT_SECONDS, attempts=ATTEMPTS):
        if not server.startswith(("http://", "https://")):
            raise RuntimeError(f"server {server!r}: type an address as http://127.0.0.1:8000")
        self.server, self.token = server, token
        self.timeout, self.attempts = timeout, attempts
        self.url = server.rstrip("/").removesuffix("/v1") + "/v1"

    def create(self, fields: dict, files: dict) -> tuple[dict, float]:
        """A new video's object, and the seconds to wait. files: (name, content) by field."""
        boundary = uuid.uuid4().hex
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="'
        parts = [f'{head}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
        for field, (name, content) in files.items():
            parts += [f'{head}{field}"; filename="{name}"\r\n\r\n'.encode(), content, b"\r\n"]
        parts.append(f"--{boundary}--\r\n".encode())
        kind = f"multipart/form-data; boundary={boundary}"
        return self.ask("/videos", method="POST", body=b"".join(parts), kind=kind)

    def ask(self, path: str, method: str = "GET", **more) -> tuple[dict, float]:
        """A video's object, and the seconds until the next poll."""
        content, headers = self.request(method, path, **more)
        wait = headers.get("openai-poll-after-ms")
        return json.loads(content), float(wait) / 1000 if wait else POLL_SECONDS

    def preview(self, video: dict) -> tuple | None:
        """A running video's preview, as ComfyUI's progress bar takes it."""
        if not (video.get("detail") or {}).get("preview"):
            return None
        with contextlib.suppress(RuntimeError, OSError):  # the job may have ended
            content, _ = self.request("GET", f"/videos/{video['id']}/content?variant=preview")
            return "JPEG", Image.open(io.BytesIO(content)), PREVIEW_PIXELS

    def delete(self, id: str) -> None:
        """Cancel a job, if it and the service still exist."""
        with contextlib.suppress(RuntimeError):
            self.request("DELETE", f"/videos/{id}")

    def request(self, method: str, path: str, body=None, kind=None) -> tuple[bytes, dict]:
        """An answer's content and headers."""
        request = urllib.request.Request(self.url + path, body, method=method)
        if kind:
            request.add_header("Content-Type", kind)
            request.add_header("Idempotency-Key", uuid.uuid4().hex)  # sent again: the same job
        if self.token:
            # Unlike other headers it is not sent to the target of a redirect.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        for left in reversed(range(self.attempts)):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
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

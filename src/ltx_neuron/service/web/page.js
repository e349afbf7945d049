// All that the page shows comes from its own server's API, as text, never as HTML.
const BUSY_MS = 700, IDLE_MS = 5000, HIDDEN_MS = 15000, MAX_WAIT_MS = 30000;
const PAGE = 24, MAX_PAGE = 100;
// A select for each, of what is compiled for the choices before it: its value and its text.
const CHOICES = {
  recipe: (s) => [s.recipe, s.recipe],
  size: (s) => [s.size, sizeText(s)],
  duration: (s) => [`${s.num_frames}@${s.fps}`, `${s.seconds} s at ${s.fps} fps`],
  two_stage: (s) => [String(s.two_stage), s.two_stage ? "two, finer" : "one"],
};
const ALWAYS = ["size", "duration"];  // shown with a single choice too
// Files of a job, shown where a size is compiled for them: label, types, numbers that go with one.
const FILES = {
  input_reference: ["First frame", "image/png, image/jpeg, image/webp"],
  audio_reference: ["Sound", "audio/*", "audio_start_time", "audio_bed"],
  video_reference: ["Video to retake or extend", "video/*", "start_time", "end_time", "extend"],
  reference_video: ["Video to dub", "video/*", "reference_strength"],
  reference_audio: ["Voice for the LoRAs", "audio/*", "reference_audio_max_duration"],
  video_conditioning: ["Reference of the LoRAs", "video/*,image/png,image/jpeg,image/webp",
    "stage_2_ic_lora", "tile", "tile_height", "tile_width", "motion_speed"],
};
const CHECKS = ["stage_2_ic_lora", "tile"];  // of those numbers, what is only chosen
const UNITS = {
  extend: "seconds", audio_bed: "dBFS", reference_strength: "0 to 1", motion_speed: "0.025 to 1",
  tile_height: "pixels", tile_width: "pixels",
};
const SIZED = ["size", "duration", "two_stage"];  // what a video to retake says itself
const NUMBERS = /^num_inference_steps$|_(guidance|rescale)_scale$|_skip_step$/;

const $ = (id) => document.getElementById(id);
const form = $("form"), field = form.elements;
const isOpen = (job) => job.status === "queued" || job.status === "in_progress";
const sizeText = (job) => job.size.replace("x", " × ");
const contentOf = (job, variant) => `v1/videos/${job.id}/content?variant=${variant}`;
let model, inputs, jobs = new Map(), chosen = null;
let limit = PAGE, polls = 0, timer = 0, failures = 0;

async function call(path, options) {
  const answer = await fetch(path, options).catch(() => {
    throw new Error("The server does not answer.");
  });
  const content = await answer.json().catch(() => ({}));
  if (answer.ok) return content;
  if (answer.status === 401) showDoor(true);
  const { message = `The server answered ${answer.status}.`, code = "" } = content.error ?? {};
  throw Object.assign(new Error(message), { code, status: answer.status });
}

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function showError(error) {
  $("error").replaceChildren(...(error ? [error.message, " "] : []),
    ...(error?.code ? [make("code", {}, error.code)] : []));
}

function announce(text) {
  if ($("announced").textContent !== text) $("announced").textContent = text;
}

// --- signing in --------------------------------------------------------------------------------

function showDoor(locked) {
  $("door").hidden = !locked;
  $("desk").hidden = locked;
  $("sign-out").hidden ||= locked;
  if (!locked) return;
  $("state").textContent = "";
  $("token").focus();
}

async function signIn(event) {
  event.preventDefault();
  try {
    const headers = { Authorization: `Bearer ${encodeURIComponent($("token").value.trim())}` };
    await call("session", { method: "POST", headers });
    $("token").value = $("door-error").textContent = "";
    await begin();
    field.prompt.focus();
  } catch (error) {
    const unknown = error.status === 401;
    $("door-error").textContent = unknown ? "This token is not known here." : error.message;
  }
}

async function signOut() {
  await call("session", { method: "DELETE" }).catch(() => null);
  location.reload();
}

// --- the form ----------------------------------------------------------------------------------

async function begin() {
  const { owner } = await call("session");
  const [models, api] = await Promise.all([call("v1/models"), call("openapi.json")]);
  model = models.data[0];
  inputs = model.inputs;
  drawFields(api.components.schemas.VideoRequest.properties);
  offer("lora_set", Object.keys(model.lora_sets).map((name) => [name, name]));
  narrow(model.default ?? undefined);
  showDoor(false);
  $("sign-out").hidden = !owner;
  $("sign-out").textContent = `Sign out ${owner}`;
  poll();
}

// The limits of fields are those of the request's schema.
function drawFields(schema) {
  const files = Object.keys(FILES).filter((name) =>
    name in inputs || (name === "video_conditioning" && inputs.tile));
  $("files").replaceChildren(...files.map(fileField));
  const numbers = Object.keys(schema).filter((name) => NUMBERS.test(name));
  $("numbers").replaceChildren(...numbers.map((name) => numberField(name, "default")));
  for (const input of field) {
    const { anyOf = [], ...own } = schema[input.name] ?? {};
    const { maxLength, minimum, maximum, type } = anyOf[0] ?? own;
    if (maxLength) input.maxLength = maxLength;
    if (Math.abs(minimum) < 2 ** 53) input.min = minimum;
    if (Math.abs(maximum) < 2 ** 53) input.max = maximum;
    if (type === "integer") input.step = 1;
  }
  field.seed.value = schema.seed.default;
  const voice = field.reference_audio_max_duration;
  if (voice) voice.value = Math.max(...model.reference_audio_seconds);  // those that are compiled
}

function labelled(name, text, element) {
  return make("div", { className: "field" }, make("label", { htmlFor: name }, text), element);
}

function numberField(name, placeholder) {
  const text = name.replaceAll("_", " ").replace(/^num | scale$/g, "");
  const input = make("input", { id: name, name, ...(CHECKS.includes(name)
    ? { type: "checkbox", value: "true" } : { type: "number", step: "any", placeholder }) });
  if (CHECKS.includes(name)) input.addEventListener("change", () => narrow());
  return labelled(name, text, input);
}

function fileField(name) {
  const [text, accept, ...numbers] = FILES[name];
  const input = make("input", { id: name, name, type: "file", accept });
  const remove = make("button", { type: "button", hidden: true }, "Remove");
  remove.ariaLabel = `Remove: ${text}`;
  const canvas = make("canvas", { height: 0, hidden: true });
  const more = make("fieldset", { className: "fields", hidden: true, disabled: true },
    ...numbers.map((number) => numberField(number, UNITS[number] ?? "second")));
  input.addEventListener("change", async () => {
    const file = input.files[0];
    remove.hidden = !file;
    more.hidden = more.disabled = !file || !numbers.length;
    narrow();
    const seen = file?.type.startsWith("image/");  // as the policy forbids an <img> of a file
    const picture = seen && await createImageBitmap(file).catch(() => null);
    canvas.hidden = !picture;
    if (!picture) return;
    [canvas.height, canvas.width] = [80, 80 * picture.width / picture.height];
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  });
  remove.addEventListener("click", () => {
    input.value = "";
    input.dispatchEvent(new Event("change"));
    input.focus();
  });
  const row = make("div", { className: "row" }, canvas, input, remove);
  return make("div", {}, labelled(name, text, row), more);
}

function offer(name, options, value = field[name].value) {
  const values = [...new Map(options)];
  const select = field[name];
  select.replaceChildren(...values.map(([value, text]) => new Option(text, value)));
  select.selectedIndex = Math.max(0, values.findIndex((option) => option[0] === value));
  select.parentElement.hidden = values.length < 2 && !ALWAYS.includes(name);
}

function narrow(wanted) {
  const files = Object.keys(FILES).filter((name) => field[name]?.files.length)
    .map((name) => name === "video_conditioning" && field.tile.checked ? "tile" : name)
    .filter((name) => name in inputs);
  const fits = (size) => files.every((name) =>
    inputs[name].some((other) => JSON.stringify(other) === JSON.stringify(size)));
  const fitting = (files.length ? inputs[files[0]] : model.sizes).filter(fits);
  let left = fitting.length ? fitting : model.sizes;
  for (const [name, choice] of Object.entries(CHOICES)) {
    offer(name, left.map(choice), wanted && choice(wanted)[0]);
    left = left.filter((size) => choice(size)[0] === field[name].value);
  }
  for (const name of SIZED) field[name].disabled = files.includes("video_reference");
  field.duration.disabled ||= files.includes("reference_video");
  $("guidance").hidden = $("guided").disabled = field.recipe.value !== "dev";
}

async function submit(event) {
  event.preventDefault();
  if (form.ariaBusy === "true") return;
  form.ariaBusy = "true";
  showError(null);
  const body = new FormData(form);
  const [frames = "", fps = ""] = body.get("duration")?.split("@") ?? [];
  body.delete("duration");
  body.set("num_frames", frames);
  body.set("fps", fps);
  for (const [name, value] of [...body]) if ((value.name ?? value) === "") body.delete(name);
  try {
    const job = await call("v1/videos", { method: "POST", body });
    jobs = new Map([[job.id, job], ...jobs]);
    choose(job.id);
  } catch (error) {
    showError(error);
  } finally {
    form.ariaBusy = "false";
  }
}

// --- polling -----------------------------------------------------------------------------------

async function poll() {
  const turn = ++polls;
  clearTimeout(timer);
  try {
    const waits = jobs.get(chosen)?.status === "queued";  // only its own answer has its place
    const [list, queue, own] = await Promise.all([
      call(`v1/videos?limit=${limit}`),
      call("v1/queue"),
      waits ? call(`v1/videos/${chosen}`).catch(() => null) : null,
    ]);
    if (turn !== polls) return;
    failures = 0;
    jobs = new Map(list.data.map((job) => [job.id, job]));
    if (own && jobs.has(own.id)) jobs.set(own.id, own);
    if (!jobs.has(chosen)) chosen = (list.data.find(isOpen) ?? list.data[0])?.id ?? null;
    $("more").hidden = !list.has_more || limit === MAX_PAGE;
    const workers = queue.workers === 1 ? "1 worker" : `${queue.workers} workers`;
    $("state").textContent = queue.workers
      ? `${model.id} · ${queue.waiting} waiting · ${queue.in_progress} running · ${workers}`
      : "No worker is running: new jobs wait.";
    draw();
  } catch (error) {
    if (turn !== polls || error.status === 401) return;
    failures += 1;
    $("state").textContent = error.message;
    announce(error.message);
  }
  const wait = [...jobs.values()].some(isOpen) ? BUSY_MS : IDLE_MS;
  const slower = Math.min(MAX_WAIT_MS, wait * 2 ** failures);
  timer = setTimeout(poll, document.hidden ? Math.max(HIDDEN_MS, slower) : slower);
}

function choose(id) {
  chosen = id;
  draw();
  poll();
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $("screen").scrollIntoView({ block: "nearest", behavior: calm ? "auto" : "smooth" });
}

async function remove() {
  const job = jobs.get(chosen);
  if (!isOpen(job) && !confirm("Delete this video?")) return;
  try {
    await call(`v1/videos/${job.id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return showError(error);
  }
  jobs.delete(job.id);
  chosen = null;
  poll();
}

// --- drawing -----------------------------------------------------------------------------------

function draw() {
  drawGallery();
  const job = jobs.get(chosen), done = job?.status === "completed";
  const running = [...jobs.values()].find((other) => other.status === "in_progress");
  document.title = running ? `${running.progress} % · ltx-neuron` : "ltx-neuron";
  $("shown-prompt").textContent = job?.prompt ?? "";
  $("facts").textContent = job ? factsOf(job) : "";
  $("view").dataset.status = job?.status ?? "none";
  $("bar").value = job?.progress ?? 0;
  $("step").textContent = job ? stepOf(job) : "";
  $("remove").hidden = !job;
  $("remove").textContent = job && isOpen(job) ? "Cancel" : "Delete";
  $("download").hidden = !done;
  if (done) $("download").href = contentOf(job, "video");
  const quarters = `${25 * Math.floor(job?.progress / 25)} %`;
  if (job) announce(job.status === "in_progress" ? quarters : stepOf(job));
  drawScreen(job);
}

function factsOf(job) {
  const facts = [sizeText(job), `${job.seconds} s`, `seed ${job.seed}`, job.recipe];
  if (job.two_stage) facts.push("two stages");
  return [facts.join(" · "), ...(job.notes ?? [])].join(". ");
}

const stageText = (stage) => stage.replace("_", " ");
const milliseconds = (value) => value < 999.5 ? `${Number(value.toPrecision(3))} ms`
  : `${Number((value / 1000).toPrecision(3))} s`;

function stepOf(job) {
  const { stage, step, steps, denoise_steps_ms: times = {} } = job.detail ?? {};
  if (job.status === "failed") return `Failed: ${job.error.message}`;
  if (job.status === "queued")
    return { null: "Waiting", 0: "Waiting: next" }[job.ahead] ?? `Waiting: ${job.ahead} ahead`;
  if (job.status === "completed") {
    const stages = Object.entries(times).map(([stage, all]) =>
      `${stageText(stage)}: ${all.length} steps, median ${milliseconds(median(all))}`);
    return ["Done", ...stages].join(" · ");
  }
  if (!stage) return `${job.progress} %`;
  if (stage === "decode") return `${job.progress} % · decoding`;
  return `${job.progress} % · ${stageText(stage)}, step ${step} of ${steps}`;
}

const median = (all) => all.toSorted((a, b) => a - b)[Math.floor(all.length / 2)];

// The preview of a running job, then the video. An element stays as long as what it shows.
function drawScreen(job) {
  const screen = $("screen"), previews = job?.status === "in_progress" && job.detail?.preview;
  const kind = job?.status === "completed" ? "video" : previews ? "img" : "";
  const key = kind && `${job.id} ${kind}`;
  if (screen.dataset.key !== key) {
    screen.dataset.key = key;
    screen.querySelector("img, video")?.remove();
    if (kind === "img") screen.append(make("img", { alt: "Preview of the video" }));
    if (kind === "video") screen.append(make("video", {
      controls: true, playsInline: true, loop: true, ariaLabel: job.prompt,
      poster: contentOf(job, "thumbnail"), src: contentOf(job, "video"),
    }));
  }
  if (kind === "img") {
    const source = `${contentOf(job, "preview")}&step=${job.detail.stage}-${job.detail.step}`;
    const picture = screen.querySelector("img");
    if (picture.getAttribute("src") !== source) picture.src = source;
  }
  const [width, height] = (job?.size ?? "3x2").split("x");
  screen.style.setProperty("--ratio", width / height);
  $("nothing").textContent = kind ? "" : !job ? "Your video appears here."
    : { queued: "Waiting", in_progress: "Starting", failed: "Failed" }[job.status];
}

function drawGallery() {
  const list = $("gallery");
  const tiles = new Map([...list.children].map((tile) => [tile.dataset.id, tile]));
  $("none").hidden = jobs.size > 0;
  const wanted = [...jobs.values()].map((job) => {
    const tile = tiles.get(job.id) ?? makeTile(job);
    if (tile.dataset.status !== job.status && job.status === "completed") {
      const picture = make("img", { src: contentOf(job, "thumbnail"), alt: "", loading: "lazy" });
      picture.onerror = () => picture.remove();
      tile.querySelector(".thumbnail").append(picture);
    }
    tile.dataset.status = job.status;
    const progress = { in_progress: `${job.progress} %`, completed: `${job.seconds} s` };
    tile.querySelector(".status").textContent = progress[job.status] ?? job.status;
    tile.firstChild.ariaPressed = String(job.id === chosen);
    return tile;
  });
  // Moving an element takes its focus: only where the list has changed.
  if (wanted.some((tile, i) => tile !== list.children[i]) || wanted.length < list.children.length)
    list.replaceChildren(...wanted);
}

function makeTile(job) {
  const parts = [["thumbnail", ""], ["name", job.prompt], ["status subdued", ""]];
  const button = make("button", { type: "button", title: job.prompt },
    ...parts.map(([className, text]) => make("span", { className }, text)));
  button.addEventListener("click", () => choose(job.id));
  const tile = make("li", {}, button);
  tile.dataset.id = job.id;
  return tile;
}

$("door").addEventListener("submit", signIn);
$("sign-out").addEventListener("click", signOut);
form.addEventListener("submit", submit);
for (const name of Object.keys(CHOICES)) field[name].addEventListener("change", () => narrow());
field.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
$("new-seed").addEventListener("click", () => {
  field.seed.value = Math.floor(Math.random() * 2 ** 32);
});
$("remove").addEventListener("click", remove);
$("more").addEventListener("click", () => { limit = MAX_PAGE; poll(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && model) poll(); });
begin().catch((error) => { if (error.status !== 401) $("state").textContent = error.message; });

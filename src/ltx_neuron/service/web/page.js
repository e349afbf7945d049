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
  images: ["Last frame", "image/png, image/jpeg, image/webp"],
  audio_reference: ["Sound", "audio/*", "audio_start_time", "audio_bed"],
  video_reference: ["Video to retake or extend", "video/*", "start_time", "end_time", "extend"],
  reference_video: ["Video to dub", "video/*", "reference_strength"],
  reference_audio: ["Voice for the LoRAs", "audio/*", "reference_audio_max_duration"],
  video_conditioning: ["Reference of the LoRAs", "video/*,image/png,image/jpeg,image/webp",
    "stage_2_ic_lora", "tile", "tile_height", "tile_width", "motion_speed"],
};
const CHECKS = ["stage_2_ic_lora", "tile"];  // of those numbers, what is only chosen
const SIZED = ["size", "duration", "two_stage"];  // what a video to retake says itself
const GUIDANCE = /^num_inference_steps$|_(guidance|rescale)_scale$|_skip_step$/;
const CFG = "Higher: closer to the prompt, less natural. 1: off";
const STG = "Higher: more consistent, stronger contrast. 0: off";
const RESCALE = "Undoes the contrast that guidance adds, 0 to 1";
const SKIP = "Steps after each guided one that reuse its guidance: faster. 0: none";
// Label and help of each number; of others their names.
const NUMBERS = {
  num_inference_steps: ["Steps", "More: finer and slower"],
  video_cfg_guidance_scale: ["Prompt's weight in the picture", CFG],
  audio_cfg_guidance_scale: ["Prompt's weight in the sound", CFG],
  video_stg_guidance_scale: ["Consistency of the picture", STG],
  audio_stg_guidance_scale: ["Consistency of the sound", STG],
  video_rescale_scale: ["Contrast limit of the picture", RESCALE],
  audio_rescale_scale: ["Loudness limit of the sound", RESCALE],
  a2v_guidance_scale: ["Picture follows the sound", "Higher: more. 1: off"],
  v2a_guidance_scale: ["Sound follows the picture", "Higher: more. 1: off"],
  video_skip_step: ["Reused steps of the picture", SKIP],
  audio_skip_step: ["Reused steps of the sound", SKIP],
  identity_guidance_scale: ["Likeness of the voice", "With a reference voice"],
  nag_scale: ["Strength of the negative prompt", "1: off; usual: 11"],
  audio_start_time: ["Start in the sound", "seconds"],
  audio_bed: ["Noise under the sound", "dBFS, as in -50"],
  start_time: ["Regenerate from", "seconds"],
  end_time: ["Regenerate to", "seconds"],
  extend: ["Lengthen by", "seconds; below 0: before the beginning"],
  reference_strength: ["Strength of its pictures", "0 to 1"],
  reference_audio_max_duration: ["Length of the voice", "seconds"],
  stage_2_ic_lora: ["LoRA in stage 2 too", ""],
  tile: ["In tiles", ""],
  tile_height: ["Height of a tile", "pixels"],
  tile_width: ["Width of a tile", "pixels"],
  motion_speed: ["Speed of the motion", "0.025 to 1"],
};
const NAG_SCALE = 11;
// The form's labels of the API's names that it has no field for.
const LABELS = { num_frames: "Length", seconds: "Length", height: "Size", width: "Size" };
const IDEAS = {
  Lighthouse: "A keeper opens the creaking door of a lighthouse at dusk. Waves crash below, gulls"
    + " cry, and the wind pulls at her coat while the camera moves slowly closer.",
  Rain: "Close-up of rain on a tin roof in a green valley. Drops bounce in slow motion, and"
    + " thunder rolls far away.",
  Baker: 'A baker in a sunlit kitchen breaks a loaf, smiles and says: "Still warm." The crust'
    + " crackles.",
};
const DEMO_IDEAS = {  // all that the demo's model knows
  Circle: "a red circle glides slowly to the right on a navy ground",
  Square: "a slow yellow square moves down across a charcoal ground",
  Triangle: "on a maroon ground, a fast cyan triangle goes up",
};
const REMEDIES = {
  internal_error: "Try again. If it fails again, the service's log has the details.",
  invalid_value: "Use these settings, and choose its files again.",
  storage_full: "Delete old videos, or free space on the service's disk, then try again.",
  profile_mismatch: "Its graphs or weights were removed. The service's log has the command that"
    + " makes them (ltx-neuron prepare). Type it there, then try again.",
  worker_lost: "Try again, or take a smaller size. The service's log says why the workers ended.",
};
const LONG_START_MS = 120000;  // after which a worker that still starts is in trouble

const $ = (id) => document.getElementById(id);
const form = $("form"), field = form.elements;
const isOpen = (job) => job.status === "queued" || job.status === "in_progress";
const sizeText = (job) => job.size.replace("x", " × ");
const contentOf = (job, variant) => `v1/videos/${job.id}/content?variant=${variant}`;
let model, inputs, jobs = new Map(), chosen = null;
let limit = PAGE, polls = 0, timer = 0, failures = 0, startSeen = 0;

async function call(path, options) {
  const answer = await fetch(path, options).catch(() => {
    throw new Error("The server does not answer.");
  });
  const content = await answer.json().catch(() => ({}));
  if (answer.ok) return content;
  if (answer.status === 401) showDoor(true);
  const { message = `The server answered ${answer.status}.`, param } = content.error ?? {};
  throw Object.assign(new Error(message), { param, status: answer.status });
}

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function labelOf(name) {
  const label = form.querySelector(`label[for="${name}"]`)?.textContent;
  return label ?? LABELS[name] ?? NUMBERS[name]?.[0];
}

// An error's message with the form's labels for the API's names: images[0], num_frames.
function inWords(message, param = "") {
  const known = (name) => labelOf(name.replace(/\[\d+\]/, ""));
  if (param && message.startsWith(param))
    message = (known(param) ?? param) + message.slice(param.length);
  message = message.replace(/\b[a-z0-9]+(_[a-z0-9]+)+\b/g, (name) => known(name) ?? name);
  return message.replace(". GET /v1/models lists all", ".");
}

function showError(error) {
  for (const input of form.querySelectorAll("[aria-invalid]")) input.ariaInvalid = null;
  const wrong = $(error?.param?.replace(/\[\d+\]/, "") ?? "");
  if (wrong && form.contains(wrong)) wrong.ariaInvalid = "true";
  $("error").textContent = error ? inWords(error.message, error.param ?? "") : "";
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
  await loadModel();
  showDoor(false);
  $("sign-out").hidden = !owner;
  $("sign-out").textContent = `Sign out ${owner}`;
  poll();
}

async function loadModel() {
  const [models, api] = await Promise.all([call("v1/models"), call("openapi.json")]);
  model = models.data[0];
  inputs = model.inputs;
  drawFields(api.components.schemas.VideoRequest.properties);
  offer("lora_set", Object.keys(model.lora_sets).map((name) => [name, name]));
  narrow(model.default ?? undefined);
  const empty = !model.sizes.length;
  $("no-size").hidden = !empty;
  $("sizes").hidden = $("why").hidden = $("generate").disabled = empty;
  const ideas = Object.entries(/\bdemo\b/.test(model.id) ? DEMO_IDEAS : IDEAS);
  $("ideas").replaceChildren($("ideas").firstElementChild, ...ideas.map(([name, prompt]) => {
    const idea = make("button", { type: "button", title: prompt }, name);
    idea.addEventListener("click", () => {
      field.prompt.value = prompt;
      field.prompt.focus();
    });
    return idea;
  }));
}

// The limits of fields are those of the request's schema.
function drawFields(schema) {
  const files = Object.keys(FILES).filter((name) =>
    name in inputs || (name === "video_conditioning" && inputs.tile));
  $("files").replaceChildren(...files.map(fileField));
  const numbers = Object.keys(schema).filter((name) => GUIDANCE.test(name));
  $("numbers").replaceChildren(...numbers.map((name) => numberField(name, "default")));
  $("strength").replaceChildren(numberField("nag_scale", NAG_SCALE));
  for (const input of field) {
    const { anyOf = [], ...own } = schema[input.name] ?? {};
    const { maxLength, minimum, maximum, type } = anyOf[0] ?? own;
    if (maxLength) input.maxLength = maxLength;
    if (Math.abs(minimum) < 2 ** 53) input.min = minimum;
    if (Math.abs(maximum) < 2 ** 53) input.max = maximum;
    if (type === "integer") input.step = 1;
  }
  const voice = field.reference_audio_max_duration;
  if (voice) voice.value = Math.max(...model.reference_audio_seconds);  // those that are compiled
}

function labelled(name, text, element) {
  return make("div", { className: "field" }, make("label", { htmlFor: name }, text), element);
}

function numberField(name, placeholder = "") {
  const [text, help] = NUMBERS[name] ?? [name.replaceAll("_", " "), ""];
  const input = make("input", { id: name, name, ...(CHECKS.includes(name)
    ? { type: "checkbox", value: "true" } : { type: "number", step: "any", placeholder }) });
  if (CHECKS.includes(name)) input.addEventListener("change", () => narrow());
  if (!help) return labelled(name, text, input);
  input.setAttribute("aria-describedby", `${name}-help`);
  const small = make("small", { id: `${name}-help`, className: "help" }, help);
  const labelledField = labelled(name, text, input);
  labelledField.append(small);
  return labelledField;
}

function fileField(name) {
  const [text, accept, ...numbers] = FILES[name];
  const input = make("input", { id: name, name, type: "file", accept });
  const remove = make("button", { type: "button", hidden: true }, "Remove");
  remove.ariaLabel = `Remove: ${text}`;
  const canvas = make("canvas", { height: 0, hidden: true });
  const more = make("fieldset", { className: "fields", hidden: true, disabled: true },
    ...numbers.map((number) => numberField(number)));
  input.addEventListener("change", async () => {
    const file = input.files[0];
    remove.hidden = !file;
    more.hidden = more.disabled = !file || !numbers.length;
    narrow();
    const seen = file?.type.startsWith("image/");  // as the policy forbids an <img> of a file
    const picture = seen && await createImageBitmap(file).catch(() => null);
    canvas.hidden = !picture;
    if (!picture) return;
    [canvas.height, canvas.width] = [240, 240 * picture.width / picture.height];
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  });
  remove.addEventListener("click", () => {
    input.value = "";
    input.dispatchEvent(new Event("change"));
    input.focus();
  });
  const hint = make("span", { className: "help" }, "or drop it here");
  const drop = make("div", { className: "drop" }, canvas,
    make("div", { className: "row" }, input, hint, remove));
  takeDrops(drop, input, text);
  return make("div", {}, labelled(name, text, drop), more);
}

function takeDrops(target, input, text) {
  const isOver = (over) => target.classList.toggle("over", over);
  target.addEventListener("dragover", () => isOver(true));
  target.addEventListener("dragleave", () => isOver(false));
  target.addEventListener("drop", (event) => {
    isOver(false);
    const file = event.dataTransfer.files[0];
    if (!file) return;
    const kinds = input.accept.split(/, ?/).map((kind) => kind.replace("*", ""));
    if (!kinds.some((kind) => file.type.startsWith(kind)))
      return showError(new Error(`${text}: ${file.name} is of another type; wanted ${input.accept}`));
    const one = new DataTransfer();
    one.items.add(file);
    input.files = one.files;
    input.dispatchEvent(new Event("change"));
    showError(null);
  });
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
  const takes = (size, name) =>
    inputs[name].some((other) => JSON.stringify(other) === JSON.stringify(size));
  const avoids = inputs.nag_scale && field.negative_prompt.value.trim();
  const fits = (size) => files.every((name) => takes(size, name))
    && (!avoids || size.recipe === "dev" || takes(size, "nag_scale"));
  const offered = files.length ? inputs[files[0]] : model.sizes;
  const fitting = [...offered, ...(avoids ? inputs.nag_scale : [])].filter(fits);
  let left = fitting.length ? fitting : model.sizes;
  $("misfit").hidden = fitting.length > 0 || !model.sizes.length;
  for (const [name, choice] of Object.entries(CHOICES)) {
    offer(name, left.map(choice), wanted && choice(wanted)[0]);
    left = left.filter((size) => choice(size)[0] === field[name].value);
  }
  for (const name of SIZED) field[name].disabled = files.includes("video_reference");
  field.duration.disabled ||= files.includes("reference_video");
  const dev = field.recipe.value === "dev";
  $("guidance").hidden = $("guided").disabled = !dev;
  $("avoid").hidden = $("avoid").disabled = !dev && !inputs.nag_scale;
  $("strength").hidden = field.nag_scale.disabled = dev || !avoids;
}

// The form as it was for a job. Its files stay with the service: they are to be chosen again.
function reuse() {
  const job = jobs.get(chosen);
  const { settings } = job;
  form.reset();
  showError(null);
  for (const input of form.querySelectorAll("input[type=file]"))
    input.dispatchEvent(new Event("change"));
  for (const [name, value] of Object.entries({ ...settings, prompt: job.prompt, seed: job.seed })) {
    const input = field[name];
    if (input?.type === "checkbox") input.checked = value;
    else if (input) input.value = value;
  }
  narrow(job);
  $("guidance").open = Object.keys(settings).some((name) => GUIDANCE.test(name));
  const files = job.inputs.map((name) => labelOf(name.replace(/\[\d+\]/, "")) ?? name);
  if (files.length) $("error").textContent = `Choose again: ${[...new Set(files)].join(", ")}.`;
  bringIntoView(form);
  field.prompt.focus({ preventScroll: true });
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

async function submit(event) {
  event.preventDefault();
  if (form.ariaBusy === "true" || $("generate").disabled) return;
  form.ariaBusy = "true";
  showError(null);
  const body = new FormData(form);
  const [frames = "", fps = ""] = body.get("duration")?.split("@") ?? [];
  body.delete("duration");
  body.set("num_frames", frames);
  body.set("fps", fps);
  if (!body.get("seed")) body.set("seed", Math.floor(Math.random() * 2 ** 32));
  if (field.negative_prompt.value.trim() && !field.nag_scale.disabled)
    body.set("nag_scale", field.nag_scale.value || NAG_SCALE);
  for (const [name, value] of [...body]) if ((value.name ?? value) === "") body.delete(name);
  try {
    const last = body.get("images");
    if (last) body.set("images", JSON.stringify([{ image_url: await dataUrl(last), frame: -1 }]));
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
    if (!model.sizes.length) await loadModel();  // one may have been compiled
    drawState(queue);
    draw();
  } catch (error) {
    if (turn !== polls || error.status === 401) return;
    failures += 1;
    showState("trouble", error.message);
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
  const narrowPage = matchMedia("(max-width: 760px)").matches;  // as in page.css
  if (narrowPage) bringIntoView($("view"));
  else bringIntoView($("screen"), "nearest");
}

function bringIntoView(element, block = "start") {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ block, behavior: calm ? "auto" : "smooth" });
}

async function retry() {
  try {
    const job = await call(`v1/videos/${chosen}/retry`, { method: "POST" });
    jobs.set(job.id, job);
    choose(job.id);
  } catch (error) {
    showError(error);
  }
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

function showState(kind, text) {
  $("state").dataset.kind = kind;
  $("state").textContent = text;
}

function drawState({ workers, starting, waiting, in_progress: running }) {
  startSeen = starting ? startSeen || Date.now() : 0;
  const late = Date.now() - startSeen > LONG_START_MS ? " It takes long: see its log." : "";
  if (starting) showState("starting", `The worker is starting; new videos wait for it.${late}`);
  else if (!workers) showState("trouble", "No worker is running; new videos wait until one is.");
  else showState("ready", `${model.id} · ${waiting} waiting · ${running} running · `
    + (workers === 1 ? "1 worker" : `${workers} workers`));
}

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
  $("remedy").textContent = job?.error ? REMEDIES[job.error.code] ?? "" : "";
  $("retry").hidden = !job?.error;
  $("reuse").hidden = !job;
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
  if (job.status === "failed") return `Failed: ${inWords(job.error.message)}`;
  if (job.status === "queued")
    return { null: "Waiting", 0: "Waiting: next" }[job.ahead] ?? `Waiting: ${job.ahead} ahead`;
  if (job.status === "completed") {
    const stages = Object.entries(times).map(([stage, all]) =>
      `${stageText(stage)}: ${all.length} steps, median ${milliseconds(median(all))}`);
    return ["Done", ...stages].join(" · ");
  }
  const now = !stage ? [] : stage === "decode" ? ["decoding"]
    : [`${stageText(stage)}, step ${step} of ${steps}`];
  return [`${job.progress} %`, ...now, ...timeLeft(job)].join(" · ");
}

const sum = (all) => all.reduce((total, value) => total + value, 0);
const kindOf = (job) => [job.size, job.num_frames, job.two_stage, job.recipe].join();

// By the steps so far; for what follows this stage, by the last video of the same kind.
function timeLeft(job) {
  const { stage, step, steps, denoise_steps_ms: times = {} } = job.detail ?? {};
  const last = [...jobs.values()].find((other) =>
    other.status === "completed" && other.started_at && kindOf(other) === kindOf(job));
  const before = last?.detail.denoise_steps_ms ?? {};
  const measured = times[stage] ?? before[stage];
  const here = measured ? (steps - step) * median(measured) : 0;
  if (!stage || (!last && !measured)) return [];
  if (!last) return [`about ${durationText(here)} left in this stage`];
  const later = Object.keys(before).filter((name) => !(name in times));
  const decoding = 1000 * (last.completed_at - last.started_at) - sum(Object.values(before).flat());
  const left = here + sum(later.flatMap((name) => before[name])) + Math.max(0, decoding);
  return [`about ${durationText(left)} left`];
}

const durationText = (ms) => ms < 90000 ? `${Math.max(1, Math.round(ms / 1000))} s`
  : `${Math.round(ms / 60000)} min`;
const dateText = (seconds) => new Date(1000 * seconds).toLocaleString([],
  { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

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
    tile.querySelector(".status").textContent =
      `${progress[job.status] ?? job.status} · ${dateText(job.created_at)}`;
    tile.firstChild.ariaPressed = String(job.id === chosen);
    return tile;
  });
  // Moving an element takes its focus: only where the list has changed.
  if (wanted.some((tile, i) => tile !== list.children[i]) || wanted.length < list.children.length)
    list.replaceChildren(...wanted);
}

function makeTile(job) {
  const parts = [["thumbnail", ""], ["name", job.prompt], ["status subdued", ""],
    ["seed subdued", `seed ${job.seed}`]];
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
for (const name of ["dragover", "drop"])  // a file beside its field would replace the page
  document.addEventListener(name, (event) => event.preventDefault());
field.negative_prompt.addEventListener("input", () => narrow());
$("new-seed").addEventListener("click", () => { field.seed.value = ""; });
$("retry").addEventListener("click", retry);
$("reuse").addEventListener("click", reuse);
$("remove").addEventListener("click", remove);
$("more").addEventListener("click", () => { limit = MAX_PAGE; poll(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && model) poll(); });
begin().catch((error) => { if (error.status !== 401) showState("trouble", error.message); });

"use strict";
// The page's functions. Everything that it knows comes from the API of the server that it came
// from, with the token that was typed; what a person wrote is shown as text, never as HTML.
const ltx = (() => {
  const KEY = "ltx-neuron-token";
  const BUSY_MS = 700, IDLE_MS = 4000, PAGE = 24, PLACES = 6;
  const $ = (id) => document.getElementById("ltx-" + id);
  const open = (job) => job.status === "queued" || job.status === "in_progress";
  const update = (choices, value, more = {}) => ({ __type__: "update", choices, value, ...more });

  let sizes = [], jobs = new Map(), chosen = null, limit = PAGE, timer = 0, ticking = false, sending = false;
  let image = null, shown = "", pictured = "";
  const thumbnails = new Map();  // by job: a URL of the picture in this browser

  // --- the API ---------------------------------------------------------------------------------

  async function call(path, options = {}) {
    const token = localStorage.getItem(KEY);
    const headers = token ? { Authorization: "Bearer " + token } : {};
    const answer = await fetch(path, { ...options, headers });
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => null);
    const error = new Error(said?.error?.message || `the server answered ${answer.status}`);
    error.status = answer.status;
    error.code = said?.error?.code || "";
    if (answer.status === 401) lock(token ? "This token is not known here." : "");
    throw error;
  }
  const ask = async (path) => (await call(path)).json();
  const urlOf = async (path) => URL.createObjectURL(await (await call(path)).blob());

  function lock(why) {
    localStorage.removeItem(KEY);
    document.body.classList.add("ltx-locked");
    $("door").hidden = false;
    $("door-error").textContent = why;
    $("token").focus();
  }

  // --- the form --------------------------------------------------------------------------------

  async function begin() {
    listen();
    try {
      const model = (await ask("v1/models")).data[0];
      sizes = model.sizes;
      $("forget").hidden = !localStorage.getItem(KEY);
      tick();
      const usual = model.default;
      return usual ? choices(usual.recipe, usual.size, lengthOf(usual), usual.two_stage)
                   : choices();
    } catch (error) {
      if (error.status !== 401) say(error);
      return choices();
    }
  }

  const lengthOf = (size) => `${size.num_frames}@${size.fps}`;
  const nameOf = (size) => `${size.seconds} s · ${size.num_frames} frames`
    + (sizes.some((other) => other.fps !== size.fps) ? ` · ${size.fps} fps` : "");
  const unique = (pairs) => [...new Map(pairs.map((pair) => [String(pair[1]), pair])).values()];
  const kept = (pairs, value) =>
    pairs.some((pair) => pair[1] === value) ? value : (pairs[0]?.[1] ?? null);

  // The choices that are left when the ones before them are made.
  function choices(recipe, size, length, stages) {
    const recipes = unique(sizes.map((s) => [s.recipe, s.recipe]));
    recipe = kept(recipes, recipe);
    let left = sizes.filter((s) => s.recipe === recipe);
    const whole = unique(left.map((s) => [s.size.replace("x", " × "), s.size]));
    if (!size) size = whole[0]?.[1] ?? null;  // one that was typed stays
    const same = left.filter((s) => s.size === size);
    left = same.length ? same : left;
    const lengths = unique(left.map((s) => [nameOf(s), lengthOf(s)]));
    length = kept(lengths, length);
    left = left.filter((s) => lengthOf(s) === length);
    const words = { true: "two, finer", false: "one" };
    const two = unique(left.map((s) => [words[s.two_stage], String(s.two_stage)]).sort().reverse());
    return [
      update(recipes, recipe, { visible: recipes.length > 1 }),
      update(whole, size),
      update(lengths, length),
      update(two, kept(two, String(stages))),
      { __type__: "update", visible: recipe === "dev" },
    ];
  }

  async function send(names, values) {
    const said = Object.fromEntries(names.map((name, i) => [name, values[i]]));
    const [frames, fps] = (said.length || "").split("@");
    const fields = { ...said, length: null, num_frames: frames, fps };
    fields.size = String(said.size || "").replace(/\s*[×x]\s*/, "x").trim();
    if (said.recipe !== "dev")
      for (const name of ["negative_prompt", "num_inference_steps", "guidance_scale"])
        fields[name] = null;
    const body = new FormData();
    for (const [name, value] of Object.entries(fields))
      if (value !== null && value !== undefined && value !== "") body.append(name, String(value));
    if (image) body.append("input_reference", image);
    if (sending) return [];
    sending = true;
    say(null);
    try {
      const job = await (await call("v1/videos", { method: "POST", body })).json();
      jobs.set(job.id, job);
      choose(job.id);
      toScreen();
    } catch (error) {
      say(error);
    } finally {
      sending = false;
    }
    return [];
  }

  function say(error) {
    $("error").textContent = error ? error.message : "";
    if (error?.code) $("error").append(code(error.code));
  }

  function code(text) {
    const shown = document.createElement("code");
    shown.textContent = text;
    return shown;
  }

  function pick(file) {
    image = file || null;
    URL.revokeObjectURL($("file-shown").src);
    $("file-shown").hidden = $("file-none").hidden = !image;
    $("file-shown").src = image ? URL.createObjectURL(image) : "";
    $("file-name").textContent = image ? image.name : "none; one is held as the first frame";
    if (!image) $("file").value = "";
  }

  // --- what the server says, again and again ----------------------------------------------------

  async function tick() {
    if (ticking) return;
    ticking = true;
    clearTimeout(timer);
    try {
      if (!document.hidden) await look();
      document.body.classList.remove("ltx-away");
    } catch (error) {
      if (error.status === 401) return;
      document.body.classList.add("ltx-away");
      $("line").textContent = error.status ? error.message : "the server does not answer";
    } finally {
      ticking = false;
      const busy = [...jobs.values()].some(open);
      timer = setTimeout(tick, busy ? BUSY_MS : IDLE_MS);
    }
  }

  async function look() {
    const [list, line] = await Promise.all([ask("v1/videos?limit=" + limit), ask("v1/queue")]);
    const queued = list.data.filter((job) => job.status === "queued").slice(-PLACES);
    for (const job of await Promise.all(queued.map((job) => ask("v1/videos/" + job.id)
      .catch(() => job)))) Object.assign(list.data.find((other) => other.id === job.id), job);
    jobs = new Map(list.data.map((job) => [job.id, job]));
    if (!jobs.has(chosen)) chosen = (list.data.find(open) || list.data[0])?.id ?? null;
    $("more").hidden = !list.has_more || limit >= 100;
    const workers = line.workers === 1 ? "1 worker" : `${line.workers} workers`;
    $("line").textContent = line.workers
      ? `${line.waiting} waiting · ${line.in_progress} being made · ${workers}`
      : "no worker is alive: what you send waits";
    draw();
  }

  // --- what is shown -----------------------------------------------------------------------------

  function draw() {
    gallery();
    const job = jobs.get(chosen);
    $("prompt").textContent = job ? job.prompt : "";
    $("facts").textContent = job ? factsOf(job) : "";
    $("bar").value = job ? job.progress : 0;
    $("work").dataset.status = job ? job.status : "none";
    $("step").textContent = job ? stepOf(job) : "";
    $("cancel").hidden = !job || !open(job);
    $("delete").hidden = !job || open(job);
    $("save").hidden = !job || job.status !== "completed" || !shown.endsWith("video");
    plot(job?.detail?.denoise_steps_ms || {});
    screen(job).catch((error) => { if (error.status !== 404) say(error); });
  }

  function factsOf(job) {
    const facts = [job.size.replace("x", " × "), `${job.seconds} s`, `seed ${job.seed}`, job.recipe];
    if (job.two_stage) facts.push("two stages");
    return [facts.join(" · "), ...(job.notes || [])].join(". ");
  }

  function stepOf(job) {
    const detail = job.detail || {};
    if (job.status === "failed") return `failed: ${job.error?.message}`;
    if (job.status === "completed") return "done";
    if (job.status === "queued")
      return job.ahead ? `waiting: ${job.ahead} before it` : "next: it begins when its models are there";
    const parts = [`${job.progress} %`];
    if (detail.stage === "decode") parts.push("decoding picture and sound");
    else if (detail.stage) {
      parts.push(detail.stage.replace("_", " "), `step ${detail.step} of ${detail.steps}`);
      const times = detail.denoise_steps_ms?.[detail.stage];
      if (times?.length) parts.push(`${ms(times.at(-1))} a step`);
    }
    return parts.join(" · ");
  }

  // Three digits, no zeros behind the point.
  const ms = (value) => value < 999.5 ? `${Number(value.toPrecision(3))} ms`
    : `${Number((value / 1000).toPrecision(3))} s`;

  // The preview while it is made, the video when it is done.
  async function screen(job) {
    if (!job) return show("", null);
    const [width, height] = job.size.split("x");
    $("screen").style.setProperty("--ltx-ratio", width / height);
    if (job.status === "completed") {
      if (shown !== job.id + "video") await player(job);
    } else if (job.status === "in_progress" && job.detail?.preview) {
      const step = [job.id, job.detail.stage, job.detail.step].join();
      if (pictured === step) return;
      pictured = step;
      const picture = document.createElement("img");
      picture.src = await urlOf(`v1/videos/${job.id}/content?variant=preview`);
      picture.alt = "A preview of the clip between two steps";
      await picture.decode();
      if (chosen === job.id && jobs.get(chosen)?.status === "in_progress")
        show(step + "preview", picture);
    } else if (!shown.startsWith(job.id)) show(job.id, null);
  }

  async function player(job) {
    const before = shown;
    shown = job.id + "video";
    try {
      const video = document.createElement("video");
      video.controls = video.playsInline = video.loop = true;
      video.setAttribute("aria-label", job.prompt);
      video.src = await urlOf(`v1/videos/${job.id}/content`);
      if (chosen !== job.id) return;
      show(job.id + "video", video);
      $("save").href = video.src;
      $("save").download = job.id + ".mp4";
      $("save").hidden = false;
    } catch (error) {
      shown = before;
      throw error;
    }
  }

  function show(name, element) {
    if (shown === name && $("screen").firstElementChild === element) return;
    shown = name;
    for (const old of $("screen").querySelectorAll("img, video")) {
      URL.revokeObjectURL(old.src);
      old.remove();
    }
    $("nothing").hidden = Boolean(element);
    $("nothing").textContent = name ? "" : "What you generate is shown here.";
    if (element) $("screen").append(element);
  }

  // --- the plot: a bar a step ----------------------------------------------------------------------

  function plot(times) {
    const steps = Object.entries(times).flatMap(([stage, all]) => all.map((ms) => [stage, ms]));
    const bars = $("bars");
    const width = bars.clientWidth || 600;
    const key = JSON.stringify([steps, width]);
    if (bars.dataset.key === key) return;
    bars.dataset.key = key;
    bars.replaceChildren();
    bars.setAttribute("viewBox", `0 0 ${width} 150`);
    $("plot-said").textContent = Object.entries(times).map(([stage, all]) =>
      `${stage.replace("_", " ")}: ${all.length} steps, median ${ms(median(all))}`).join("; ");
    $("plot").dataset.empty = String(!steps.length);
    if (!steps.length) return;
    const most = ticks(Math.max(...steps.map(([, ms]) => ms)));
    for (const part of [0, 0.5, 1]) {
      const y = 125 - 110 * part;
      draw_(bars, "line", { x1: 62, x2: width, y1: y, y2: y, class: "ltx-grid" });
      draw_(bars, "text", { x: 56, y: y + 4, class: "ltx-tick", "text-anchor": "end" },
        part ? ms(most * part) : "0");
    }
    const wide = (width - 70) / Math.max(steps.length, 11);
    steps.forEach(([stage, value], i) => {
      const tall = Math.max(1, 110 * value / most), x = 66 + i * wide;
      const bar = draw_(bars, "rect", { x, y: 125 - tall, width: Math.min(wide * 0.7, 40),
        height: tall, rx: 2, class: `ltx-${stage}` });
      draw_(bar, "title", {}, `${stage.replace("_", " ")}, step ${i + 1}: ${ms(value)}`);
      if (wide >= 18)
        draw_(bars, "text", { x: x + Math.min(wide * 0.35, 20), y: 142, class: "ltx-tick",
          "text-anchor": "middle" }, String(i + 1));
    });
  }

  function draw_(parent, name, attributes, text = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    parent.append(element);
    return element;
  }

  const median = (all) => [...all].sort((a, b) => a - b)[Math.floor(all.length / 2)];

  function ticks(most) {  // the next of 1, 2, 5 times a power of ten
    const power = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= most);
  }

  // --- the gallery ---------------------------------------------------------------------------------

  function gallery() {
    const list = $("gallery"), there = new Map([...list.children].map((li) => [li.dataset.id, li]));
    $("none").hidden = jobs.size > 0;
    for (const [id, li] of there) if (!jobs.has(id)) {
      li.remove();
      URL.revokeObjectURL(thumbnails.get(id));
      thumbnails.delete(id);
    }
    let place = 0;
    for (const job of jobs.values()) {
      const li = there.get(job.id) || tile(job);
      if (list.children[place] !== li) list.insertBefore(li, list.children[place] || null);
      place += 1;
      li.dataset.status = job.status;
      li.querySelector(".ltx-state").textContent = stateOf(job);
      li.querySelector("button").setAttribute("aria-pressed", String(job.id === chosen));
      if (job.status === "completed" && !thumbnails.has(job.id)) picture(job.id, li);
    }
  }

  function stateOf(job) {
    if (job.status === "queued") return job.ahead ? `waiting, ${job.ahead} before it` : "waiting";
    return { in_progress: `${job.progress} %`, failed: "failed", completed: `${job.seconds} s` }[job.status];
  }

  function tile(job) {
    const li = document.createElement("li"), button = document.createElement("button");
    li.dataset.id = job.id;
    button.type = "button";
    button.addEventListener("click", () => { choose(job.id); toScreen(); });
    for (const [name, text] of [["ltx-thumb", ""], ["ltx-name", job.prompt], ["ltx-state", ""]]) {
      const span = document.createElement("span");
      span.className = name;
      span.textContent = text;
      button.append(span);
    }
    button.title = job.prompt;
    li.append(button);
    return li;
  }

  async function picture(id, li) {
    thumbnails.set(id, "");
    try {
      const url = await urlOf(`v1/videos/${id}/content?variant=thumbnail`);
      thumbnails.set(id, url);
      const img = document.createElement("img");
      img.src = url;
      img.alt = "";
      li.querySelector(".ltx-thumb").replaceChildren(img);
    } catch (error) {
      if (error.status !== 404) thumbnails.delete(id);
    }
  }

  function toScreen() {
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const behavior = still ? "auto" : "smooth";
    $("screen").scrollIntoView({ block: "nearest", behavior });
  }

  function choose(id) {
    chosen = id;
    draw();
    tick();
  }

  async function remove() {
    const id = chosen;
    try {
      await call("v1/videos/" + id, { method: "DELETE" });
    } catch (error) {
      if (error.status !== 404) return say(error);
    }
    jobs.delete(id);
    chosen = null;
    tick();
  }

  function listen() {
    $("door").addEventListener("submit", (event) => {
      event.preventDefault();
      localStorage.setItem(KEY, $("token").value.trim());
      location.reload();
    });
    $("forget").addEventListener("click", () => { localStorage.removeItem(KEY); location.reload(); });
    $("file").addEventListener("change", () => pick($("file").files[0]));
    $("file-none").addEventListener("click", () => { pick(null); $("file").focus(); });
    $("image").addEventListener("dragover", (event) => event.preventDefault());
    $("image").addEventListener("drop", (event) => {
      event.preventDefault();
      pick(event.dataTransfer.files[0]);
    });
    $("cancel").addEventListener("click", remove);
    $("delete").addEventListener("click", remove);
    $("more").addEventListener("click", () => { limit = 100; tick(); });
    addEventListener("resize", () => draw());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
  }

  return { begin, choose: (values) => choices(...values), send };
})();

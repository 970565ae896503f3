// Asks the server and writes what it says.

const POLL_MS = 2000;
const SLOW_MS = 10000; // documents and metrics
const PATIENCE_MS = 15000;
const PLAIN_KEY = /^[\x21-\x7e]*$/;

const keys = { read: "", admin: "" }; // here and nowhere else
const past = new Past(); // {t, stats, parts, hitRate, prompts, hits, generated, ttft50, ttft95}
const loads = new Past(); // {t, generated, requests, running, waiting, ttft}
let [paused, locked, timer, asking, slowDue] = [false, false, 0, false, 0];

const charts = [
  null, // the arena, when its formats are known
  new Chart("c-hits", "Hit rate, of the last minute", [
    { name: "prompt tokens found", className: "f3", of: (r) => r.hitRate },
    { name: "arena live", className: "f1 dash", of: (r) => r.stats.live_bytes / r.stats.arena_bytes },
  ], { top: () => 1, show: percent }),
  new Chart("c-ratio", "Compression", [
    { name: "against bf16", className: "f5", of: (r) => r.stats.compression_ratio },
    { name: "target for old pages, against 4 bits", className: "f0 dash", of: (r) => r.stats.target_ratio },
  ], { show: times }),
  new Chart("c-tokens", "Tokens a second, of the last minute", [
    { name: "prompt", className: "f5", of: (r) => r.prompts },
    { name: "of these found", className: "f3 dash", of: (r) => r.hits },
    { name: "generated", className: "f0", of: (r) => r.generated },
  ], { show: (value) => number(value, 1) }),
  new Chart("c-ttft", "Time to first token, of the last minute", [
    { name: "median", className: "f5", of: (r) => r.ttft50 },
    { name: "95 %", className: "f1 dash", of: (r) => r.ttft95 },
  ], { show: seconds }),
];

async function ask(path, key) {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const answer = await fetch(path, { headers, cache: "no-store", redirect: "error", signal: AbortSignal.timeout(PATIENCE_MS) });
  return { status: answer.status, text: await answer.text() };
}

function schedule(ms) {
  clearTimeout(timer);
  if (!paused && !locked && !document.hidden) timer = setTimeout(poll, ms);
}

async function poll() {
  if (asking) return;
  asking = true;
  let asked = false;
  try {
    const answer = await ask("stats", keys.read);
    asked = true;
    await readStats(answer);
  } catch (error) {
    const what = asked ? "The answer of the server cannot be shown" : "No answer from the server";
    say(`${what} (${error.message}). Trying again.`);
  } finally {
    asking = false;
    schedule(POLL_MS);
  }
}

async function readStats({ status, text }) {
  if (status === 401 || status === 403) return needKey();
  if (status !== 200) return say(`The server answers with status ${status}: ${reason(text)}. Trying again.`);
  const t = Date.now();
  take(JSON.parse(text), t);
  say(paused ? "Paused." : "Live, every 2 seconds.");
  if (t >= slowDue) {
    slowDue = t + SLOW_MS;
    await Promise.all([
      readMetrics(t).catch((error) => noteMetrics(`Metrics could not be read (${error.message}).`)),
      readDocuments().catch((error) => write($("documents-note"), `The list could not be read (${error.message}).`)),
    ]);
  }
}

function reason(text) {
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    return "no reason given";
  }
}

// No more questions until there is another key.
function needKey() {
  locked = true;
  if (!$("keys").open) {
    $("keys").open = true;
    $("key").focus();
  }
  say(keys.read ? "The server does not take this API key." : "The server wants its API key.");
}

function say(text) { write($("state"), text); }

function noteMetrics(note) {
  write($("metrics-note"), note);
  $("metrics-note").hidden = !note;
}

async function readMetrics(t) {
  const { status, text } = await ask("../metrics", "");
  const samples = status === 200 ? parseMetrics(text) : {};
  const generated = total(samples, "sglang:generation_tokens_total");
  const known = generated !== null || total(samples, "sglang:num_running_reqs") !== null;
  const note = status !== 200
    ? "Time to first token, generated tokens and running requests are not known: start the server with --enable-metrics."
    : known ? "" : "Time to first token and generated tokens are known after the first request.";
  noteMetrics(note);
  if (!known) return;
  loads.add({
    t,
    generated: generated || 0,
    running: total(samples, "sglang:num_running_reqs"),
    waiting: total(samples, "sglang:num_queue_reqs"),
    ttft: buckets(samples, "sglang:time_to_first_token_seconds"),
  }, (load) => load.generated);
}

async function readDocuments() {
  const { status, text } = await ask("documents", keys.admin || keys.read);
  const region = $("documents").parentElement;
  region.hidden = status !== 200;
  if (status === 401 || status === 403) return write($("documents-note"), "The list needs the admin key, or without one the API key.");
  if (status !== 200) return write($("documents-note"), `The list is not there: status ${status}, ${reason(text)}.`);
  const { documents } = JSON.parse(text);
  region.hidden = documents.length === 0;
  write($("documents-note"), documents.length ? `${documents.length} pinned.` : "None is pinned.");
  writeTable($("documents").tBodies[0], documents.map((one) => ({
    cells: [one.id, one.message ? `${one.state}: ${one.message}` : one.state, number(one.tokens), bytes(one.bytes), number(one.hits),
      Object.entries(one.formats).filter(([, count]) => count).map(([name, count]) => `${name} ${count}`).join(", ") || "–",
      one.ttl === null ? "until removed" : number(one.ttl)],
  })));
}

const prompts = (reading) => reading.stats.prompt_tokens_total;
const hits = (reading) => reading.stats.prefix_hit_tokens_total;

function take(stats, t) {
  const reading = { t, stats, parts: arenaParts(stats) };
  past.add(reading, prompts);
  const asked = past.gain(prompts);
  const fresh = loads.last && loads.last.t > t - WINDOW_MS;
  Object.assign(reading, {
    hitRate: asked ? past.gain(hits) / asked : null,
    prompts: past.rate(prompts),
    hits: past.rate(hits),
    generated: fresh ? loads.rate((load) => load.generated) : null,
    ttft50: fresh && loads.earlier ? quantile(loads.earlier.ttft, loads.last.ttft, 0.5) : null,
    ttft95: fresh && loads.earlier ? quantile(loads.earlier.ttft, loads.last.ttft, 0.95) : null,
  });
  show(reading, fresh ? loads.last : null);
}

function show(reading, load) {
  const { stats, parts } = reading;
  writeNow(facts(reading, load));
  drawMap($("map"), parts);
  const filled = parts.filter((part) => part.bytes > 0).map((part) => `${part.name} ${percent(part.bytes / stats.arena_bytes)}`);
  write($("map-text"), `${bytes(stats.arena_bytes)}, one block is ${bytes(stats.arena_bytes / 250)}: ${filled.join(", ")}.`);
  writeTable($("formats").tBodies[0], parts.map((part) => ({
    className: part.className,
    cells: [part.name, number(part.pages), number(part.each), bytes(part.bytes), percent(part.bytes / stats.arena_bytes), number((stats.prefix_hit_tokens_by_format || {})[part.name])],
  })));
  drawCharts(parts);
  writeTable($("pressure").tBodies[0], pressure(stats));
  writeTable($("options").tBodies[0], Object.entries(stats.options).map(([name, value]) => ({ cells: [name, value === null ? "–" : String(value)] })));
  writePast();
  document.title = `${percent(stats.slab_bytes / stats.arena_bytes)} of the arena · csa2 cache`;
}

// [what, value, remark] of the numbers on top.
function facts({ stats, hitRate, prompts: asked, generated, ttft50, ttft95 }, load) {
  const whole = stats.prompt_tokens_total ? stats.prefix_hit_tokens_total / stats.prompt_tokens_total : null;
  const rows = [
    ["Arena in use", percent(stats.slab_bytes / stats.arena_bytes), `${bytes(stats.slab_bytes)} of ${bytes(stats.arena_bytes)}`],
    ["Compression", times(stats.compression_ratio), "against bf16"],
    ["Target ratio", times(stats.target_ratio), stats.options.ratio === "auto" ? "of old pages, automatic" : "of old pages"],
    ["Hit rate", percent(hitRate), `last minute; ${percent(whole)} since the start`],
    ["Tokens held", number(stats.logical_tokens), `of ${number(stats.capacity_tokens)}`],
    ["Prompt tokens a second", number(asked, 1), "last minute"],
    ["Generated a second", number(generated, 1), "last minute"],
    ["Time to first token", seconds(ttft50), `median of the last minute; 95 %: ${seconds(ttft95)}`],
    ["Requests", load ? `${number(load.running)} running` : "–", load ? `${number(load.waiting)} waiting` : ""],
  ];
  if (isNumber(stats.documents)) rows.push(["Pinned documents", number(stats.documents), `${number(stats.pinned_pages)} pages, ${bytes(stats.pinned_bytes)}`]);
  if (stats.guard_compared_total) rows.push(["Agreement", percent(stats.guard_agreement), "of guarded steps"]);
  return rows;
}

function writeNow(rows) {
  rows.forEach(([what, value, remark], i) => {
    const item = $("now").children[i] || $("now").appendChild(make("div", {}, make("dt"), make("dd", {}, make("span"), make("small"))));
    const [term, { firstChild, lastChild }] = item.children;
    write(term, what);
    write(firstChild, value);
    write(lastChild, remark);
  });
}

function drawCharts(parts) {
  const names = String(parts.map((part) => part.name));
  if (charts[0] && charts[0].names !== names) { // the server was started again with other formats
    charts[0].section.remove();
    charts[0] = null;
  }
  charts[0] ??= Object.assign(new Chart("c-arena", "Arena over time", parts.map((part) => (
    { name: part.name, className: part.className, of: (r) => r.parts.find((other) => other.name === part.name)?.bytes }
  )), { stacked: true, top: (r) => r.stats.arena_bytes, show: bytes }), { names });
  for (const chart of charts) {
    if (!chart.section.isConnected) chart === charts[0] ? $("charts").prepend(chart.section) : $("charts").append(chart.section);
    chart.draw(past.all);
  }
}

function pressure(stats) {
  const before = past.earlier && past.earlier.stats;
  const row = (name, count) => ({ cells: [name, number(before && count(stats) - count(before)), number(count(stats))] });
  return [
    row("Pages demoted", (s) => sum(s.demotions_total)),
    ...Object.keys(stats.demotions_total).filter((step) => stats.demotions_total[step]).map((step) => row(step.replace("->", " to "), (s) => s.demotions_total[step] || 0)),
    row("Tokens evicted", (s) => s.evicted_tokens_total),
    row("Pages moved to empty slabs", (s) => s.compactions_total),
  ];
}

// One row a minute, the newest first; only while somebody looks.
function writePast() {
  if (!$("past").open) return;
  const curves = charts.flatMap((chart) => chart.series.map((one) => ({ ...one, name: `${chart.title}: ${one.name}`, show: chart.show })));
  const heads = $("readings").tHead.rows[0];
  if (!heads.cells.length) heads.append(...["Time", ...curves.map((one) => one.name)].map((name) => make("th", { scope: "col" }, name)));
  const minutes = new Map(past.all.map((reading) => [Math.floor(reading.t / 60000), reading]));
  writeTable($("readings").tBodies[0], [...minutes.values()].reverse().map((reading) => ({
    cells: [new Date(reading.t).toLocaleTimeString(), ...curves.map((one) => one.show(one.of(reading)))],
  })));
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say(paused ? "Paused." : "Going on.");
  schedule(0);
});
$("say").addEventListener("click", () => {
  const rows = past.last ? facts(past.last, loads.last) : [];
  $("said").textContent = rows.map(([what, value, remark]) => `${what}: ${value}${remark ? ", " + remark : ""}.`).join(" ") || "Nothing is known yet.";
});
$("past").addEventListener("toggle", () => past.last && writePast());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = [$("key").value.trim(), $("admin-key").value.trim()];
  if (!typed.every((key) => PLAIN_KEY.test(key))) return say("A key has letters, digits and signs of ASCII only, and no spaces.");
  [keys.read, keys.admin] = typed;
  [slowDue, locked] = [0, false];
  schedule(0);
});
document.addEventListener("visibilitychange", () => schedule(0));
poll();

"use strict";
// What the answers of the server say. Nothing here touches the page.

const KEPT_MS = 30 * 60000;
const WINDOW_MS = 60000;

// Samples of SGLang in Prometheus text: {name: [{labels, value}]}. Ranks of one replica report the same: the first counts.
function parseMetrics(text) {
  const samples = {};
  for (const line of text.split("\n")) {
    const match = /^(sglang:\w+)(\{.*\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if ((labels.tp_rank || "0") === "0") (samples[match[1]] ??= []).push({ labels, value: Number(match[3]) });
  }
  return samples;
}

// Sum over the series of a metric, null if there are none.
function total(samples, name) {
  return samples[name] ? samples[name].reduce((sum, sample) => sum + sample.value, 0) : null;
}

// Buckets of a histogram over all its series: [[upper end, requests up to it], ...].
function buckets(samples, name) {
  const ends = new Map();
  for (const { labels, value } of samples[name + "_bucket"] || []) {
    const end = labels.le === "+Inf" ? Infinity : Number(labels.le);
    ends.set(end, (ends.get(end) || 0) + value);
  }
  return [...ends].sort((a, b) => a[0] - b[0]);
}

// Quantile of what came between two readings of a histogram, by Prometheus' rule; null if nothing came.
function quantile(before, after, share) {
  const earlier = new Map(before);
  const came = after.map(([end, count]) => [end, count - (earlier.get(end) || 0)]);
  const rank = share * (came.length ? came.at(-1)[1] : 0);
  if (!(rank > 0)) return null;
  let [low, below] = [0, 0];
  for (const [end, count] of came) {
    if (count >= rank) return end === Infinity ? low : low + (end - low) * (rank - below) / (count - below);
    [low, below] = [end, count];
  }
  return null;
}

// Readings in the order in which they came, each {t: milliseconds, ...}.
class Past {
  constructor() { this.all = []; }

  get last() { return this.all.at(-1) || null; }

  // A reading of which `count` fell was taken after a restart: nothing before it counts.
  add(reading, count) {
    if (this.last && count(reading) < count(this.last)) this.all = [];
    this.all.push(reading);
    while (this.all[0].t < reading.t - KEPT_MS) this.all.shift();
  }

  // The first reading of the last minute; null if it is the last one.
  get earlier() {
    const first = this.last && this.all.find((reading) => reading.t >= this.last.t - WINDOW_MS);
    return first && first !== this.last ? first : null;
  }

  // What `count` gained in the last minute; null while there is one reading.
  gain(count) { return this.earlier && count(this.last) - count(this.earlier); }

  // The same a second.
  rate(count) { return this.earlier && this.gain(count) * 1000 / (this.last.t - this.earlier.t); }
}

// A format keeps its colour whatever the ladder; the first is the dtype of the model.
const COLOURS = { fp8: 1, k8v4: 2, fp4: 3, int4: 3, "csa2-2x": 4, "csa2-4x": 5, "csa2-8x": 6 };

// What fills the arena: [{name, className, pages, bytes, each}], formats first, then lost in slabs, then free.
function arenaParts(stats) {
  const parts = Object.entries(stats.pages).map(([name, pages], i) => {
    const each = stats.page_bytes[name] || 0;
    return { name, className: "f" + (i && (COLOURS[name] || i % 7)), pages, each, bytes: pages * each };
  });
  const lost = Math.max(0, stats.slab_bytes - stats.used_bytes);
  parts.push({ name: "not used in slabs", className: "waste", pages: null, each: null, bytes: lost });
  parts.push({ name: "free", className: "free", pages: null, each: null, bytes: stats.arena_bytes - stats.slab_bytes });
  return parts;
}

const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Numbers as people read them; a dash where there is none.
const number = (value, digits = 0) => isNumber(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";
const percent = (value) => isNumber(value) ? (100 * value).toFixed(1) + " %" : "–";
const times = (value) => isNumber(value) ? value.toFixed(2) + "x" : "–";
const seconds = (value) => !isNumber(value) ? "–" : value < 1 ? (1000 * value).toFixed(0) + " ms" : value.toFixed(2) + " s";

function bytes(value) {
  if (!isNumber(value)) return "–";
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < 4; unit++) value /= 1024;
  return Number(value.toPrecision(value < 1000 ? 3 : 4)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}

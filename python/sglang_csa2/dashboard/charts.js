// Elements, tables and pictures. Text from the server becomes text nodes, never markup.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "path", "rect"].includes(tag);
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Only what differs, so that a reader of the page keeps its place and selection.
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Rows of texts; the first of each is its header. A class gives it a swatch.
function writeTable(body, rows) {
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  rows.forEach(({ cells, className }, i) => {
    const row = body.rows[i] || body.appendChild(make("tr"));
    while (row.cells.length > cells.length) row.lastElementChild.remove();
    cells.forEach((text, j) => {
      const cell = row.cells[j] || row.appendChild(j ? make("td") : make("th", { scope: "row" }, make("span"), make("span")));
      write(j ? cell : cell.lastElementChild, text);
      if (!j) cell.firstElementChild.className = className ? "swatch " + className : "";
    });
  });
}

// `cells` blocks dealt out to the parts by their share; what has anything gets one, if there are blocks to take.
function blocks(parts, cells) {
  const whole = parts.reduce((all, part) => all + part.bytes, 0) || 1;
  const counts = parts.map((part) => part.bytes > 0 ? Math.max(1, Math.floor(part.bytes / whole * cells)) : 0);
  const largest = counts.indexOf(Math.max(...counts));
  counts[largest] += cells - counts.reduce((all, count) => all + count, 0);
  return parts.flatMap((part, i) => Array(counts[i]).fill(part.className));
}

function drawMap(svg, parts) {
  const [columns, rows] = [50, 5];
  blocks(parts, columns * rows).forEach((className, i) => {
    const place = { x: i % columns * 8 + 0.5, y: Math.floor(i / columns) * 10 + 0.5, width: 7, height: 9 };
    const rect = svg.children[i] || svg.appendChild(make("rect", place));
    if (rect.getAttribute("class") !== className) rect.setAttribute("class", className);
  });
}

// A picture of curves over time, with a key that holds the last values and a sentence for those who do not see it.
class Chart {
  // series: [{name, className, of: (reading) => number or null}]; stacked: areas on each other; top: upper end, or null.
  constructor(id, title, series, { stacked = false, top = () => null, show = number } = {}) {
    Object.assign(this, { id, title, series, stacked, top, show });
    this.svg = make("svg", { class: "curve", role: "img", "aria-labelledby": `${id} ${id}-text`, viewBox: "0 0 600 100", preserveAspectRatio: "none" });
    this.highest = make("span");
    this.start = make("span");
    this.key = make("ul", { class: "key" });
    this.text = make("figcaption", { id: id + "-text" });
    this.figure = make("figure", {}, make("div", { class: "ends" }, this.highest), this.svg,
      make("div", { class: "ends" }, this.start, make("span", {}, "now")), this.key, this.text);
    this.section = make("section", { "aria-labelledby": id }, make("h2", { id }, title), this.figure);
  }

  draw(past) {
    const [first, last] = [past[0].t, past.at(-1).t];
    const rows = past.map((reading) => {
      const values = this.series.map((one) => one.of(reading));
      return { x: last > first ? 600 * (reading.t - first) / (last - first) : 600, values: this.stacked ? heaped(values) : values };
    });
    const highest = Math.max(...rows.flatMap((row) => row.values.filter(isNumber)), 0);
    const top = this.top(past.at(-1)) || highest || 1;
    write(this.highest, this.show(top));
    write(this.start, ago(last - first));
    // The tallest area first: those below are painted over it.
    const order = this.series.map((_, i) => this.stacked ? this.series.length - 1 - i : i);
    order.forEach((index, place) => {
      const path = this.svg.children[place] || this.svg.appendChild(make("path"));
      path.setAttribute("class", (this.stacked ? "area " : "curve-line ") + this.series[index].className);
      path.setAttribute("d", outline(rows, index, top, this.stacked));
    });
    this.describe(past);
  }

  describe(past) {
    const said = this.series.map((one, i) => {
      const item = this.key.children[i] || this.key.appendChild(make("li", {}, make("span", { class: "swatch " + one.className }), make("span")));
      const now = this.show(one.of(past.at(-1)));
      write(item.lastElementChild, one.name + " " + now);
      const values = past.map(one.of).filter(isNumber);
      const ends = [...new Set([Math.min(...values), Math.max(...values)].map(this.show))];
      return one.name + " " + (values.length ? ends.join(" to ") : "not known yet");
    });
    write(this.text, said.join(", ") + ".");
  }
}

function heaped(values) {
  let height = 0;
  return values.map((value) => height += value || 0);
}

const ago = (ms) => ms < 90000 ? Math.round(ms / 1000) + " s ago" : Math.round(ms / 60000) + " min ago";

// Path of one series; it stops where nothing is known.
function outline(rows, index, top, filled) {
  let path = "";
  let [open, from, to] = [false, null, null];
  for (const { x, values } of rows) {
    if (!isNumber(values[index])) { open = false; continue; }
    const y = 100 - 98 * Math.min(1, values[index] / top);
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(2)}`;
    [open, from, to] = [true, from ?? x, x];
  }
  return filled && path ? `${path}L${to.toFixed(1)} 100L${from.toFixed(1)} 100Z` : path;
}

// Asks the server for its state every five seconds and draws it. Text goes in as text, never as HTML.
'use strict';

const WINDOW_MS = 15 * 60 * 1000;
const REFRESH_MS = 5000;
const NO_VALUE = '–';

function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    ++unit;
  }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function number(value) {
  if (value >= 100) return Math.round(value).toLocaleString('en');
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

const count = value => value.toLocaleString('en');
function ms(value, digits = number) {
  if (value >= 1000) return `${digits(value / 1000)} s`;
  return value >= 0.1 || value === 0 ? `${digits(value)} ms` : `${digits(value * 1000)} µs`;
}
const perSecond = value => `${number(value)}/s`;

// A quantile is {ms, sign}: "≤" says that ms is a bound, because there were few calls.
const valueOf = value => typeof value === 'object' && value !== null ? value.ms : value;
function write(value, format) {
  const plain = valueOf(value);
  return plain === null ? NO_VALUE : `${value.sign ? `${value.sign} ` : ''}${format(plain)}`;
}

// Each a caption, how to write its values, its axis, and one or two members of a point with their names.
const PLOTS = [
  ['Throughput', perSecond, 'linear', ['requests_per_s', 'requests'], ['failed_per_s', 'failed calls']],
  ['Tokens', perSecond, 'linear', ['tokens_per_s', 'tokens']],
  ['Latency', ms, 'log', ['p50', 'median'], ['p99', '99 %']],
  ['Batch', number, 'linear', ['batch_tokens', 'tokens on average']],
  ['Queue', number, 'linear', ['queued', 'requests waiting']],
  ['Time in the queue', ms, 'log', ['queue_ms', 'on average']],
  ['Process memory', bytes, 'linear', ['resident_bytes', 'resident'], ['in_flight_bytes', 'in flight']],
  ['Device memory', bytes, 'linear', ['device_bytes', 'held by awqd']],
];
// The plots' size, in units of their pictures. The values of the grid stand left of LEFT.
const WIDTH = 380, HEIGHT = 110, LEFT = 48, RIGHT = 376, TOP = 8, BOTTOM = 94;

const SVG = 'http://www.w3.org/2000/svg';

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function svg(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Where values lie from bottom (0) to top (1), and the values that have a line of the grid.
function makeAxis(kind, values) {
  if (kind === 'linear') {
    const highest = Math.max(0, ...values);
    return {place: v => highest ? v / highest : 0, marks: highest ? [highest] : []};
  }
  const exponents = values.filter(v => v > 0).map(Math.log10);
  if (!exponents.length) return {place: () => 0, marks: []};
  const low = Math.floor(Math.min(...exponents));
  const high = Math.max(low + 1, Math.ceil(Math.max(...exponents)));
  const marks = [];
  for (let exponent = low; exponent <= high; ++exponent) marks.push(10 ** exponent);
  return {place: v => Math.max(0, (Math.log10(v) - low) / (high - low)), marks};
}

// "M1,2L3,4M5,6h0": one line for each run of points that have a value.
function drawLine(points, x, y, member) {
  let path = '', open = false;
  points.forEach((point, i) => {
    const value = valueOf(point[member]);
    if (value === null) {
      open = false;
      return;
    }
    const next = points[i + 1];
    path += `${open ? 'L' : 'M'}${x(point.t).toFixed(1)},${y(value).toFixed(1)}`;
    // A point alone is a dot.
    if (!open && (!next || valueOf(next[member]) === null)) path += 'h0';
    open = true;
  });
  return path;
}

// `pointer`: the point whose values are shown, or null for the last one.
function plot([title, format, kind, ...lines], points, now, pointer) {
  const figure = make('figure');
  const caption = make('figcaption');
  const legend = make('span');
  const shown = pointer || points[points.length - 1];
  lines.forEach(([member, name], i) => {
    const value = shown ? write(shown[member], format) : NO_VALUE;
    legend.append(make('span', `${name} ${value}`, i ? 'second-word' : 'first-word'));
  });
  caption.append(make('b', title), legend);
  const axis = makeAxis(kind, points.flatMap(p => lines.map(([member]) => valueOf(p[member]))).filter(v => v !== null));
  const x = t => LEFT + (RIGHT - LEFT) * (1 - (now - t) / WINDOW_MS);
  const y = v => BOTTOM - (BOTTOM - TOP) * axis.place(v);
  const picture = svg('svg', {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': title});
  const label = (at, text) =>
      picture.append(svg('text', {x: Math.min(Math.max(at - 12, LEFT), WIDTH - 40), y: HEIGHT - 4}, text));
  for (const minutes of [15, 10, 5, 0]) {
    const at = x(now - minutes * 60000);
    picture.append(svg('line', {x1: at, x2: at, y1: TOP, y2: BOTTOM, class: 'grid'}));
    if (!pointer) label(at, minutes ? `-${minutes} min` : 'now');
  }
  for (const value of [null, ...axis.marks]) {
    const at = value === null ? BOTTOM : y(value);
    picture.append(svg('line', {x1: LEFT, x2: RIGHT, y1: at, y2: at, class: 'grid'}));
    if (value !== null) {
      const text = kind === 'log' ? format(value, v => Number(v.toPrecision(1))) : format(value);
      picture.append(svg('text', {x: LEFT - 4, y: at + 3, 'text-anchor': 'end'}, text));
    }
  }
  lines.forEach(([member], i) => {
    const className = i ? 'second' : 'first';
    picture.append(svg('path', {class: className, d: drawLine(points, x, y, member)}));
    const value = pointer ? valueOf(pointer[member]) : null;
    if (value !== null) picture.append(svg('circle', {class: className, cx: x(pointer.t), cy: y(value), r: 2.5}));
  });
  if (pointer) {
    const at = x(pointer.t);
    picture.append(svg('line', {x1: at, x2: at, y1: TOP, y2: BOTTOM, class: 'cursor'}));
    label(at, new Date(pointer.t).toLocaleTimeString());
  }
  figure.append(caption, picture);
  return figure;
}

// `columns`: [header, cell of a row, whether it is a number]. A cell is text or an element.
function table(id, columns, rows, none, isFailed = () => false) {
  const target = document.getElementById(id);
  const head = make('tr');
  for (const [header, , isNumber] of columns) head.append(make('th', header, isNumber && 'number'));
  const body = rows.map(row => {
    const line = make('tr', undefined, isFailed(row) && 'failed');
    for (const [header, cell, isNumber] of columns) {
      const value = cell(row);
      const td = make('td', undefined, isNumber && 'number');
      td.dataset.label = header;
      if (value !== '') td.append(value);
      line.append(td);
    }
    return line;
  });
  if (!rows.length) {
    const line = make('tr'), cell = make('td', none);
    cell.colSpan = columns.length;
    line.append(cell);
    body.push(line);
  }
  target.replaceChildren(head, ...body);
}

const isFailedModel = model => model.state === 'failed';

function state(model) {
  const cell = make('span', isFailedModel(model) ? 'FAILED' : model.state, isFailedModel(model) && 'bad');
  if (model.state === 'loading') {
    const bar = make('progress');
    bar.max = 1;
    bar.value = model.loaded_share;
    bar.title = `${Math.round(100 * model.loaded_share)} %`;
    cell.replaceChildren(bar);
  }
  if (model.message) cell.append(make('span', model.message, 'reason'));
  return cell;
}

// "12", or "12 (3 not served)"
const weights = model => count(model.weights) +
    (model.unserved_weights ? ` (${count(model.unserved_weights)} not served)` : '');

const held = model => Object.entries(model.bytes).map(([id, n]) => `${id} ${bytes(n)}`).join(', ');

function duration(seconds) {
  const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24;
  const minutes = Math.floor(seconds / 60) % 60;
  return `${days ? `${days} d ` : ''}${hours} h ${minutes} min`;
}

// What an operator has to look at, one text each.
function findProblems(status) {
  const failed = status.models.filter(isFailedModel).length;
  const minute = status.history.slice(-12);
  const sum = member => minute.reduce((all, point) => all + point[member], 0);
  const missed = sum('refused_per_s') + sum('lost_per_s');
  const share = missed / Math.max(1e-9, missed + sum('in_time_per_s'));
  return [
    ...(share > 0.05 ? [`Overloaded: ${Math.round(100 * share)} % of the requests of the last minute were refused or answered too late.`] : []),
    ...status.devices.filter(d => !d.healthy).map(d => `Device ${d.id} has failed.`),
    ...(failed ? [`${count(failed)} of ${count(status.models.length)} models ${failed > 1 ? 'have' : 'has'} failed; the table has the reason.`] : []),
  ];
}

let last = null;         // the server's last answer
let pointerTime = null;  // in a plot, milliseconds since 1970; null without a pointer

function showPlots() {
  if (!last) return;
  let pointer = null;
  if (pointerTime !== null) {
    const distance = point => Math.abs(point.t - pointerTime);
    pointer = last.history.reduce((a, b) => a && distance(a) <= distance(b) ? a : b, null);
  }
  document.getElementById('plots').replaceChildren(
      ...PLOTS.map(one => plot(one, last.history, last.time_ms, pointer)));
}

function movePointer(event) {
  const index = last ? [...event.currentTarget.querySelectorAll('svg')].findIndex(one => one.contains(event.target)) : -1;
  if (index < 0) {
    // A finger that is lifted leaves its values there, until it taps elsewhere.
    if (pointerTime === null || event.pointerType === 'touch' && event.type !== 'pointerdown') return;
    pointerTime = null;
  } else {
    const box = event.currentTarget.querySelectorAll('svg')[index].getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (RIGHT - LEFT);
    pointerTime = last.time_ms - WINDOW_MS * (1 - share);
  }
  showPlots();
}

function show(status) {
  last = status;
  const text = (id, value) => { document.getElementById(id).textContent = value; };
  text('version', status.version);
  text('ready', status.ready ? 'ready' : 'not ready');
  document.getElementById('ready').className = status.ready ? 'yes' : 'no';
  text('uptime', `up ${duration(status.uptime_s)}`);
  const problems = findProblems(status);
  document.getElementById('problems').replaceChildren(...problems.map(one => make('li', one)));
  document.title = problems.length ? '(!) awqd' : 'awqd';
  showPlots();
  table('models', [
    ['Model', m => m.name], ['State', state], ['Format', m => m.format],
    ['Weights', weights, true], ['Memory', held],
    ['Requests', m => count(m.requests), true],
    ['Failed', m => m.lost + m.not_computed ? make('span', count(m.lost + m.not_computed), 'bad') : '0', true],
    ['Tokens', m => count(m.tokens), true], ['Kernels', m => m.kernels.join(', ')],
  ], [...status.models].sort((a, b) => isFailedModel(b) - isFailedModel(a)), 'none is served or being loaded', isFailedModel);
  document.getElementById('lent').hidden = !status.leases;
  table('leases', [
    ['Model', l => l.model], ['Version', l => count(l.version), true], ['Client', l => l.client],
    ['Device', l => l.device], ['Age', l => duration(l.age_s), true], ['Memory', l => bytes(l.bytes), true],
  ], status.leases || [], 'nobody has one');
  table('devices', [
    ['Device', d => d.id], ['Name', d => d.name],
    ['State', d => d.healthy ? 'healthy' : make('span', 'FAILED', 'bad')],
    ['Held', d => bytes(d.used_bytes), true], ['Weights', d => bytes(d.weights_bytes), true],
    ['Free', d => bytes(d.free_bytes), true], ['Memory', d => bytes(d.memory_bytes), true],
    ['Staging', d => bytes(d.staging_bytes), true],
    ['Waiting', d => `${count(d.queued)} of ${count(status.queue_limit_requests)}`, true],
    ['Batches', d => count(d.batches), true], ['Tokens', d => count(d.tokens), true],
  ], status.devices, 'there is none', d => !d.healthy);
  table('kernels', [
    ['Kernels of a batch', k => k.kernel], ['Device', k => k.device],
    ['Batches', k => count(k.batches), true], ['Time', k => `${number(k.compute_s)} s`, true],
    ['Of a batch', k => ms(1000 * k.compute_s / Math.max(1, k.batches)), true],
  ], status.devices.flatMap(d => d.kernels.map(k => ({device: d.id, ...k}))), 'none has run yet');
  table('methods', [
    ['Method', m => m.method], ['Calls', m => count(m.started), true],
    ['Ended', m => Object.entries(m.codes).map(([code, n]) => `${code} ${count(n)}`).join(', ')],
    ['Median', m => write(m.p50, ms), true], ['99 %', m => write(m.p99, ms), true],
  ], status.methods, 'none came yet');
}

// `reason`: "" while the server answers.
function showGone(reason) {
  document.body.classList.toggle('gone', reason !== '');
  document.getElementById('error').textContent = reason;
  if (!reason) return;
  document.title = '(gone) awqd';
  document.getElementById('ready').textContent = '';
}

async function refresh() {
  try {
    const answer = await fetch('/api/status', {cache: 'no-store', signal: AbortSignal.timeout(REFRESH_MS)});
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    show(await answer.json());
    showGone('');
  } catch (e) {
    const since = last ? ` All below is of ${new Date(last.time_ms).toLocaleTimeString()}.` : '';
    showGone(`No answer: ${e.message}.${since}`);
  }
  setTimeout(refresh, REFRESH_MS);
}

const plots = document.getElementById('plots');
for (const type of ['pointermove', 'pointerdown', 'pointerleave']) plots.addEventListener(type, movePointer);
refresh();

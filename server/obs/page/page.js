// Asks the server for its state every five seconds and draws it. Text goes in as text, never as HTML.
'use strict';

const WINDOW_MS = 15 * 60 * 1000;
const REFRESH_MS = 5000;

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
const ms = value => `${number(value)} ms`;

// Each a caption, how to write its values, and one or two members of a point with their names.
const PLOTS = [
  ['Throughput', v => `${number(v)}/s`, ['requests_per_s', 'requests'], ['failed_per_s', 'failed calls']],
  ['Tokens', v => `${number(v)}/s`, ['tokens_per_s', 'tokens']],
  ['Latency', ms, ['p50_ms', 'median'], ['p99_ms', '99 %']],
  ['Batch', number, ['batch_tokens', 'tokens on average']],
  ['Queue', number, ['queued', 'requests waiting']],
  ['Time in the queue', ms, ['queue_ms', 'on average']],
  ['Process memory', bytes, ['resident_bytes', 'resident'], ['in_flight_bytes', 'in flight']],
  ['Device memory', bytes, ['device_bytes', 'taken']],
];

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

function plot([title, format, ...lines], points, now) {
  const width = 360, height = 110, left = 4, bottom = 94, top = 14;
  const figure = make('figure');
  const caption = make('figcaption');
  caption.append(make('b', title));
  const legend = make('span');
  lines.forEach(([member, name], i) => {
    const last = points.length ? format(points[points.length - 1][member]) : 'no value yet';
    legend.append(make('span', `${i ? '  ' : ''}${name} ${last}`, i ? 'second-word' : 'first-word'));
  });
  caption.append(legend);
  const highest = Math.max(1e-9, ...points.flatMap(p => lines.map(([member]) => p[member])));
  const x = t => left + (width - 2 * left) * (1 - (now - t) / WINDOW_MS);
  const y = v => bottom - (bottom - top) * v / highest;
  const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': title});
  for (const minutes of [15, 10, 5, 0]) {
    const at = x(now - minutes * 60000);
    picture.append(svg('line', {x1: at, x2: at, y1: top, y2: bottom, class: 'grid'}));
    picture.append(svg('text', {x: Math.min(Math.max(at - 12, 0), width - 24), y: height - 4},
                       minutes ? `-${minutes} min` : 'now'));
  }
  picture.append(svg('line', {x1: left, x2: width - left, y1: bottom, y2: bottom, class: 'grid'}));
  if (points.length) picture.append(svg('text', {x: left, y: 10}, format(highest)));
  lines.forEach(([member], i) => {
    picture.append(svg('polyline', {
      class: i ? 'second' : 'first',
      points: points.map(p => `${x(p.t).toFixed(1)},${y(p[member]).toFixed(1)}`).join(' '),
    }));
  });
  figure.append(caption, picture);
  return figure;
}

// `columns`: [header, cell of a row, whether it is a number]. A cell is text or an element.
function table(id, columns, rows, none) {
  const target = document.getElementById(id);
  const head = make('tr');
  for (const [header, , isNumber] of columns) head.append(make('th', header, isNumber && 'number'));
  const body = rows.map(row => {
    const line = make('tr');
    for (const [, cell, isNumber] of columns) {
      const value = cell(row);
      const td = make('td', undefined, isNumber && 'number');
      td.append(value);
      line.append(td);
    }
    return line;
  });
  if (!rows.length) body.push(make('tr'), make('td', none));
  target.replaceChildren(head, ...body);
}

function state(model) {
  if (model.state !== 'loading') return model.state;
  const bar = make('progress');
  bar.max = 1;
  bar.value = model.loaded_share;
  bar.title = `${Math.round(100 * model.loaded_share)} %`;
  return bar;
}

const held = model => Object.entries(model.bytes).map(([id, n]) => `${id} ${bytes(n)}`).join(', ');

function duration(seconds) {
  const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24;
  const minutes = Math.floor(seconds / 60) % 60;
  return `up ${days ? `${days} d ` : ''}${hours} h ${minutes} min`;
}

function show(status) {
  const text = (id, value) => { document.getElementById(id).textContent = value; };
  text('version', status.version);
  text('ready', status.ready ? 'ready' : 'not ready');
  document.getElementById('ready').className = status.ready ? 'yes' : 'no';
  text('uptime', duration(status.uptime_s));
  document.getElementById('plots').replaceChildren(
      ...PLOTS.map(one => plot(one, status.history, status.time_ms)));
  table('models', [
    ['Model', m => m.name], ['State', state], ['Format', m => m.format],
    ['Weights', m => count(m.weights), true], ['Memory', held],
    ['Requests', m => count(m.requests), true], ['Tokens', m => count(m.tokens), true],
    ['Kernels', m => m.kernels.join(', ')],
  ], status.models, 'none is served or being loaded');
  table('devices', [
    ['Device', d => d.id], ['Name', d => d.name], ['State', d => d.healthy ? 'healthy' : 'FAILED'],
    ['Memory', d => bytes(d.memory_bytes), true], ['Free', d => bytes(d.free_bytes), true],
    ['Weights', d => bytes(d.weights_bytes), true], ['Staging', d => bytes(d.staging_bytes), true],
    ['Waiting', d => `${count(d.queued)} of ${count(status.queue_limit_requests)}`, true],
    ['Batches', d => count(d.batches), true], ['Tokens', d => count(d.tokens), true],
  ], status.devices, 'none');
  table('kernels', [
    ['Kernels of a batch', k => k.kernel], ['Device', k => k.device],
    ['Batches', k => count(k.batches), true], ['Time', k => `${number(k.compute_s)} s`, true],
    ['Of a batch', k => ms(1000 * k.compute_s / Math.max(1, k.batches)), true],
  ], status.devices.flatMap(d => d.kernels.map(k => ({device: d.id, ...k}))), 'none has run yet');
  table('methods', [
    ['Method', m => m.method], ['Calls', m => count(m.started), true],
    ['Ended', m => Object.entries(m.codes).map(([code, n]) => `${code} ${count(n)}`).join(', ')],
    ['Median', m => ms(m.p50_ms), true], ['99 %', m => ms(m.p99_ms), true],
  ], status.methods, 'none came yet');
}

async function refresh() {
  const error = document.getElementById('error');
  try {
    const answer = await fetch('/api/status', {cache: 'no-store'});
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    show(await answer.json());
    error.textContent = '';
  } catch (e) {
    error.textContent = `no answer: ${e.message}`;
  }
  setTimeout(refresh, REFRESH_MS);
}

refresh();

'use strict';
const read = id => JSON.parse(document.getElementById(id).textContent);
const report = read('report');
const narrow = window.matchMedia('(max-width: 40rem)');
const CONFIG = {
  background: 'transparent', font: 'system-ui, sans-serif', view: {stroke: null},
  axis: {labelFontSize: 12, titleFontSize: 12, titleFontWeight: 'normal'},
  legend: {orient: 'bottom', labelFontSize: 12, symbolType: 'circle', symbolOpacity: 1},
  line: {strokeWidth: 2}, bar: {discreteBandSize: 16}, text: {fontSize: 11}, rule: {color: 'black'},
};

function draw(id, spec) {
  const config = {...CONFIG, axisY: {labelLimit: narrow.matches ? 140 : 240},
    axisX: {labelOverlap: true, labelSeparation: 6, tickCount: narrow.matches ? 5 : 10}};
  config.legend = {...CONFIG.legend, columns: narrow.matches ? 2 : 4, labelLimit: narrow.matches ? 130 : 200};
  const place = document.getElementById(`plot-${id}`);
  return vegaEmbed(place, spec, {renderer: 'svg', actions: false, config})
    .catch(error => { place.textContent = `This plot could not be drawn: ${error.message}`; console.error(error); });
}
const specs = read('specs');
// What is folded has no width yet: it is drawn when it opens.
const open = id => !document.getElementById(`plot-${id}`).closest('details:not([open])');
const drawAll = () => Promise.all(Object.entries(specs).filter(([id]) => open(id)).map(([id, spec]) => draw(id, spec)));
drawAll().then(() => { document.body.dataset.drawn = Object.keys(specs).length; });
narrow.addEventListener('change', drawAll);
for (const fold of document.querySelectorAll('details.fold')) fold.addEventListener('toggle', () => {
  for (const plot of fold.open ? fold.querySelectorAll('.plot:empty') : []) draw(plot.id.slice(5), specs[plot.id.slice(5)]);
});
function unfold() {
  const fold = document.getElementById(location.hash.slice(1))?.querySelector(':scope > details.fold');
  if (fold) fold.open = true;
}
window.addEventListener('hashchange', unfold);
unfold();

const values = cell => JSON.parse(cell.dataset.values);
const missing = value => value === null || value === undefined;

function compare(a, b, sign) {
  if (missing(a) || missing(b)) return missing(a) - missing(b);  // what was not measured stands last either way
  return sign * (typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b)));
}

for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const words = [...body.rows].some(row => values(row.cells[index]).some(value => typeof value === 'string'));
    if (words) for (const cell of [head, ...[...body.rows].map(row => row.cells[index])]) cell.classList.add('word');
    head.firstElementChild.addEventListener('click', () => {
      const first = words ? 'ascending' : 'descending';  // of numbers the greatest are looked for
      const other = words ? 'descending' : 'ascending';
      const order = head.getAttribute('aria-sort') === first ? other : first;
      const sign = order === 'ascending' ? 1 : -1;
      for (const each of heads) each.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', order);
      const key = row => values(row.cells[index])[0];
      body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b), sign)));
    });
  });
}

function csv(table) {
  // A quote before = + - @ keeps a spreadsheet from taking a name for a formula.
  const field = value => {
    if (missing(value)) return '';
    if (typeof value !== 'string') return String(value);
    return `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  };
  const lines = [[...table.tHead.rows[0].cells].flatMap(head => JSON.parse(head.dataset.names))];
  for (const row of table.tBodies[0].rows) lines.push([...row.cells].flatMap(values));
  return lines.map(line => line.map(field).join(',')).join('\r\n') + '\r\n';
}

function save(name, text, type) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const button of document.querySelectorAll('button.csv')) {
  const id = button.dataset.table;
  button.addEventListener('click', () => save(`${id}.csv`, csv(document.getElementById(`table-${id}`)), 'text/csv'));
}
document.getElementById('json').addEventListener(
  'click', () => save('report.json', JSON.stringify(report, null, 1), 'application/json'));

const told = document.getElementById('piece');
const pieces = new Map();
document.querySelectorAll('pre.answer').forEach((text, place) => {
  const answer = report.answers[place];
  [...text.children].forEach((span, index) => {
    span.tabIndex = -1;
    pieces.set(span, [answer.pieces[index], answer.steps]);
  });
});

const quoted = text => `“${text.replaceAll('\n', '⏎').replaceAll('\t', '⇥')}”`;
const chance = value => value > 0 && value < 0.001 ? '<0.001' : value.toFixed(3);

function lines({text, source, step, p, q, top}, steps) {
  const who = document.querySelector(`#answers p .${source}`).textContent;
  const pass = step ? `, pass ${step}: ${steps[step - 1][0]} drafted, ${steps[step - 1][1]} accepted` : '';
  const known = [['target', p], ['head', q]].filter(([, value]) => !missing(value));
  return [`${quoted(text)} ${who}${pass}`, known.map(([name, value]) => `${name} ${chance(value)}`).join(', '),
    'likeliest: ' + top.map(([other, share]) => `${quoted(other)} ${chance(share)}`).join(', ')];
}

let current = null;
function place() {
  if (!current || narrow.matches) { told.style.translate = ''; return; }  // a phone has it at the bottom
  const piece = current.getClientRects()[0], own = told.getBoundingClientRect();
  const below = piece.bottom + 6, left = Math.min(piece.left, document.documentElement.clientWidth - own.width - 8);
  const top = below + own.height > window.innerHeight ? piece.top - own.height - 6 : below;
  told.style.translate = `${Math.max(8, left)}px ${top}px`;
}

function tell(span) {
  current = pieces.has(span) ? span : null;
  told.replaceChildren(...(current ? lines(...pieces.get(span)) : []).map(line => {
    const part = document.createElement('div');
    part.textContent = line;
    return part;
  }));
  place();
}

if (told) {
  for (const event of ['pointerover', 'click', 'focusin'])
    document.addEventListener(event, ({target}) => tell(target.closest?.('pre.answer span')));
  document.addEventListener('scroll', place, {passive: true});
  document.addEventListener('keydown', event => {
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    const text = event.target.closest?.('pre.answer');
    if (!text || !move) return;
    event.preventDefault();
    const next = [...text.children].indexOf(event.target) + move;
    text.children[Math.min(Math.max(next, 0), text.children.length - 1)]?.focus();
  });
}

// The plotting library shows its tooltips as a pointer moves; a finger that taps does not.
document.addEventListener('click', event => {
  if (event.target.closest?.('.plot svg')) event.target.dispatchEvent(new PointerEvent('pointermove', event));
  else document.getElementById('vg-tooltip-element')?.classList.remove('visible');
});

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
const drawAll = () => Promise.all(Object.entries(specs).map(([id, spec]) => draw(id, spec)));
drawAll().then(() => { document.body.dataset.drawn = Object.keys(specs).length; });
narrow.addEventListener('change', drawAll);

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

const told = document.querySelector('output');
for (const event of told ? ['pointerover', 'click'] : [])
  document.addEventListener(event, ({target}) => {
    told.textContent = target.closest?.('pre.answer span')?.title ?? '';
  });

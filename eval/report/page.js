'use strict';
const read = id => JSON.parse(document.getElementById(id).textContent);
const report = read('report');
const narrow = window.matchMedia('(max-width: 40rem)');
const TOOLTIP = {tooltip: {content: 'data'}};
const CONFIG = {
  background: 'transparent', font: 'system-ui, sans-serif', view: {stroke: null},
  axis: {labelFontSize: 12, titleFontSize: 12, titleFontWeight: 'normal'},
  legend: {orient: 'bottom', labelFontSize: 12, symbolType: 'circle', symbolOpacity: 1},
  line: {strokeWidth: 2, ...TOOLTIP}, point: TOOLTIP, bar: {discreteBandSize: 16, ...TOOLTIP}, rule: {color: 'black'},
};

const NAME = {field: 'name', type: 'nominal', title: null, sort: null};
const BAR = 26;  // pixels of a horizontal bar with its gap
const axis = (field, title, more) => ({field, type: 'quantitative', title, ...more});
const layer = (mark, encoding) => ({mark, encoding});
const baseline = name => layer({type: 'rule', strokeDash: [4, 4], opacity: 0.6}, {[name]: {datum: 1}});
const line = (x, y) => layer({type: 'line', point: {size: 60}}, {x, y, color: NAME});
const lineWithInterval = (x, y) => [
  layer({type: 'rule', opacity: 0.5}, {x, color: NAME, y: {...y, field: 'low'}, y2: {field: 'high'}}), line(x, y),
];
const measured = (rows, field) => ({values: [...new Set(rows.map(row => row[field]))].sort((a, b) => a - b), format: 'd'});
// The layers of each section's plot, given its records.
const PLOTS = {
  results: rows => {
    const color = {...NAME, field: 'drafter', legend: null};
    const x = axis('speedup', 'speedup', {scale: {zero: true}});
    return {height: BAR * rows.length, layer: [baseline('x'),
      layer({type: 'rule', strokeWidth: 3}, {x: {...x, field: 'low'}, x2: {field: 'high'}, y: NAME, color}),
      layer({type: 'point', filled: true, size: 90, opacity: 1}, {x, y: NAME, color})]};
  },
  depths: rows => ({layer: [line(axis('depth', 'depth d', {axis: measured(rows, 'depth')}),
    axis('accepted', 'P(a ≥ d)', {scale: {domain: [0, 1]}}))]}),
  load: rows => {
    const sizes = measured(rows, 'batch size');
    const x = axis('batch size', 'batch size', {scale: {type: 'log', base: 2, padding: 12}, axis: sizes});
    return {layer: [baseline('y'), ...lineWithInterval(x, axis('speedup', 'speedup', {scale: {zero: true}}))]};
  },
  times: rows => ({height: Math.floor(BAR * rows.length / 3), layer: [layer('bar', {y: NAME, x: axis('ms', 'ms a pass'),
    color: {...NAME, field: 'activity'}, order: {field: 'order', type: 'quantitative'}})]}),
  training: rows => {
    const x = axis('step', 'step');
    const layers = {
      loss: layer('line', {x, y: axis('loss', 'loss', {scale: {zero: false}}), color: NAME}),
      tau: {layer: lineWithInterval(x, axis('tau', 'τ', {scale: {zero: false}, axis: {orient: 'right', grid: false}}))},
    };
    return {resolve: {scale: {y: 'independent'}}, layer: Object.entries(layers)
      .filter(([field]) => rows.some(row => field in row))
      .map(([field, one]) => ({...one, transform: [{filter: {field, valid: true}}]}))};
  },
};
const whole = (id, spec) => ({width: 'container', height: 260, autosize: {type: 'fit-x', contains: 'padding'},
  ...PLOTS[id](spec.data.values), ...spec});

function draw(id, spec) {
  const config = {...CONFIG, axisY: {labelLimit: narrow.matches ? 140 : 240},
    axisX: {labelOverlap: true, labelSeparation: 6, tickCount: narrow.matches ? 5 : 10}};
  config.legend = {...CONFIG.legend, columns: narrow.matches ? 2 : 4, labelLimit: narrow.matches ? 130 : 200};
  const place = document.getElementById(`plot-${id}`);
  return vegaEmbed(place, whole(id, spec), {renderer: 'svg', actions: false, config})
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

const missing = text => ['-', '', 'withheld'].includes(text);
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const text = row => row.cells[index].textContent;
    const words = [...body.rows].some(row => !missing(text(row)) && Number.isNaN(parseFloat(text(row))));
    if (words) for (const cell of [head, ...[...body.rows].map(row => row.cells[index])]) cell.classList.add('word');
    head.firstElementChild.addEventListener('click', () => {
      const first = words ? 'ascending' : 'descending';  // of numbers the greatest are looked for
      const other = words ? 'descending' : 'ascending';
      const order = head.getAttribute('aria-sort') === first ? other : first;
      const sign = order === 'ascending' ? 1 : -1;
      for (const each of heads) each.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', order);
      const compare = (a, b) => missing(a) || missing(b) ? missing(a) - missing(b)  // what was not measured comes last
        : sign * (words ? a.localeCompare(b) : parseFloat(a) - parseFloat(b));
      body.append(...[...body.rows].sort((a, b) => compare(text(a), text(b))));
    });
  });
}

document.getElementById('json').addEventListener('click', () => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([JSON.stringify(report, null, 1)], {type: 'application/json'}));
  link.download = 'report.json';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

// The plotting library shows its tooltips as a pointer moves; a finger that taps does not.
document.addEventListener('click', event => {
  if (event.target.closest?.('.plot svg')) event.target.dispatchEvent(new PointerEvent('pointermove', event));
  else document.getElementById('vg-tooltip-element')?.classList.remove('visible');
});

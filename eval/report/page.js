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

const UNITS = {B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824};
const NUMBER = /^[-+]?[\d.,]+(?:e[-+]?\d+)?(?: (B|KiB|MiB|GiB|dB|%|ms|\/s))?$/;

// What a cell is sorted by: a number, null where nothing is known, or undefined for words.
function value(text) {
  if (text === "" || text === "-") return null;
  if (text === "exact" || text === "inf") return Infinity;
  if (text === "NaN" || text === "nan") return -Infinity;
  const found = NUMBER.exec(text);
  return found ? parseFloat(text.replace(/,/g, "")) * (UNITS[found[1]] || 1) : undefined;
}

function sort(table, column, order) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map(row => {
    const text = row.cells[column].textContent.trim();
    return {row, text, key: value(text)};
  });
  const words = rows.some(one => one.key === undefined);
  const empty = one => words ? one.text === "" || one.text === "-" : one.key === null;
  rows.sort((a, b) => {
    if (order === 0) return a.row.dataset.at - b.row.dataset.at;
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    if (words) return order * a.text.localeCompare(b.text, undefined, {numeric: true});
    return a.key === b.key ? 0 : order * (a.key < b.key ? -1 : 1);
  });
  body.append(...rows.map(one => one.row));
}

function sortable(table) {
  [...table.tBodies[0].rows].forEach((row, at) => { row.dataset.at = at; });
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (table.tBodies[0].querySelector(`td:nth-child(${column + 1}) svg`)) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.title = "Sort by this column; again turns it round, a third time undoes it";
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const order = now === "ascending" ? -1 : now === "descending" ? 0 : 1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
      sort(table, column, order);
    });
    head.replaceChildren(button);
  });
}

function filterable(table) {
  const box = document.createElement("input"), count = document.createElement("span");
  const holder = document.createElement("p"), place = table.parentElement;
  const rows = [...table.tBodies[0].rows], cut = place.nextElementSibling;
  box.type = "search";
  box.placeholder = "filter rows";
  box.setAttribute("aria-label", "Show only the rows of this table that hold these words");
  count.setAttribute("role", "status");
  holder.className = "filter";
  holder.append(box, count);
  place.before(holder);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    if (cut && cut.className === "unprinted") {
      cut.hidden = shown <= PRINTED;
      cut.firstElementChild.textContent = shown - PRINTED;
    }
  });
}

// A link of the contents opens what it leads to.
function reveal() {
  const aim = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = aim && aim.closest("details");
  if (fold) { fold.open = true; aim.scrollIntoView(); }
}

for (const table of document.querySelectorAll("table:not(.engines)")) {
  const rows = table.tBodies[0].rows.length;
  if (rows > 1) sortable(table);
  if (rows > FILTERED) filterable(table);
}
addEventListener("hashchange", reveal);
reveal();

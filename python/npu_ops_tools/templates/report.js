// Makes tables sortable and filterable, and opens the op that a link points to. The page is readable
// without this script.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.matches("details")) target.open = true;
};
addEventListener("hashchange", unfold);
unfold();
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => {
      const x = value(a), y = value(b), both = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      return both ? x - y : x === "" ? 1 : y === "" ? -1 : x.localeCompare(y);
    };
    body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
  }));
  const filters = table.parentElement.querySelector(".filters");
  if (!filters) continue;
  filters.hidden = false;
  const [text, provider] = filters.querySelectorAll("input, select");
  const said = filters.querySelector("output");
  const apply = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !(words.every(word => content.includes(word)) &&
        (!provider.value || row.dataset.provider === provider.value));
      shown += !row.hidden;
    }
    said.textContent = `${shown} of ${body.rows.length} rows`;
  };
  text.addEventListener("input", apply);
  provider.addEventListener("change", apply);
}

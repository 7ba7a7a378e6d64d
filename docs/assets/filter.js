// A field above the tables of operators: leaves the rows, and in them the operators, whose name holds what is typed.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector("[data-filter]");
  if (!place) return;

  const headings = (table) => [...table.querySelectorAll("th")].map((cell) => cell.textContent);
  const tables = [...document.querySelectorAll(".md-content table")].filter((table) => {
    const first = headings(table)[0];
    return first === "rule" || first === "why";
  });
  const rows = tables.flatMap((table) => {
    const prose = headings(table).map((heading) => ["rule", "why", "what happens"].includes(heading));
    return [...table.tBodies[0].rows].map((row) => ({
      row,
      operators: [...row.cells].filter((_, column) => !prose[column]).flatMap((cell) => [...cell.querySelectorAll("code")]),
    }));
  });

  const field = document.createElement("input");
  const shown = document.createElement("output");
  field.type = "search";
  field.placeholder = "an operator: softmax, conv2d, ...";
  field.setAttribute("aria-label", "show only operators whose name holds");
  place.append(field, shown);

  const filter = () => {
    const wanted = field.value.trim().toLowerCase().replace(/^aten::/, "");
    const found = new Set();
    for (const { row, operators } of rows) {
      const hits = operators.filter((code) => code.textContent.toLowerCase().includes(wanted));
      for (const code of operators) {
        code.hidden = !hits.includes(code);
        code.classList.toggle("found", wanted !== "" && !code.hidden);
      }
      hits.forEach((code) => found.add(code.textContent));
      row.hidden = wanted !== "" && !hits.length;
    }
    for (const table of tables) table.hidden = [...table.tBodies[0].rows].every((row) => row.hidden);
    const none = "no list names one; it runs in the dtype of its inputs, or is made of others";
    shown.value = wanted === "" ? "" : found.size ? `${found.size} operator${found.size > 1 ? "s" : ""}` : none;
    history.replaceState(null, "", wanted === "" ? location.pathname : `?operator=${encodeURIComponent(wanted)}`);
  };
  field.addEventListener("input", filter);
  field.value = new URLSearchParams(location.search).get("operator") ?? "";
  if (field.value) filter();
});

// The fields of a table's columns, and the features that the network gets, as `data/table_encoder.py` makes them.
const DAY = 86400000, EPOCH = Date.UTC(2000, 0, 1), SATURDAY = 5, WEEK = 7, YEAR = 365.2425;
const fields = document.getElementById("fields");
const EMPTY = "(empty)", OTHER = "(other)";

const dateText = days => new Date(EPOCH + days * DAY).toISOString().slice(0, 10);

function element(tag, properties, parent) {
  const made = Object.assign(document.createElement(tag), properties);
  return parent.appendChild(made);
}

// The row of a column: its name, and what gives the value.
function build(column) {
  const row = element("div", {className: "row"}, fields), {low, high, step, start} = column;
  const id = `field-${fields.children.length}`;
  element("label", {textContent: column.name, title: column.name, htmlFor: id}, row);
  if (column.kind == "category") {
    column.input = element("select", {id}, row);
    for (const text of [...column.categories, OTHER, ...(column.fill ? [EMPTY] : [])])
      element("option", {textContent: text}, column.input);
  } else if (column.kind == "date") {
    column.input = element("input", {id, type: "date", value: dateText(start)}, row);
  } else {
    const slider = element("input", {type: "range", min: low, max: high, step, value: start, ariaLabel: column.name}, row);
    column.input = element("input", {id, type: "number", step: "any", value: start}, row);
    slider.addEventListener("input", () => (column.input.value = slider.value));
    column.input.addEventListener("input", () => (slider.value = column.input.value));
  }
}

// The features of a column; null where the field has no value and must have one.
function features(column) {
  const {input, kind, fill, width} = column;
  if (kind == "category") {
    const chosen = input.selectedIndex, known = chosen < column.categories.length;
    if (input.value == EMPTY && chosen > column.categories.length) return fill;
    if (width == 1 && about.indexed) return [known ? chosen + 1 : 0];
    return Array.from({length: width}, (_, i) => (known && i == chosen ? 1 : 0));
  }
  if (input.value == "" || !isFinite(input.valueAsNumber)) return fill;
  if (kind == "number") return [input.valueAsNumber];
  const days = (input.valueAsNumber - EPOCH) / DAY;
  const angles = [(days + SATURDAY) / WEEK, days / YEAR].map(x => 2 * Math.PI * x);
  return [days, ...angles.flatMap(x => [Math.sin(x), Math.cos(x)])];
}

function update() {
  const found = about.columns.map(features), lacking = found.findIndex(x => x === null);
  status.textContent = lacking < 0 ? "" : `${about.columns[lacking].name}: expected a value`;
  if (lacking >= 0) return;
  const {outputs, best, layer} = predict(found.flat());
  showBars(outputs, best);
  showLayer(layer);
}

function begin() {
  about.columns.forEach(build);
  fields.addEventListener("input", update);
  update();
}

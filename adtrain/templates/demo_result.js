// Shows what the network gives: bars of probabilities, or numbers, and the first layer.
const status = document.getElementById("status"), bars = document.getElementById("bars"), maps = document.getElementById("maps");
const {labels, first} = about, BARS = 20;

// `names` are those of the outputs; a number has no bar.
function showBars(outputs, best, names = labels) {
  const shown = outputs.map((p, i) => i).sort((a, b) => outputs[b] - outputs[a]).slice(0, BARS);
  if (names.length <= BARS) shown.sort((a, b) => a - b);
  while (bars.children.length > shown.length) bars.lastChild.remove();
  while (bars.children.length < shown.length) {
    const row = bars.appendChild(document.createElement("li"));
    for (const tag of ["b", "i", "span"]) row.appendChild(document.createElement(tag));
  }
  shown.forEach((label, i) => {
    const row = bars.children[i], [name, bar, number] = row.children;
    name.textContent = name.title = names[label];
    bar.style.setProperty("--share", about.areNumbers ? "0" : outputs[label].toFixed(4));
    number.textContent = about.areNumbers ? shortest(outputs[label]) : (100 * outputs[label]).toFixed(1) + "%";
    row.classList.toggle("best", label == best && !about.areNumbers);
  });
}

const shortest = x => Number(x.toPrecision(6)).toLocaleString("en", {maximumSignificantDigits: 6});

// Images of the channels, or one image of all numbers.
function showLayer(numbers) {
  const [rows, columns] = first.length == 3 ? first.slice(1) : first.length == 2 ? first : grid(numbers.length);
  const count = first.length == 3 ? Math.min(first[0], 64) : 1, size = rows * columns;
  const most = numbers.reduce((most, x) => Math.max(most, Math.abs(x)), 1e-9);
  maps.classList.toggle("single", count == 1);
  while (maps.children.length < count) maps.appendChild(field(columns, rows).canvas);
  for (let map = 0; map < count; map++) {
    const context = maps.children[map].getContext("2d"), image = context.createImageData(columns, rows);
    for (let i = 0; i < size && map * size + i < numbers.length; i++) {
      const x = numbers[map * size + i], colour = x < 0 ? [230, 120, 40] : [50, 120, 220];
      image.data.set([...colour, 255 * Math.abs(x) / most], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }
}

function grid(count) {
  const columns = Math.ceil(Math.sqrt(2 * count));
  return [Math.ceil(count / columns), columns];
}

// A canvas in memory of this size.
function field(columns, rows) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.imageSmoothingQuality = "high";
  return {canvas, context};
}

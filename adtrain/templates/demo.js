// Runs the network on the drawing. `about` describes the network, `program` is its WebAssembly in base 64.
const pad = document.getElementById("pad"), seen = document.getElementById("seen");
const status = document.getElementById("status"), bars = document.getElementById("bars"), maps = document.getElementById("maps");
const pen = pad.getContext("2d", {willReadFrequently: true}), view = seen.getContext("2d", {willReadFrequently: true});
const {channels, height, width, labels, first} = about, BARS = 20, COUNT = channels * height * width;
const BOX = 20 / 28; // the longer side of a digit in MNIST, as a part of the image's
let given = null; // the pixels of a dropped file that need no scaling
let network = null, waiting = false;

async function start() {
  const bytes = Uint8Array.from(atob(program), c => c.charCodeAt(0));
  network = (await WebAssembly.instantiate(bytes)).instance.exports;
  clear();
}

function clear() {
  given = null;
  pen.fillStyle = "black";
  pen.fillRect(0, 0, pad.width, pad.height);
  update();
}

// The network's answer to the pixels: COUNT numbers from 0 to 255, channel by channel.
function predict(pixels) {
  new Uint8Array(network.memory.buffer, network.image(), pixels.length).set(pixels);
  const best = network.predict();
  const numbers = count => pointer => Array.from(new Float32Array(network.memory.buffer, pointer, count));
  const layer = numbers(first.reduce((a, b) => a * b))(network.first_layer());
  return {best, probabilities: numbers(labels.length)(network.outputs()), layer};
}

function update() {
  waiting = false;
  const pixels = given || drawing();
  put(view, pixels);
  const found = predict(pixels);
  showBars(found);
  showLayer(found.layer);
}

function updateSoon() {
  if (!waiting) requestAnimationFrame(update);
  waiting = true;
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

// The pixels of a field as the network gets them: grey, or all of red, then all of green and of blue.
function pixelsOf(context, columns, rows) {
  if (channels == 1) return grey(context, columns, rows);
  const {data} = context.getImageData(0, 0, columns, rows), size = columns * rows;
  return Uint8Array.from({length: channels * size}, (_, i) => data[4 * (i % size) + Math.floor(i / size)]);
}

// Draws such pixels, of the network's size.
function put(context, pixels) {
  const image = context.createImageData(width, height), size = height * width;
  for (let i = 0; i < size; i++)
    image.data.set([...[0, 1, 2].map(k => pixels[(channels == 1 ? 0 : k) * size + i]), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

function grey(context, columns, rows) {
  const {data} = context.getImageData(0, 0, columns, rows), pixels = new Uint8Array(columns * rows);
  for (let i = 0; i < pixels.length; i++)
    pixels[i] = (data[4 * i] * 299 + data[4 * i + 1] * 587 + data[4 * i + 2] * 114) / 1000;
  return pixels;
}

// The drawing as the network's input: scaled, or for digits of MNIST cut out, scaled and placed by its centre of mass.
function drawing() {
  if (!about.centred) {
    const small = field(width, height);
    small.context.drawImage(pad, 0, 0, width, height);
    return pixelsOf(small.context, width, height);
  }
  const ink = grey(pen, pad.width, pad.height);
  let top = pad.height, left = pad.width, bottom = -1, right = -1;
  ink.forEach((value, i) => {
    if (value < 64) return;
    const row = Math.floor(i / pad.width), column = i % pad.width;
    [top, bottom] = [Math.min(top, row), Math.max(bottom, row)];
    [left, right] = [Math.min(left, column), Math.max(right, column)];
  });
  const image = new Uint8Array(height * width);
  if (bottom < 0) return image;
  const wide = right - left + 1, high = bottom - top + 1;
  const scale = Math.min(BOX * height / high, BOX * width / wide);
  const columns = Math.max(1, Math.round(wide * scale)), rows = Math.max(1, Math.round(high * scale));
  const digit = averaged(ink, left, top, wide, high, columns, rows);
  let total = 0, x = 0, y = 0;
  digit.forEach((value, i) => {
    total += value;
    x += value * (i % columns);
    y += value * Math.floor(i / columns);
  });
  const place = (length, mass, extent) =>
    Math.min(Math.max(Math.round(length / 2 - 0.5 - mass / Math.max(total, 1)), 0), length - extent);
  const down = place(height, y, rows), across = place(width, x, columns);
  digit.forEach((value, i) => (image[(down + Math.floor(i / columns)) * width + across + i % columns] = value));
  return image;
}

// A part of the drawing, scaled down: each pixel is the mean of those that it covers.
function averaged(ink, left, top, wide, high, columns, rows) {
  const image = new Uint8Array(rows * columns);
  for (let i = 0; i < image.length; i++) {
    const row = Math.floor(i / columns), column = i % columns;
    const y0 = Math.floor(row * high / rows), y1 = Math.max(y0 + 1, Math.floor((row + 1) * high / rows));
    const x0 = Math.floor(column * wide / columns), x1 = Math.max(x0 + 1, Math.floor((column + 1) * wide / columns));
    let sum = 0;
    for (let y = y0; y < y1; y++) for (let x = x0; x < x1; x++) sum += ink[(top + y) * pad.width + left + x];
    image[i] = sum / ((y1 - y0) * (x1 - x0));
  }
  return image;
}

function showBars({best, probabilities}) {
  const shown = probabilities.map((p, i) => i).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, BARS);
  if (labels.length <= BARS) shown.sort((a, b) => a - b);
  while (bars.children.length < shown.length) {
    const row = bars.appendChild(document.createElement("li"));
    for (const tag of ["b", "i", "span"]) row.appendChild(document.createElement(tag));
  }
  shown.forEach((label, i) => {
    const row = bars.children[i], [name, bar, number] = row.children;
    name.textContent = labels[label];
    bar.style.setProperty("--share", probabilities[label].toFixed(4));
    number.textContent = (100 * probabilities[label]).toFixed(1) + "%";
    row.classList.toggle("best", label == best);
  });
}

// Images of the channels, or one image of all numbers.
function showLayer(numbers) {
  const [rows, columns] = first.length == 3 ? first.slice(1) : first.length == 2 ? first : grid(numbers.length);
  const count = first.length == 3 ? Math.min(first[0], 64) : 1, size = rows * columns;
  const most = Math.max(1e-9, ...numbers.map(Math.abs));
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

// A file: an image, or numbers of which the first may be a label.
async function open(file) {
  try {
    const isImage = file.type.startsWith("image/");
    const pixels = isImage ? await pixelsOfImage(file) : pixelsOfText(await file.text());
    if (pixels) {
      const small = field(width, height);
      put(small.context, pixels);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(small.canvas, 0, 0, pad.width, pad.height);
    }
    given = pixels;
    status.textContent = file.name;
    update();
  } catch (error) {
    status.textContent = `${file.name}: ${error.message}`;
  }
}

// The pixels of an image of the network's size; others are put on the pad, and the result is null.
async function pixelsOfImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => { throw new Error("is not an image that the browser can read"); });
  const {canvas, context} = field(bitmap.width, bitmap.height);
  context.drawImage(bitmap, 0, 0);
  if (bitmap.width == width && bitmap.height == height) return pixelsOf(context, width, height);
  const pixels = grey(context, bitmap.width, bitmap.height);
  const scale = Math.min(pad.width / bitmap.width, pad.height / bitmap.height);
  const [w, h] = [bitmap.width * scale, bitmap.height * scale];
  const light = channels == 1 && pixels[0] + pixels[pixels.length - 1] > 255 && about.dark;
  pen.fillStyle = "black";
  pen.fillRect(0, 0, pad.width, pad.height);
  pen.imageSmoothingEnabled = true;
  pen.filter = light ? "invert(1)" : "none";
  pen.drawImage(canvas, (pad.width - w) / 2, (pad.height - h) / 2, w, h);
  pen.filter = "none";
  return null;
}

function pixelsOfText(text) {
  const numbers = text.trim().split(/[\s,;]+/).map(Number), count = COUNT;
  const values = numbers.length == count + 1 ? numbers.slice(1) : numbers;
  if (values.length != count || !values.every(x => x >= 0 && x <= 255))
    throw new Error(`found ${numbers.length} numbers, expected ${count} from 0 to 255, or one more before them`);
  return Uint8Array.from(values);
}

const colour = document.getElementById("colour"); // only for colour images
let last = null;
function point(event) {
  const box = pad.getBoundingClientRect();
  return [(event.clientX - box.left) * pad.width / box.width, (event.clientY - box.top) * pad.height / box.height];
}

function line(to) {
  pen.strokeStyle = colour ? colour.value : "white";
  pen.lineWidth = 18;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(to[0] + 0.01, to[1]); // a line without length would not be drawn
  pen.stroke();
  last = to;
  given = null;
  updateSoon();
}

pad.addEventListener("pointerdown", event => {
  pad.setPointerCapture(event.pointerId);
  last = point(event);
  line(last);
});
pad.addEventListener("pointermove", event => {
  if (last) for (const part of event.getCoalescedEvents?.() ?? [event]) line(point(part));
});
for (const name of ["pointerup", "pointercancel"]) pad.addEventListener(name, () => (last = null));
document.getElementById("clear").addEventListener("click", clear);
document.getElementById("file").addEventListener("change", event => {
  if (event.target.files.length) open(event.target.files[0]);
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  event.preventDefault();
  if (event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
});
const ready = start();
